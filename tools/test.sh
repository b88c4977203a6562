#!/usr/bin/env bash
# Everything that has to hold before a change is taken: style, types, tests.
#   tools/test.sh                 everything but the tests marked "long"
#   tools/test.sh --quick         for while one edits, within 90 seconds: what needs no TensorFlow
#   tools/test.sh --long          also the tests marked "long", those marked "busy" after the others
#   tools/test.sh --matrix        only the core suite, on the oldest and the newest TensorFlow and Python
#   tools/test.sh --matrix 2.19:3.11 2.20:3.13 -- -k fit     on these, with options for pytest
#   tools/test.sh -k launch -x    other arguments go to pytest
set -euo pipefail
export PYTHONDONTWRITEBYTECODE=  # many processes import the same modules
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/venv.sh

if [[ ${1:-} == --matrix ]]; then
    shift
    exec .venv/bin/python tools/matrix.py "$@"
fi

# What --quick leaves out: tests that need TensorFlow, start processes or browsers, or run tools. A new file of tests
# belongs to it until it is named here.
slow=(
    tests/{chaos,collectives,doctor,elastic,graph,input,integration,keras_hooks,layers,models,policies,programs,ray,runtime}
    tests/{strategy,tensorboard,tools,updates}
    tests/membership/test_exhaustive.py
    tests/launch/test_{cli,kubernetes,options,remote,rendezvous,slurm,ssh,ssh_failures,supervisor,terminal}.py
    tests/pserver/test_{cli,console,fuzz_server,load,measuring,security,strangers}.py
    tests/test_{api,callbacks,doc_blocks,errors,notebook,packaging,private_names,site,versions}.py
)
# Most tests wait for something for a while, so more at a time than there are cores. All of a file in one process, as many
# share what is slow to make. In their order, which begins with those that take long (tests/conftest.py), so that all
# processes end together.
spread=(-n 5 --dist loadfile --no-loadscope-reorder)
arguments=()
parts=("not long")
for argument in "$@"; do
    if [[ $argument == --long ]]; then
        parts=("not busy" busy)
    elif [[ $argument == --quick ]]; then
        arguments+=("${slow[@]/#/--ignore=}")
        spread=(-n 8 --dist load)  # light ones, many of which wait for a deadline
    else
        arguments+=("$argument")
    fi
done

echo "ruff check";  .venv/bin/python -m ruff check .
echo "ruff format"; .venv/bin/python -m ruff format --check .
typed=$(mktemp)
trap 'rm -f "$typed"' EXIT
.venv/bin/python -m mypy >"$typed" 2>&1 &  # beside the tests: it keeps one core busy, they the others
mypy=$!
code=0
for part in "${parts[@]}"; do
    echo "pytest, $part"
    result=0
    .venv/bin/python -m pytest ${spread[@]+"${spread[@]}"} -m "$part" ${arguments[@]+"${arguments[@]}"} </dev/null || result=$?
    [[ $result == 0 || ($result == 5 && ${#parts[@]} == 2) ]] || code=$result  # 5: no such tests in this part
    spread=()
done
echo "mypy"
wait "$mypy" || code=$?
cat "$typed"
exit "$code"
