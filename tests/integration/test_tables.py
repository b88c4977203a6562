"""Several workers, or replicas, with tables of rows do what one process does; see programs_tables.py."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import processes
import pytest
import test_programs
from test_programs import Results

from tfps.pserver.server import ParameterServer

pytestmark = pytest.mark.timeout(600)
SMALL = {"TFPS_SLICE_BYTES": "4096", "TFPS_WINDOW_BYTES": "8192"}
TOLERANCE = {"float16": 5e-3, "bfloat16": 3e-2}  # each replica rounds its gradients by itself
PROGRAMS = [
    *("sgd", "adam", "one_row", "eagerly", "unseeded", "own_optimizer", "several_optimizers", "only_tables"),
    *("combined", "ragged", "float16", "bfloat16", "own_step", "loop", "loop_function"),
]
ONE_DEVICE = ["several_steps", "loop_alike"]  # as under every strategy; docs/semantics.md
NOT_SERVER = ["several_optimizers", "loop_alike"]  # what update="server" refuses
# By a name: workers, devices of each, settings, and programs.
JOBS: dict[str, tuple[int, int, dict[str, str], list[str]]] = {
    "2 workers": (2, 1, SMALL, ["adam", "own_optimizer", "loop_alike"]),
    "2 workers, 2 devices": (2, 2, SMALL, ["one_row", "unseeded", "combined"]),
    "2 workers, more": (2, 1, SMALL, [*PROGRAMS, *ONE_DEVICE]),
    "2 workers, 2 devices, more": (2, 2, SMALL, PROGRAMS),
    "2 devices": (1, 2, SMALL, PROGRAMS),
    "3 workers": (3, 1, SMALL, [*PROGRAMS, *ONE_DEVICE]),
    "server": (
        *(2, 1, {**SMALL, "TFPS_UPDATE": "server"}),
        [name for name in [*PROGRAMS, *ONE_DEVICE] if name not in NOT_SERVER],
    ),
    "skip": (2, 1, {**SMALL, "TFPS_ON_NONFINITE": "skip"}, ["not_finite", "adam"]),
}
QUICK = ("2 workers", "2 workers, 2 devices")
Job = Callable[[str], Results]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The results of a job's programs, in one process and of each rank."""

    @functools.cache
    def results(name: str) -> Results:
        workers, devices, settings, programs = JOBS[name]
        pairs = [("programs_tables", each) for each in programs]
        return test_programs.run(pairs, tmp_path_factory.mktemp("tables"), workers, devices, settings)

    return results


def check(name: str, results: Results) -> None:
    """Ranks bitwise equal, and one process within rounding."""
    test_programs.check_ranks(name, results)
    one, rank, *_ = (result[name] for result in results)
    for key in (key for key in one if not key.startswith(("own", "ranks"))):
        expected, found = np.asarray(one[key]), np.asarray(rank[key])
        assert found.shape == expected.shape, key
        difference = np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30)
        assert difference < TOLERANCE.get(name, 1e-5), f"{key} differs by {difference}: {found}, one process {expected}"


@pytest.mark.parametrize(
    ("name", "program"),
    [
        pytest.param(job, name, id=f"{job}, {name}", marks=[] if job in QUICK else [pytest.mark.long])
        for job, (*_, names) in JOBS.items()
        for name in names
    ],
)
def test_workers_do_what_one_process_does_with_the_global_batch(name: str, program: str, job: Job) -> None:
    check(program, job(name))


def run_by_itself(folder: Path, programs: list[str], pservers: int, workers: int = 2, **settings: str) -> Results:
    """The results of each rank."""
    servers = [ParameterServer("127.0.0.1", 0, workers=workers) for _ in range(pservers)]
    arguments = [str(folder), *(f"programs_tables.{name}" for name in programs)]
    try:
        addresses = [server.address for server in servers]
        with processes.started("program.py", addresses, workers, [arguments] * workers, **settings) as running:
            processes.outputs(running)
    finally:
        for server in servers:
            server.stop()
    return [pickle.loads((folder / f"results_{rank}.pickle").read_bytes()) for rank in range(workers)]
