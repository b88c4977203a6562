"""Ranks that no longer train alike all end, with an error that says what differs, at which step, and who has what."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack

import processes
import pytest

from tfps.pserver.server import ParameterServer

pytestmark = pytest.mark.timeout(400)
WEIGHTS = r"the weights after the update have checksum [0-9a-f]{16} on rank 0(, 2)? and [0-9a-f]{16} on rank 1"
RATE = r"learning_rate is 0.01 on rank 0(, 2)? and 0.005 on rank 1"
SUMS = "checksum [0-9a-f]{16} on rank 0(, 2)? and checksum [0-9a-f]{16} on rank 1"
END = r"no longer alike when an epoch or evaluate\(\) ended: "
# What happens after the fourth batch is seen in the fifth step; of weights, when a bucket's turn comes.
EXPECTED = {
    "set_weights": rf"at step [56] of \S*(kernel|bias)[^ ]* .*{WEIGHTS}",
    "permuted": rf"at step [56] of \S*kernel.*{WEIGHTS}",
    "load_weights": rf"at step [56] of .*{WEIGHTS}",
    "learning_rate": f"at step 5 of .*{RATE}",
    "several_steps": f"at step 5 of .*{RATE}",
    "iterations": "at step 5 of .*iterations? is 4 on rank 0(, 2)? and 1000 on rank 1",
    "accumulating": f"at step 3 of .*{RATE}",
    "eager": f"at step [56] of .*{RATE}",
    "eager_weights": f"at step [56] of .*{WEIGHTS}",
    "loop": f"at step 4 of .*{RATE}",
    "loop_eager": f"at step [45] of .*{RATE}",
    "unnoticed": "trained",
    "late set_weights": f"{END}\\S*kernel is {SUMS} .*more variables differ",
    "late learning_rate": f"{END}sgd(_\\d+)?/{RATE}",
    "late slot": f"{END}\\S*bias is {SUMS}",
    "late frozen": f"{END}\\S*kernel is {SUMS}",
    "late draw": f"{END}\\S*seed_generator_state is {SUMS}",
    "late evaluated": f"{END}\\S*kernel is {SUMS}",
    "late closed": "no longer alike when the strategy was closed: .* on rank 0(, 2)? and .* on rank 1",
    "late alone": "trained",
}
UNNOTICED = ("unnoticed", "late alone")
QUICK = [
    *("set_weights", "iterations", "eager"),
    *("late learning_rate", "late draw", "late closed"),
]


def run(workers: int, devices: int, names: Sequence[str]) -> list[str]:
    """The outputs of `workers` processes that go through the cases `names`."""
    with ExitStack() as stack:
        cases = []
        for name in names:
            server = ParameterServer("127.0.0.1", 0, workers=workers)
            stack.callback(server.stop)
            cases.append(f"{name}:{server.address.rpartition(':')[2]}")
        running = []
        for rank in range(workers):
            running.append(
                processes.start("diverging.py", str(rank), str(workers), str(devices), *cases, environment={})
            )
            stack.callback(running[-1].communicate)
            stack.callback(running[-1].kill)
        return [str(output) for output in processes.outputs(running, 350)]


def line_of(name: str, output: str) -> str:
    (line,) = (each for each in output.splitlines() if each.startswith(f"{name}, "))
    return line


@pytest.mark.parametrize(
    ("workers", "devices", "names"),
    [
        pytest.param(2, 1, QUICK, id="two workers"),
        pytest.param(2, 1, list(EXPECTED), id="all", marks=pytest.mark.long),
        pytest.param(
            3,
            1,
            ["set_weights", "iterations", "eager", "late draw", "late closed"],
            id="three workers",
            marks=pytest.mark.long,
        ),
        pytest.param(2, 2, ["set_weights", "learning_rate", "unnoticed"], id="two devices", marks=pytest.mark.long),
    ],
)
def test_ranks_that_diverge_all_fail_with_what_differs_and_those_that_do_not_train(
    workers: int, devices: int, names: list[str]
) -> None:
    for rank, output in enumerate(run(workers, devices, names)):
        for name in names:
            failure = "NoneType" if name in UNNOTICED else "MismatchError"
            line = line_of(name, output)
            assert line.startswith(f"{name}, {failure}: "), f"rank {rank}: {line}"
            assert re.search(EXPECTED[name], line), f"rank {rank}: {line}"


@pytest.mark.long
def test_loops_without_run_that_begin_or_end_differently_fail_by_name() -> None:
    outputs = run(2, 1, ["other seed", "fewer batches"])
    for output in outputs:
        assert re.search(
            r"seed, MismatchError: .*variable 'sequential/dense/kernel' has another initial value on rank 1 than on "
            r"rank 0.* set one seed on all ranks",
            line_of("other seed", output),
        )
    first, second = (line_of("fewer batches", output) for output in outputs)
    assert first == "fewer batches, NoneType: trained"
    assert re.search(r"batches, WorkerLostError: .*rank 0 .*left before step 3 .*same number of batches", second)
