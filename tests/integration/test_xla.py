"""Programs with several workers whose steps XLA compiles in parts: ranks bitwise equal, and as plain Keras."""

from __future__ import annotations

from pathlib import Path

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
