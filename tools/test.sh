#!/usr/bin/env bash
# Everything that has to hold before a change is taken: style, types, tests.
#   tools/test.sh                 everything but the tests marked "long"
#   tools/test.sh --quick         for while one edits, within 90 seconds: what needs no TensorFlow
#   tools/test.sh --long          also the tests marked "long", in parts of at most 40 minutes, and says how long each took
#   tools/test.sh --part elastic  one of these parts: suite combinations integration elastic programs training others
#                                 storms tester busy
#   tools/test.sh --long tests/launch    the tests marked "long", too, of what other arguments of pytest choose
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
combined=(tests/integration/test_{combinations,programs,remote_updates,rows,tables,tables_saving}.py)
declare -A folders=(  # the parts of the long tests that have folders of their own; what none has is in "others"
    [combinations]="${combined[*]}"
    [integration]="tests/integration"
    [elastic]="tests/elastic tests/membership tests/recovery"
    [programs]="tests/programs tests/models tests/keras_own"
    [training]="tests/strategy tests/policies tests/updates tests/layers"
    [storms]="tests/chaos"
    [tester]="tests/tools/test_fuzz_programs.py"
)
every="suite ${!folders[*]} others busy"
arguments=()
parts=(suite)
while (($#)); do
    case $1 in
        --long)
            shift
            # shellcheck disable=SC2206  # several names
            parts=($every)
            (($#)) && parts=(all busy)
            continue
            ;;
        --part)
            shift
            parts=("${1:-}")
            if [[ ! " $every " == *" ${1:-} "* ]]; then
                echo "tools/test.sh: --part must be one of $every, got '${1:-}'" >&2
                exit 2
            fi
            ;;
        --quick)
            arguments+=("${slow[@]/#/--ignore=}")
            spread=(-n 8 --dist load)  # light ones, many of which wait for a deadline
            ;;
        *) arguments+=("$1") ;;
    esac
    shift
done

run() {  # what part $1 chooses of the tests
    case $1 in
        suite) .venv/bin/python -m pytest "${spread[@]}" "${arguments[@]}" ;;
        all) .venv/bin/python -m pytest "${spread[@]}" -m "not busy" "${arguments[@]}" ;;
        integration)
            .venv/bin/python -m pytest "${spread[@]}" -m "long and not busy" tests/integration \
                "${combined[@]/#/--ignore=}" "${arguments[@]}"
            ;;
        busy) .venv/bin/python -m pytest -m busy "${arguments[@]}" ;;  # alone: they leave no core to others
        others)
            # shellcheck disable=SC2206  # several folders
            local ignored=(${folders[*]})
            .venv/bin/python -m pytest "${spread[@]}" -m "long and not busy" "${ignored[@]/#/--ignore=}" "${arguments[@]}"
            ;;
        # shellcheck disable=SC2086  # several folders
        *) .venv/bin/python -m pytest "${spread[@]}" -m "long and not busy" ${folders[$1]} "${arguments[@]}" ;;
    esac
}

echo "ruff check";  .venv/bin/python -m ruff check .
echo "ruff format"; .venv/bin/python -m ruff format --check .
typed=$(mktemp)
trap 'rm -f "$typed"' EXIT
.venv/bin/python -m mypy >"$typed" 2>&1 &  # beside the tests: it keeps one core busy, they the others
mypy=$!
code=0
took=()
for part in "${parts[@]}"; do
    echo "pytest, $part"
    begin=$SECONDS result=0
    run "$part" </dev/null || result=$?
    [[ $result == 0 || ($result == 5 && ${parts[0]} == all) ]] || code=$result  # 5: no such tests in this part
    took+=("$part: $(((SECONDS - begin) / 60)) min $(((SECONDS - begin) % 60)) s, pytest ended with $result")
done
echo "mypy"
wait "$mypy" || code=$?
cat "$typed"
printf '%s\n' "${took[@]}"
exit "$code"
