#!/usr/bin/env bash
# Everything that has to hold before a change is taken: style, types, tests.
#   tools/test.sh                 everything but the tests marked "long"
#   tools/test.sh --quick         for while one edits, within 90 seconds: what starts no workers and trains no models
#   tools/test.sh --long          also the tests marked "long"
#   tools/test.sh --matrix        only the core suite, on the oldest and the newest TensorFlow and Python
#   tools/test.sh --matrix 2.19:3.11 2.20:3.13 -- -k fit     on these, with options for pytest
#   tools/test.sh -k launch -x    other arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/venv.sh

if [[ ${1:-} == --matrix ]]; then
    shift
    exec .venv/bin/python tools/matrix.py "$@"
fi

# What --quick leaves out; a new file of tests belongs to it until it is named here.
slow=(
    tests/{integration,tensorboard,tools}
    tests/input/test_{lockstep,staging}.py
    tests/launch/test_cli.py
    tests/runtime/test_{interrupts,trace_run}.py
    tests/strategy/test_{combined,compiling,exactness,graph_view,overlap,strategy}.py
    tests/test_callbacks.py
)
arguments=()
for argument in "$@"; do
    if [[ $argument == --long ]]; then
        arguments+=(-m "long or not long")
    elif [[ $argument == --quick ]]; then
        arguments+=("${slow[@]/#/--ignore=}")
    else
        arguments+=("$argument")
    fi
done

echo "ruff check";  .venv/bin/python -m ruff check .
echo "ruff format"; .venv/bin/python -m ruff format --check .
echo "mypy";        .venv/bin/python -m mypy
# Four at a time: most tests wait for something for a while. All of a file on one of them, as many share what is slow to
# make. In their order, which begins with those that take long (tests/conftest.py), so that all end together.
echo "pytest";      .venv/bin/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder ${arguments[@]+"${arguments[@]}"} </dev/null
