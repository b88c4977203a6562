#!/usr/bin/env bash
# Trains examples/digits.py with 2 workers and 2 pservers on this machine. Fails when the accuracy is below 0.97.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/venv.sh

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# TensorFlow's notes at its start would hide what is to be seen here; a model this small gains nothing from oneDNN.
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2} TF_ENABLE_ONEDNN_OPTS=${TF_ENABLE_ONEDNN_OPTS:-0}
echo "Training on handwritten digits with 2 workers and 2 pservers ..."
.venv/bin/python -m tfps.launch --workers 2 --pservers 2 --log "$log" examples/digits.py

result=$(sed -n 's/^\[worker 0\] \(test_accuracy=.*\)/\1/p' "$log")
accuracy=$(sed -n 's/^test_accuracy=\([0-9.]*\) .*/\1/p' <<<"$result")
if ! awk -v accuracy="${accuracy:-0}" 'BEGIN { exit !(accuracy >= 0.97) }'; then
    echo "demo: FAILED, the test accuracy is ${accuracy:-missing}, expected at least 0.97" >&2
    exit 1
fi
cat <<'END'

Where to go next:
  examples/digits.py                        the script that has just run; "tfps.Strategy()" is what makes it distributed
  .venv/bin/python examples/digits.py       the same in one process
  .venv/bin/tfps_launch --help              start your own script that way
  README.md                                 several machines, settings, how it works
END
echo "demo: $result"
