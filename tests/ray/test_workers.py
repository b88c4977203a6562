"""Workers of `tfps.ray.run` that are lost: one is started again and joins the others, which go on as they are."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jobs
import on_ray
import pytest

import tfps
import tfps.ray
from tfps.config import Config, Launch, Security
from tfps.errors import JoinError, MismatchError, PserverLostError, WorkerLostError
from tfps.protos import tfps_pb2 as pb
from tfps.types import Argument, Model, Options
from tfps.wire.control import Pserver

ray = pytest.importorskip("ray", reason=on_ray.NEEDS_RAY)
pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.usefixtures("clean")]
for module in (sys.modules[__name__], on_ray, jobs):  # which Ray's processes cannot import
    ray.cloudpickle.register_pickle_by_value(module)

EPOCHS, STEPS, BATCH = 4, 6, 12


def fit(*callbacks: Argument) -> Model:
    """Trains a model that is the same everywhere."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.layers.Input((8,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    inputs = np.random.default_rng(0).random((STEPS * BATCH, 8), "float32")
    more: Options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    model.fit(inputs, inputs.sum(1), callbacks=list(callbacks), **more)
    return model


def trains(folder: Path, lost: int, end: Callable[[], None], comes_back: bool) -> Options:
    """Ends in the first epoch, if it is `lost` and the first of its rank; others wait for the next one."""
    import keras

    own = Launch.from_environment().rank
    first = not list(folder.glob(f"{own} began as *"))
    (folder / f"{own} began as {os.getpid()}").touch()
    strategy = tfps.Strategy()

    class Fault(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Argument = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Argument = None) -> None:
            if own == lost and first and (self.epoch, batch) == (0, 1):
                end()
            if comes_back and (self.epoch, batch) == (1, 2) and strategy.rank == 0:
                jobs.poll(lambda: bool(strategy._runtime.exchange.joining.joiners(1)))

    with strategy.scope():
        model = fit(Fault())
    pserver = Pserver(strategy.pservers[0], Security.of_worker(Config.from_environment()))
    changes = list(pserver.call("Status", pb.StatusRequest(details=True), jobs.DEADLINE_S).changes)
    pserver.close()
    return {
        "own": own,
        "pid": os.getpid(),
        "workers": strategy.num_workers,
        "weights": b"".join(weight.tobytes() for weight in model.get_weights()),
        "changes": "\n".join(changes),
    }


def began(folder: Path) -> list[tuple[int, int]]:
    """The rank and the process of each worker that has begun."""
    names = [path.name.split(" began as ") for path in folder.glob("* began as *")]
    return sorted((int(rank), int(pid)) for rank, pid in names)


