#!/usr/bin/env bash
# Everything that has to hold before a change is taken: style, types, tests.
#   tools/test.sh                 what is quick enough to run often
#   tools/test.sh --long          also the tests marked "long"
#   tools/test.sh -k launch -x    other arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/venv.sh

arguments=()
for argument in "$@"; do
    if [[ $argument == --long ]]; then
        arguments+=(-m "long or not long")
    else
        arguments+=("$argument")
    fi
done

echo "ruff check";  .venv/bin/python -m ruff check .
echo "ruff format"; .venv/bin/python -m ruff format --check .
echo "mypy";        .venv/bin/python -m mypy
echo "pytest";      .venv/bin/python -m pytest ${arguments[@]+"${arguments[@]}"} </dev/null
