"""Several workers with update="server": ranks bitwise equal, and as plain Keras within rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import processes
import pytest
import test_programs

SERVER = {"TFPS_UPDATE": "server", "TFPS_SLICE_BYTES": "4096", "TFPS_WINDOW_BYTES": "8192"}
PROGRAMS = ["adam", "embedding_sgd"]
pytestmark = pytest.mark.timeout(1200)
QUICK = [
    ("programs_remote", "saved_by_one_rank"),
    ("programs_remote", "finished_and_run_again"),
]
LONG = [
    ("programs_remote", "slots_loaded"),
    ("programs_precision", "loss_scaling"),
    ("programs_saving", "backup_shared"),
    ("programs_precision", "accumulation"),
    *(("programs_steps", name) for name in ("loop_function", "guide_steps", "gan", "own_train_step", "loop_eager")),
    *(
        ("programs_steps", "loop_epoch_function"),
        ("programs_input", "steps_per_execution"),
        ("programs_input", "uneven"),
    ),
    *(("programs_training", name) for name in ("helper_models", "strings", "gradients_none", "compile_again")),
    *(("programs_training", name) for name in ("fine_tuning", "train_on_batch", "two_strategies", "shared_variables")),
    *(("programs_precision", name) for name in ("loss_scaling_growth", "mixed_bfloat16", "options_of_optimizers")),
    *(("programs_saving", name) for name in ("saved_in_epochs", "checkpoints_shared", "checkpoints_own", "saved")),
    *(("programs_saving", name) for name in ("saved_in_one_place", "tensorboard", "tf_checkpoint", "weights_set")),
    *(("programs_saving", name) for name in ("backup_own", "weights_set_on_one_rank")),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The weights that one process without a strategy ends with."""
    out = tmp_path_factory.mktemp("alone") / "weights.npz"
    processes.outputs([processes.start("train.py", str(out), *PROGRAMS, environment={})])
    return dict(np.load(out))


@pytest.mark.long
@pytest.mark.parametrize(("workers", "devices"), [(1, 1), (2, 2), (3, 1)])
def test_workers_end_bitwise_equal_and_close_to_one_process_on_the_global_batch(
    workers: int, devices: int, alone: dict[str, np.ndarray], tmp_path: Path
) -> None:
    files = [tmp_path / f"{rank}.npz" for rank in range(workers)]
    arguments = [[str(file), *PROGRAMS] for file in files]
    with (
        processes.pservers(2, workers) as addresses,
        processes.started("train.py", addresses, workers, arguments, **SERVER, DEVICES=str(devices)) as running,
    ):
        processes.outputs(running)
    first, *others = (dict(np.load(file)) for file in files)
    for other in others:
        for name in first:
            assert first[name].tobytes() == other[name].tobytes(), name
    for name, expected in alone.items():
        difference = np.abs(first[name] - expected).max() / np.abs(expected).max()
        assert difference < 1e-5, f"{name}: {difference}"


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> test_programs.Results:
    return test_programs.run(QUICK, tmp_path_factory.mktemp("quick"), more=SERVER)


@pytest.mark.parametrize("name", [name for _, name in QUICK])
def test_two_workers_do_what_plain_keras_does(name: str, quick: test_programs.Results) -> None:
    test_programs.check(name, quick)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> test_programs.Results:
    return test_programs.run(LONG, tmp_path_factory.mktemp("long"), more=SERVER)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for _, name in LONG])
def test_two_workers_do_what_plain_keras_does_in_more_programs(name: str, long: test_programs.Results) -> None:
    test_programs.check(name, long)


def test_a_rank_that_assigns_alone_fails_the_job_by_name(tmp_path: Path) -> None:
    results = test_programs.run([("programs_remote", "assigned_on_one_rank")], tmp_path, more=SERVER)
    for result in results[1:]:
        text = result["assigned_on_one_rank"]["own refused"]
        assert "have different values that the program has assigned to its variables" in text, result