@pytest.mark.parametrize(
    ("lost", "number", "says"),
    [(1, signal.SIGKILL, "died at step"), (0, signal.SIGKILL, "died at step"), (1, signal.SIGTERM, "SIGTERM")],
    ids=["killed", "rank 0 killed", "SIGTERM"],
)
def test_a_worker_comes_back_while_the_others_go_on(
    lost: int, number: int, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import numpy as np

    function = partial(trains, tmp_path, lost, partial(on_ray.die, number), True)
    results = tfps.ray.run(function, workers=3, pservers=1, max_failures=3, min_workers=2)
    assert [(each["own"], each["workers"]) for each in results] == [(0, 3), (1, 3), (2, 3)]
    assert len({each["weights"] for each in results}) == 1
    processes = began(tmp_path)
    assert sorted(rank for rank, _ in processes) == sorted([0, 1, 2, lost])
    assert {(each["own"], each["pid"]) for each in results} <= set(processes)
    assert f"worker {lost} failed: its process ended (" in caplog.text
    assert "); it starts again (restarts left: 2)" in caplog.text
    assert re.search(rf"rank {lost} \(.*{says}", results[2]["changes"]), results[2]["changes"]
    if number == signal.SIGTERM:  # it has ended its step before: no row is lost
        plain = np.concatenate([weight.ravel() for weight in fit().get_weights()])
        np.testing.assert_allclose(np.frombuffer(results[0]["weights"], "float32"), plain, rtol=0, atol=1e-5)


def test_a_worker_whose_node_is_lost_comes_back_on_another(
    spot: Callable[[], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        spot()
    options: Options = {"workers": 2, "pservers": 1, "resources_per_worker": on_ray.SPOT}
    results = tfps.ray.run(
        partial(trains, tmp_path, 1, on_ray.lose_node, True), **options, max_failures=1, min_workers=1
    )
    assert [(each["own"], each["workers"]) for each in results] == [(0, 2), (1, 2)]
    assert results[0]["weights"] == results[1]["weights"]
    assert [rank for rank, _ in began(tmp_path)] == [0, 1, 1]
    assert "); it starts again (restarts left: 0)" in caplog.text


def test_without_a_start_left_the_others_end_the_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    function = partial(trains, tmp_path, 1, partial(on_ray.die, signal.SIGKILL), False)
    results = tfps.ray.run(function, workers=3, pservers=1, min_workers=2)
    assert [(each["own"], each["workers"]) for each in results] == [(0, 2), (2, 2)]
    assert results[0]["weights"] == results[1]["weights"]
    assert [rank for rank, _ in began(tmp_path)] == [0, 1, 2]
    assert "; 2 workers go on" in caplog.text


def fails(folder: Path) -> None:
    """Rank 1 does, each time."""
    rank = Launch.from_environment().rank
    (folder / f"{rank} began as {os.getpid()}").touch()
    if rank == 1:
        raise ValueError("no such column: 'price'")
    on_ray.wait_to_be_ended()


def test_the_error_says_how_often_workers_were_started_again(tmp_path: Path) -> None:
    says = (
        r"^rank 1 of 2 failed: ValueError: no such column: 'price'; workers were started again 2 times "
        r"\(max_failures=2, min_workers=2\); all others were ended$"
    )
    with pytest.raises(WorkerLostError, match=says):
        tfps.ray.run(partial(fails, tmp_path), workers=2, max_failures=2, min_workers=2)
    assert [rank for rank, _ in began(tmp_path)] == [0, 1, 1, 1]


def raises(folder: Path, error: type[Exception]) -> int:
    """Rank 1 fails, and raises an error when it has been started again; the other one returns when it has ended."""
    rank, lives = Launch.from_environment().rank or 0, len(began(folder))
    (folder / f"{rank} began as {os.getpid()}").touch()
    if rank == 1:
        raise error("its weights differ") if lives == 2 else ValueError("no such column: 'price'")
    if error is not JoinError:
        on_ray.wait_to_be_ended()
    jobs.poll(
        lambda: (
            len(began(folder)) == 3 and all(Path(f"/proc/{pid}").exists() == (own == 0) for own, pid in began(folder))
        )
    )
    return rank


def test_a_worker_that_was_refused_is_not_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    function = partial(raises, tmp_path, JoinError)
    assert tfps.ray.run(function, workers=2, pservers=1, max_failures=3, min_workers=1) == [0]
    assert len(began(tmp_path)) == 3
    assert re.search(r"JoinError: its weights differ.*; 1 workers go on", caplog.text), caplog.text


def test_what_every_worker_would_meet_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(WorkerLostError, match=r"MismatchError: its weights differ.*were started again 1 times"):
        tfps.ray.run(partial(raises, tmp_path, MismatchError), workers=2, pservers=1, max_failures=3, min_workers=1)
    assert len(began(tmp_path)) == 3


def loses_its_pserver(folder: Path) -> None:
    worker = on_ray.join()
    (folder / f"{worker.rank} began as {os.getpid()}").touch()
    if worker.rank == 0:
        jobs.poll(lambda: len(began(folder)) == 2)
        os.kill(on_ray.actors("TfpsPserver")[0]["Pid"], signal.SIGKILL)
    worker.declare([on_ray.SUM])
    worker.declare([on_ray.SUM])


def test_no_worker_starts_again_when_the_only_pserver_has_died(tmp_path: Path) -> None:
    with pytest.raises(PserverLostError, match=r"PserverLostError: pserver .*; workers were started again 0 times"):
        tfps.ray.run(partial(loses_its_pserver, tmp_path), workers=2, pservers=1, max_failures=3, min_workers=1)
    assert len(began(tmp_path)) == 2
