"""Programs as users write them, with two workers: ranks bitwise equal, and as plain Keras within rounding.

What the programs do is in the modules named here. One job runs all programs of a module; each has a test of its own.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import processes
import pytest
from keras_versions import NEEDS_ORBAX, NOT_IN_KERAS_3_8

from tfps.pserver.server import ParameterServer
from tfps.types import Value

TIMEOUT_S = 1100.0  # of one job with many programs, on a busy machine; a minute is usual
pytestmark = pytest.mark.timeout(2400)

# The first of each pair belongs to the quick suite, the second is long.
PROGRAMS = {
    "programs_steps": (
        ["loop_function"],
        [
            "logs_that_differ",
            "guide_steps",
            "without_call",
            "own_logs",
            "metrics_of_one_name",
            "gan",
            "own_train_step",
            "loop_eager",
            "loop_epoch_function",
        ],
    ),
    "programs_named": ([], ["named", "not_named"]),
    "programs_loops": ([], ["loop_divided", "loop_alike"]),
    "programs_metrics": ([], ["states", "built_in_metrics", "metrics_that_do_not_add_up"]),
    "programs_training": (
        ["predicted_on_one_rank"],
        [
            "captured_constant",
            "helper_models",
            "adapted",
            "strings",
            "gradients_none",
            "compile_again",
            "fine_tuning",
            "train_on_batch",
            "two_strategies",
            "shared_variables",
        ],
    ),
    "programs_precision": (
        ["accumulation"],
        [
            "loss_scaling",
            "loss_scaling_growth",
            "mixed_bfloat16",
            "float64",
            "options_of_optimizers",
            "regularizers_and_constraints",
        ],
    ),
    "programs_input": (
        [],
        [
            "stopping",
            "generator_again",
            "cached",
            "py_dataset_in_epochs",
            "in_any_order",
            "scalar_beside_rows",
            *("weighted", "evaluated", "steps_per_execution", "generator", "py_dataset", "autoshard_data"),
            *("autoshard_file", "autoshard_off", "from_function", "shuffled", "uneven"),
        ],
    ),
    "programs_saving": (
        [],
        [
            *("saved_in_epochs", "backup_shared"),
            *("checkpoints_shared", "checkpoints_own", "backup_own", "saved", "saved_in_one_place", "tensorboard"),
            "tensorboard_shared",
            *("csv_appended", "monitored", "tf_checkpoint", "weights_set", "weights_set_on_one_rank"),
        ],
    ),
}
# Each in a job of its own: where one does not work it may take the others with it.
BY_THEMSELVES = [
    "programs_input.files_uneven",
    "programs_training.batch_normalization",
    pytest.param("programs_saving.orbax", marks=NEEDS_ORBAX),
]
# Half types round each rank's gradients by themselves.
TOLERANCE = {"loss_scaling": 5e-3, "mixed_bfloat16": 3e-2}
Results = list[dict[str, Value]]  # of plain Keras and of each rank


def run(
    names: list[tuple[str, str]],
    folder: Path,
    workers: int = 2,
    devices: int = 1,
    more: Mapping[str, str] = MappingProxyType({}),
    timeout_s: float = TIMEOUT_S,
) -> Results:
    """Runs programs, (module, name), with several workers (`more`: their settings) and in plain Keras at once."""
    arguments = [str(folder / "job"), *(f"{module}.{name}" for module, name in names)]
    plain = [str(folder / "plain"), *arguments[1:]]
    servers = [ParameterServer("127.0.0.1", 0, workers=workers) for _ in range(2)]
    settings = {"TFPS_SLICE_BYTES": "4096", "TFPS_WINDOW_BYTES": "8192", "DEVICES": str(devices), **more}
    alone = processes.start("program.py", *plain, environment={})
    try:
        addresses = [server.address for server in servers]
        with processes.started("program.py", addresses, workers, [arguments] * workers, **settings) as running:
            processes.outputs([*running, alone], timeout_s)
    finally:
        alone.kill()
        alone.communicate()
        for server in servers:
            server.stop()
    ranks = [folder / "job" / f"results_{rank}.pickle" for rank in range(workers)]
    return [pickle.loads(file.read_bytes()) for file in (folder / "plain" / "results_plain.pickle", *ranks)]


def check(name: str, results: Results, rounding: float = 1e-5) -> None:
    """Ranks bitwise equal, and plain Keras within `rounding`."""
    check_ranks(name, results)
    plain, rank, *_ = (result[name] for result in results)
    for key in (key for key in plain if not key.startswith(("own", "ranks"))):
        expected, found = np.asarray(plain[key]), np.asarray(rank[key])
        assert found.shape == expected.shape, f"{key}: {found}, plain Keras {expected}"
        if found.size:
            difference = np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30)
            assert difference < TOLERANCE.get(name, rounding), (
                f"{key} differs by {difference}: {found}, plain {expected}"
            )


def check_ranks(name: str, results: Results) -> None:
    """No errors, and ranks bitwise equal."""
    plain, *ranks = (result[name] for result in results)
    for who, result in (("plain Keras", plain), *((f"rank {rank}", result) for rank, result in enumerate(ranks))):
        assert "error" not in result, f"{who}:\n{result['error']}"
        assert result.keys() == plain.keys(), who
    for key in (key for key in plain if not key.startswith("own")):
        mine, *others = (np.asarray(result[key]) for result in ranks)
        for rank, other in enumerate(others, 1):
            assert mine.tobytes() == other.tobytes(), f"{key}: rank 0 has {mine}, rank {rank} {other}"


QUICK = [(module, name) for module, (quick, _) in PROGRAMS.items() for name in quick]
LONG = [
    pytest.param(module, name, id=name, marks=[NOT_IN_KERAS_3_8] if name == "from_function" else [])
    for module, (_, long) in PROGRAMS.items()
    for name in long
]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(QUICK, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """The results of a module's long programs, in one job."""

    @functools.cache
    def results(module: str) -> Results:
        return run([(module, name) for name in PROGRAMS[module][1]], tmp_path_factory.mktemp(module))

    return results


