"""Ray Train's `TensorflowTrainer` with pservers: restarts, checkpoints, failures and arguments in Ray's terms."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import jobs
import on_ray
import pytest

import tfps
import tfps.ray
from tfps.config import Launch
from tfps.errors import WorkerLostError
from tfps.types import Argument, Options

ray = pytest.importorskip("ray", reason=on_ray.NEEDS_RAY)
pytest.importorskip("pyarrow", reason=on_ray.NEEDS_RAY)
pytestmark = [pytest.mark.long, pytest.mark.timeout(900), pytest.mark.usefixtures("cluster")]
for module in (sys.modules[__name__], on_ray, jobs):  # which Ray's processes cannot import
    ray.cloudpickle.register_pickle_by_value(module)


def fit(
    loop: Callable[[Options], object],
    folder: Path,
    max_failures: int = 0,
    workers: int | tuple[int, int] = 2,
    scaling: Options | None = None,
    given: Options | None = None,
    **config: Argument,
) -> Argument:
    """Ray's result; `loop` gets the folder, which all nodes share, and what is `given`."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    trainer = TensorflowTrainer(
        loop,
        train_loop_config={"folder": folder, **(given or {})},
        tensorflow_config=tfps.ray.TensorflowConfig(**config),
        scaling_config=ScalingConfig(num_workers=workers, placement_strategy="SPREAD", **(scaling or {})),
        run_config=RunConfig(
            name="run", storage_path=str(folder), failure_config=FailureConfig(max_failures=max_failures)
        ),
    )
    try:
        return trainer.fit()
    except ray.train.ControllerError:
        on_ray.remove_groups()  # Ray Train leaves that to what needs the dashboard
        raise
    finally:
        on_ray.nothing_is_left()


def dies_once(config: Options) -> Options:
    """Rank 1 dies in the second epoch, once. Notes where each run began."""
    strategy = tfps.Strategy()

    def dies(began: int, step: int) -> None:
        if strategy.rank == 1 and began == 0 and step >= 6:
            ray.train.get_all_reported_checkpoints()  # waits until Ray knows of the one that was reported last
            on_ray.die(config["signal"])

    return trained(strategy, config["folder"], dies, " with " + " ".join(strategy.pservers))


def trained(strategy: tfps.Strategy, folder: Path, each: Callable[[int, int], None], noted: str) -> Options:
    """Three epochs of 4 steps. `each` gets the step that this run began at, and that which has just ended."""
    import keras
    import numpy as np
    import ray.train
    from ray.air.integrations.keras import ReportCheckpointCallback

    context = ray.train.get_context()
    assert (strategy.rank, strategy.num_workers) == (context.get_world_rank(), context.get_world_size())
    checkpoint = ray.train.get_checkpoint()
    with strategy.scope():
        if checkpoint is None:
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4)])
            model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        else:
            with checkpoint.as_directory() as directory:
                model = keras.models.load_model(Path(directory) / "model.keras")
    began = int(model.optimizer.iterations.numpy())
    (folder / f"{strategy.rank} began at {began}{noted}").touch()

    class Each(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            each(began, int(model.optimizer.iterations.numpy()))

    inputs, targets = np.ones((64, 8), "float32"), np.ones((64, 4), "float32")
    callbacks = [ReportCheckpointCallback(), Each()]
    model.fit(inputs, targets, batch_size=16, initial_epoch=began // 4, epochs=3, verbose=0, callbacks=callbacks)
    return {"weights": [weight.tolist() for weight in model.get_weights()]}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_job_whose_worker_dies_starts_again_from_its_checkpoint_with_new_pservers(
    number: int, tmp_path: Path
) -> None:
    result = fit(dies_once, tmp_path, max_failures=1, given={"signal": number})
    began = sorted(path.name.split(" with ") for path in tmp_path.glob("* began at *"))
    assert [name for name, _ in began] == ["0 began at 0", "0 began at 4", "1 began at 0", "1 began at 4"]
    before, after = began[0][1].split(), began[1][1].split()
    assert len(before) == len(after) == 2  # two nodes
    assert not set(before) & set(after)
    assert result.metrics.keys() == {"loss"}
    assert (Path(result.checkpoint.path) / "model.keras").exists()
    check_weights(result)


def check_weights(result: Argument) -> None:
    """They are those of one process that was not interrupted."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    model.fit(np.ones((64, 8), "float32"), np.ones((64, 4), "float32"), batch_size=16, epochs=3, verbose=0)
    for ours, theirs in zip(result.return_value["weights"], model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def resizes(config: Options) -> Options:
    """The node of rank 1 is lost in the second epoch; the worker that is left waits in the third for another one."""
    strategy = tfps.Strategy()
    workers: int = strategy.num_workers

    def each(began: int, step: int) -> None:
        if strategy.rank == 1 and began == 0 and step == 6:
            ray.train.get_all_reported_checkpoints()  # waits until Ray knows of the one that was reported last
            on_ray.lose_node()
        if workers == 1 and step == 9:
            ray.train.get_all_reported_checkpoints()
            (config["folder"] / "alone").touch()
            on_ray.wait_to_be_ended()

    return trained(strategy, config["folder"], each, f" of {workers}")


def test_an_elastic_job_goes_on_from_its_checkpoint_with_as_many_workers_as_there_are_nodes(
    spot: Callable[[], None], tmp_path: Path
) -> None:
    for _ in range(2):
        spot()
    scaling: Options = {"resources_per_worker": on_ray.SPOT, "elastic_resize_monitor_interval_s": 1.0}
    with ThreadPoolExecutor(1) as pool:  # only the main thread can add a node
        fitting = pool.submit(fit, resizes, tmp_path, max_failures=1, workers=(1, 2), scaling=scaling)
        while not fitting.done() and not (tmp_path / "alone").exists():
            wait([fitting], timeout=0.1)
        spot()
        result = fitting.result()
    assert sorted(path.name for path in tmp_path.glob("* began at *")) == [
        "0 began at 0 of 2",
        "0 began at 4 of 1",
        "0 began at 8 of 2",
        "1 began at 0 of 2",
        "1 began at 8 of 2",
    ]
    check_weights(result)


def place(config: Options) -> tuple[Launch, str, bool]:
    """Without TensorFlow: joins the job; rank 1 of two then fails."""
    worker = on_ray.join()
    launch = Launch.from_environment()
    if worker.view.workers == 2 and worker.rank == 1:
        on_ray.wait_for(config["folder"] / "joined")
        worker.close()
        raise ValueError("no such column: 'price'")
    (config["folder"] / "joined").touch()
    if worker.view.workers == 2:
        worker.declare([on_ray.SUM])
    worker.close()
    return launch, os.environ.get("TF_CONFIG", "none"), "TF_USE_LEGACY_KERAS" in os.environ


def test_each_error_reaches_ray_under_its_rank(tmp_path: Path) -> None:
    with pytest.raises(ray.train.WorkerGroupError) as caught:
        fit(place, tmp_path)
    assert "no such column: 'price'" in str(caught.value.worker_failures[1])
    if 0 in caught.value.worker_failures:  # Ray may have ended it before it could say more
        assert isinstance(caught.value.worker_failures[0], WorkerLostError)
        assert str(caught.value.worker_failures[0]).startswith("rank 1 (")


def test_a_worker_finds_as_many_pservers_as_were_asked_for_and_keras_3(tmp_path: Path) -> None:
    launch, tf_config, legacy = fit(place, tmp_path, workers=1, pservers=3).return_value
    assert (len(launch.pservers), launch.rank, launch.workers) == (3, 0, 1)
    assert (tf_config, legacy) == ("none", False)
