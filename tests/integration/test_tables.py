"""Several workers, or replicas, with tables of rows do what one process does; see programs_tables.py."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import processes
import pytest
import test_programs
from test_programs import Results

from tfps.pserver.server import ParameterServer

pytestmark = pytest.mark.timeout(1200)
DETERMINISTIC = {"TFPS_DETERMINISTIC": "1"}
SMALL = {"TFPS_SLICE_BYTES": "4096", "TFPS_WINDOW_BYTES": "8192"}
TOLERANCE = {"float16": 5e-3, "bfloat16": 3e-2}  # each replica rounds its gradients by itself
PROGRAMS = [
    *("sgd", "adam", "one_row", "eagerly", "unseeded", "own_optimizer", "several_optimizers", "only_tables"),
    *("combined", "ragged", "float16", "bfloat16", "own_step", "loop", "loop_function"),
]
ONE_DEVICE = ["several_steps", "loop_alike", "every_other_batch"]  # as under every strategy; docs/semantics.md
NOT_SERVER = ["several_optimizers", "loop_alike"]  # what update="server" refuses
# By a name: workers, devices of each, settings, and programs.
JOBS: dict[str, tuple[int, int, dict[str, str], list[str]]] = {
    "2 workers, 2 devices": (2, 2, SMALL, ["one_row"]),
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
QUICK = ("2 workers, 2 devices",)
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


def check(name: str, results: Results, tolerance: float = 1e-5) -> None:
    """Ranks bitwise equal, and one process within rounding."""
    test_programs.check_ranks(name, results)
    one, rank, *_ = (result[name] for result in results)
    for key in (key for key in one if not key.startswith(("own", "ranks"))):
        expected, found = np.asarray(one[key]), np.asarray(rank[key])
        assert found.shape == expected.shape, key
        difference = np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30)
        assert difference < TOLERANCE.get(name, tolerance), f"{key} differs by {difference}: {found}, not {expected}"


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


# One machine, several devices, without tfps. Batches divide: TensorFlow takes the mean of the means of replicas.
MIRRORED = ["sgd", "adam", "own_optimizer", "only_tables", "combined", "bfloat16"]


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """In one process, and under `tf.distribute.MirroredStrategy`."""
    folders = [tmp_path_factory.mktemp("mirrored") for _ in range(2)]
    environments = [{}, {"MIRRORED": "1", "DEVICES": "2"}]
    programs = [f"programs_tables.{name}" for name in MIRRORED]
    running = [
        processes.start("program.py", str(folder), *programs, environment=environment)
        for folder, environment in zip(folders, environments, strict=True)
    ]
    processes.outputs(running, test_programs.TIMEOUT_S)
    return [pickle.loads((folder / "results_plain.pickle").read_bytes()) for folder in folders]


@pytest.mark.long
@pytest.mark.parametrize("name", MIRRORED)
def test_two_devices_under_tensorflows_strategy_do_what_one_does(name: str, mirrored: Results) -> None:
    check(name, mirrored, 1e-6)


def run(
    folder: Path,
    program: str,
    settings: Mapping[str, str] = MappingProxyType({}),
    *,
    pservers: int = 2,
    workers: int = 2,
    died: int = 0,
) -> Results:
    """What a program ends with on each rank, of which the last ones have `died`."""
    servers = [ParameterServer("127.0.0.1", 0, workers=workers) for _ in range(pservers)]
    arguments = [str(folder), f"programs_tables.{program}"]
    try:
        addresses = [server.address for server in servers]
        with processes.started("program.py", addresses, workers, [arguments] * workers, **settings) as running:
            processes.outputs(running[: workers - died])
            assert [code for code, _ in processes.finish(running[workers - died :])] == [-9] * died
    finally:
        for server in servers:
            server.stop()
    files = [folder / f"results_{rank}.pickle" for rank in range(workers - died)]
    return [{program: pickle.loads(file.read_bytes())[program]} for file in files]


def check_alike(program: str, results: Results) -> None:
    """Ranks bitwise equal, and no errors."""
    test_programs.check_ranks(program, [results[0], *results])


@pytest.mark.long
def test_the_number_of_pservers_changes_no_bit(tmp_path: Path) -> None:
    ends = [run(tmp_path / str(count), "adam", DETERMINISTIC, pservers=count)[0]["adam"] for count in (1, 2, 3)]
    for other in ends[1:]:
        for key, value in ends[0].items():
            assert np.asarray(other[key]).tobytes() == np.asarray(value).tobytes(), key


@pytest.mark.long
@pytest.mark.parametrize(("codec", "tolerance"), [("bfloat16", 0.02), ("int8", 0.1)])
def test_compressed_gradients_train_all_ranks_alike(codec: str, tolerance: float, tmp_path: Path) -> None:
    """Nearly as without; tables have no residuals, so they take bfloat16 for int8."""
    exact, found = (run(tmp_path / name, "sgd", {**SMALL, "TFPS_COMPRESSION": name}) for name in ("none", codec))
    check_alike("sgd", found)
    for key in ("rows/0", "rows/1"):
        expected, got = exact[0]["sgd"][key], found[0]["sgd"][key]
        assert 0 < np.abs(got - expected).max() < tolerance * np.abs(expected).max()


MODES = {
    "async": {"TFPS_MODE": "async", "TFPS_UPDATE": "server"},
    "diloco": {"TFPS_MODE": "diloco", "TFPS_INNER_STEPS": "4"},
    "local": {"TFPS_MODE": "local", "TFPS_INNER_STEPS": "4"},
}


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_workers_that_step_by_themselves_learn_and_then_read_the_same(mode: str, tmp_path: Path) -> None:
    check_alike("independent", run(tmp_path, "independent", MODES[mode]))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_workers_that_step_by_themselves_go_back_to_their_best_epoch(mode: str, tmp_path: Path) -> None:
    check_alike("best", run(tmp_path, "best", MODES[mode]))


@pytest.mark.long
def test_workers_go_on_without_one_that_dies(tmp_path: Path) -> None:
    results = run(tmp_path, "lost", {**SMALL, "TFPS_MIN_WORKERS": "1"}, workers=3, died=1)
    check_alike("lost", results)
    ends = results[0]["lost"]
    assert ends["ranks"].tolist() == [0, 1]
    losses = ends["history/0/loss"]
    assert len(losses) == 6
    assert losses[-1] < 0.9 * losses[0]
    assert np.isfinite(ends["rows/0"]).all()


def refused(folder: Path, program: str) -> list[tuple[str, str]]:
    results = [result[program] for result in run(folder, program)]
    assert all("error" not in result for result in results), results
    return [result["own refused"] for result in results]


@pytest.mark.parametrize(
    ("program", "error", "texts"),
    [
        pytest.param("different", "MismatchError", ["'users/embeddings' (1, 4)", "(1, 5)"], marks=pytest.mark.long),
        pytest.param("too_large", "ConfigError", ["must fit into", "28000000"], marks=pytest.mark.long),
    ],
)
def test_tables_that_cannot_be_are_refused_on_all_ranks(
    program: str, error: str, texts: list[str], tmp_path: Path
) -> None:
    for name, text in refused(tmp_path, program):
        assert name == error, text
        assert all(each in text for each in texts), text


def test_an_id_that_a_table_has_not_ends_the_job_by_its_name(tmp_path: Path) -> None:
    (first, _), (name, text) = refused(tmp_path, "out_of_range")
    assert name == "InvalidArgumentError"
    assert "layer \\'users\\': an id must be from 0 to 59, got] [60]" in text
    assert first == "WorkerLostError"
