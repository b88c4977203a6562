"""Programs with several workers whose steps XLA compiles in parts: ranks bitwise equal, and as plain Keras."""

from __future__ import annotations

import re
from pathlib import Path

import processes
import pytest
from test_programs import PROGRAMS, Results, check, run

pytestmark = pytest.mark.timeout(2400)
XLA = {"TFPS_XLA": "on", "TFPS_XLA_PART_BYTES": "2048"}
QUICK = [("programs_input", "uneven")]
ROUNDING = 1e-4  # plain Keras is not compiled here
MODULES = ["programs_steps", "programs_training", "programs_precision", "programs_input", "programs_metrics"]
LONG = {
    **{module: [name for part in PROGRAMS[module] for name in part] for module in MODULES},
    "programs_tables": ["sgd", "adam"],
}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(QUICK, tmp_path_factory.mktemp("quick"), more=XLA)


@pytest.mark.parametrize("name", [name for _, name in QUICK])
def test_two_workers_do_what_plain_keras_does(name: str, quick: Results) -> None:
    check(name, quick, ROUNDING)


@pytest.mark.long
@pytest.mark.parametrize("module", LONG)
def test_two_workers_do_what_plain_keras_does_in_more_programs(module: str, tmp_path: Path) -> None:
    results = run([(module, name) for name in LONG[module]], tmp_path, more=XLA)
    for name in LONG[module]:
        check(name, results, ROUNDING)


@pytest.mark.long
def test_who_waits_for_a_rank_that_compiles_says_so() -> None:
    with processes.pservers(2, 2) as addresses, processes.started("compiling.py", addresses, 2, [[], []]) as running:
        first, second = processes.outputs(running)
    assert ("sizes 1" in first, "sizes 2" in second) == (True, True)
    line = r"tfps: waits for rank 1 \(\S+\), which compiles; \d+ s so far, step {} of "
    assert re.search(line.format(2), first), first
    assert not re.search(line.format(3), first), "it was over"
