"""Data that the program shuffles without a seed: ranks get the same order, or an error says that they do not."""

from __future__ import annotations

import re
from contextlib import ExitStack

import processes
import pytest

from tfps.pserver.server import ParameterServer

pytestmark = pytest.mark.timeout(400)
EVERY = 2
PARTED = "MismatchError: .*batch 4 of an epoch must have the same data on all ranks, but rank . has other targets"
DIFFERENT = "MismatchError: .*the first batch of an epoch must have the same data on all ranks"
SAME = "have made the same first batch, each for itself"  # all ranks, or those with one row more
EXPECTED = {
    "arrays": r"\[64.0, 64.0\]",
    "shuffle": r"\[64.0, 64.0\]",
    "sequence": r"\[64.0, 64.0\]",
    "generator": r"\[64.0, 64.0\]",
    "validated": r"\[48.0, 48.0\]",
    "noise": r"\[64.0, 64.0\]",
    "cropped": r"\[64.0, 64.0\]",
    "parting": PARTED,
    "parting, evaluate": "MismatchError: .* must have the same data on all ranks, but rank . has other targets",
    "set": DIFFERENT + ".* has other inputs .*PYTHONHASHSEED=0",
    "evaluate": "64.0",
    "own order": DIFFERENT,
    "own order, evaluate": DIFFERENT,
    "own order, loop": DIFFERENT,
    "own order, off": "",
    "off": "",
}
QUICK = ["arrays", "parting", "set", "own order, off", "off"]


@pytest.mark.parametrize(
    ("workers", "names"),
    [
        pytest.param(2, QUICK, id="2"),
        *(pytest.param(count, list(EXPECTED), id=f"{count}, all", marks=pytest.mark.long) for count in (2, 3)),
    ],
)
def test_without_a_seed_each_row_is_used_once_in_an_epoch_or_an_error_says_that_orders_differ(
    workers: int, names: list[str]
) -> None:
    with ExitStack() as stack:
        cases = []
        for name in names:
            server = ParameterServer("127.0.0.1", 0, workers=workers)
            stack.callback(server.stop)
            cases.append(f"{name}:{server.address.rpartition(':')[2]}")
        environment = {"TFPS_WORKERS": str(workers), "TFPS_CHECK_EVERY": str(EVERY)}
        running = []
        for rank in range(workers):
            variables = {**environment, "TFPS_RANK": str(rank)}
            running.append(processes.start("unseeded.py", *cases, environment=variables))
            stack.callback(running[-1].communicate)
            stack.callback(running[-1].kill)
        for rank, output in enumerate(processes.outputs(running, 350)):
            before, _, after = str(output).partition("own order, off: ")
            assert SAME not in before, f"rank {rank}"
            assert SAME in after, f"rank {rank}: all ranks shuffle alike, and AutoShardPolicy.OFF does not divide"
            for name in names:
                (line,) = (each for each in str(output).splitlines() if each.startswith(f"{name}: "))
                assert re.search(f": {EXPECTED[name]}", line), f"rank {rank}: {line}"