@pytest.mark.parametrize("name", [name for _, name in QUICK])
def test_two_workers_do_what_plain_keras_does(name: str, quick: Results) -> None:
    check(name, quick)


@pytest.mark.long
@pytest.mark.parametrize(("module", "name"), LONG)
def test_two_workers_do_what_plain_keras_does_in_more_programs(
    module: str, name: str, long: Callable[[str], Results]
) -> None:
    check(name, long(module))


@pytest.mark.long
def test_logs_that_differ_between_ranks_are_refused_by_name(long: Callable[[str], Results]) -> None:
    for result in long("programs_steps")[1:]:
        text, keys, shape = result["logs_that_differ"]["ranks refused"]
        assert "logs['text']" in text
        assert "['a', 'b0'], rank 1 ['a', 'b1']" in keys
        assert "logs['a/b']" in shape


def test_accumulated_gradients_are_sent_when_they_are_applied_only(quick: Results) -> None:
    for result in quick[1:]:
        assert result["accumulation"]["own pushes"] == 4  # 12 steps, every third is applied


@pytest.mark.long
def test_accumulated_gradients_of_many_buckets_are_sent(tmp_path: Path) -> None:
    """A gate that closes before an accumulator behind it has been read would never open."""
    small = {"TFPS_SLICE_BYTES": "64", "TFPS_WINDOW_BYTES": "4096"}
    check("accumulation", run([("programs_precision", "accumulation")], tmp_path, more=small))


@pytest.mark.long
def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(long: Callable[[str], Results]) -> None:
    for result in long("programs_precision"):
        ends = result["loss_scaling"]
        assert ends["scales"][:4] == [32768.0, 32768.0, 16384.0, 16384.0]
        assert ends["iterations"] == 10  # of 12: one step in each of two epochs


def test_one_rank_predicts_alone_within_an_epoch_what_one_process_does(quick: Results) -> None:
    plain, first, second = (result["predicted_on_one_rank"]["own predictions"] for result in quick)
    np.testing.assert_allclose(first, plain, rtol=1e-4, atol=1e-5)
    assert len(plain) == 4
    assert not len(second)


@pytest.mark.long
def test_a_backup_of_rank_0_restores_every_rank(long: Callable[[str], Results]) -> None:
    for result in long("programs_saving"):
        assert list(result["backup_shared"]["epochs"]) == [2, 3]


@pytest.mark.long
@pytest.mark.parametrize("program", BY_THEMSELVES)
def test_two_workers_do_what_is_to_be_expected(program: str, tmp_path: Path) -> None:
    module, name = program.split(".")
    check(name, run([(module, name)], tmp_path))
