"""Programs that save, restore and set weights; see program.py."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from program import BATCH, Job, Results, data, history, weights
from reading import MovingMean

from tfps.types import Logs, Model, Options, Value

OPTIONS: Options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def _checkpoints(job: Job, folder: Path) -> Results:
    model = job.compiled()
    callback = keras.callbacks.ModelCheckpoint
    callbacks = [
        callback(str(folder / "{epoch}.keras")),
        callback(str(folder / "{epoch:02d}.weights.h5"), save_weights_only=True, save_freq=4),
        callback(str(folder / "best.keras"), save_best_only=True, monitor="val_loss"),
    ]
    x, y = data()
    fit = model.fit(x, y, epochs=2, validation_data=(x[:96], y[:96]), callbacks=callbacks, **OPTIONS)
    restored = keras.models.load_model(folder / "2.keras")
    for mine, theirs in zip(model.get_weights(), restored.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    return {**weights(model), **history(fit), "own files": names(folder)}


def checkpoints_shared(job: Job) -> Results:
    return _checkpoints(job, job.shared)


def checkpoints_own(job: Job) -> Results:
    return _checkpoints(job, job.own)


def saved_in_epochs(job: Job) -> Results:
    """Callbacks that save in the middle of an epoch write what one process has: statistics, choices, names of files."""

    def build() -> Model:
        layers = [keras.layers.Dense(16, activation="tanh"), MovingMean(), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input((64,)), *layers])

    model = job.compiled(lambda: keras.optimizers.SGD(0.5), build=build)
    checkpoint = keras.callbacks.ModelCheckpoint
    callbacks = [
        checkpoint(str(job.shared / "{epoch}-{batch:02d}-{loss:.1f}.weights.h5"), save_weights_only=True, save_freq=2),
        checkpoint(str(job.shared / "best.keras"), save_best_only=True, monitor="loss", save_freq=1),
        keras.callbacks.BackupAndRestore(str(job.shared / "backup"), save_freq=5, delete_checkpoint=False),
    ]
    callbacks[1].monitor_op = np.less  # which Keras 3.15 leaves open until the first epoch ends
    x, y = data()
    x[::2] += 0.5  # ranks have different data
    fit = model.fit(x, y, epochs=2, callbacks=callbacks, **OPTIONS)
    if job.strategy:
        job.strategy.reduce("SUM", 1.0, axis=None)  # rank 0 has written its backup
    ends = {**weights(model), **history(fit), "best": callbacks[1].best}
    restored = build()
    for path in sorted(job.shared.rglob("*.*")):
        if path.suffix == ".h5":
            restored.load_weights(path)
            ends |= {f"{path.name}/{each}": weight for each, weight in enumerate(restored.get_weights())}
    return ends


class Interrupt(keras.callbacks.Callback):
    """Ends training in the middle of an epoch, as a machine that goes away does."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.last, self.epoch = epoch, 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if self.epoch == self.last and batch == 2:
            raise KeyboardInterrupt


def _backup(job: Job, folder: Path) -> Results:
    import tfps

    x, y = data()

    def backup() -> Value:
        return keras.callbacks.BackupAndRestore(str(folder), delete_checkpoint=False)

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.Adam(0.01)

    model = job.compiled(optimizer)
    with contextlib.suppress(KeyboardInterrupt):
        model.fit(x, y, epochs=4, callbacks=[backup(), Interrupt(2)], **OPTIONS)
    if job.strategy:
        job.strategy.close()
        job.strategy = tfps.Strategy()
    keras.utils.set_random_seed(100 + job.rank)
    again = job.compiled(optimizer)
    fit = again.fit(x, y, epochs=4, callbacks=[backup()], **OPTIONS)
    return {**weights(again), **history(fit), "epochs": fit.epoch, "own files": names(folder)}


def backup_shared(job: Job) -> Results:
    return _backup(job, job.shared / "backup")


def backup_own(job: Job) -> Results:
    """Only rank 0 has a backup; everybody goes on from it."""
    return _backup(job, job.own / "backup")


def saved_in_one_place(job: Job) -> Results:
    """All ranks save to one path and read it back at once."""
    model = job.compiled()
    x, y = data()
    fits = [model.fit(x, y, **OPTIONS)]
    for _ in range(3):
        model.save(job.shared / "model.keras")
        loaded = keras.models.load_model(job.shared / "model.keras")
        model.save_weights(job.shared / "model.weights.h5")
        model.load_weights(job.shared / "model.weights.h5")
        for mine, theirs in zip(model.get_weights(), loaded.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        fits.append(model.fit(x, y, **OPTIONS))
    model.export(job.shared / "exported", verbose=False)
    return {**weights(model), **history(*fits)}


def tensorboard(job: Job) -> Results:
    model = job.compiled()
    board = keras.callbacks.TensorBoard(str(job.own / "logs"), histogram_freq=1, update_freq=2)
    x, y = data()
    fit = model.fit(x, y, validation_data=(x[:96], y[:96]), epochs=2, callbacks=[board], **OPTIONS)
    return {**weights(model), **history(fit), "own files": names(job.own / "logs")}


def tensorboard_shared(job: Job) -> Results:
    """Rank 0 says once that others write to the same directory; a file of an earlier job does not count."""
    told: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    model, shared, apart = job.compiled(), job.shared / "logs", job.own / "logs"
    (apart / "train").mkdir(parents=True)
    earlier = apart / "train" / "events.out.tfevents.1700000000.host.1.0.v2"
    earlier.touch()
    os.utime(earlier, (1700000000, 1700000000))
    logging.getLogger("tfps").addHandler(heard)
    for folder in (apart, shared, shared):
        model.fit(*data(), epochs=2, callbacks=[keras.callbacks.TensorBoard(str(folder))], **OPTIONS)
    logging.getLogger("tfps").removeHandler(heard)
    said = [text for text in told if "TensorBoard" in text]
    assert len(said) == (job.workers > 1 and job.rank == 0), said
    assert all(repr(str(shared)) in text for text in said)
    return weights(model)


def saved(job: Job) -> Results:
    """model.save, load_model in scope and training on; export; each rank by itself."""
    model = job.compiled()
    x, y = data()
    fits = [model.fit(x, y, **OPTIONS)]
    model.save(job.own / "model.keras")
    model.export(job.own / "exported", verbose=False)
    if job.rank == 0:  # the others have written nothing
        served = tf.saved_model.load(str(job.own / "exported"))
        np.testing.assert_allclose(served.serve(x[:8]).numpy(), model.predict_on_batch(x[:8]), rtol=1e-5, atol=1e-6)
    with job.scope():
        loaded = keras.models.load_model(job.own / "model.keras")
    fits.append(loaded.fit(x, y, **OPTIONS))
    model.save_weights(job.own / "model.weights.h5")
    model.load_weights(job.own / "model.weights.h5")
    fits.append(model.fit(x, y, **OPTIONS))
    return {**weights(model, loaded), **history(*fits), "slots": [v.numpy() for v in model.optimizer.variables][2]}


def tf_checkpoint(job: Job) -> Results:
    """tf.train.Checkpoint with a manager; restored into a model that starts elsewhere."""
    model = job.compiled()
    x, y = data()
    fits = [model.fit(x, y, **OPTIONS)]
    with job.scope():
        step = tf.Variable(3, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer, step=step)
    manager = tf.train.CheckpointManager(checkpoint, str(job.own / "checkpoints"), max_to_keep=2)
    path = manager.save()
    fits.append(model.fit(x, y, **OPTIONS))
    with job.scope():
        step.assign(5)
    checkpoint.restore(path).assert_consumed()
    fits.append(model.fit(x, y, **OPTIONS))
    np.testing.assert_allclose(fits[1].history["loss"], fits[2].history["loss"], rtol=1e-5)
    return {**weights(model), **history(*fits), "step": int(step.numpy())}


def weights_set(job: Job) -> Results:
    """set_weights between fits and inside an epoch, on all ranks."""
    model = job.compiled(lambda: keras.optimizers.SGD(0.05, momentum=0.9))
    x, y = data()
    start = [np.full_like(weight, 0.01 * index) for index, weight in enumerate(model.get_weights())]
    model.set_weights(start)
    fits = [model.fit(x, y, **OPTIONS)]
    middle = model.get_weights()

    def halve(batch: int, logs: Logs) -> None:
        if batch == 2:
            model.set_weights([weight * 0.5 for weight in model.get_weights()])

    fits.append(model.fit(x, y, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=halve)], **OPTIONS))
    model.set_weights(middle)
    model.layers[0].kernel.assign(model.layers[0].kernel * 2.0)
    fits.append(model.fit(x, y, **OPTIONS))
    return {**weights(model), **history(*fits)}


def weights_set_on_one_rank(job: Job) -> Results:
    """On rank 0 only, before the first step: everybody gets them. Later: that rank alone has them."""
    model = job.compiled("sgd")
    if job.rank == 0:
        model.set_weights([np.full_like(weight, 0.02 * index) for index, weight in enumerate(model.get_weights())])
    x, y = data()
    fit = model.fit(x, y, **OPTIONS)
    return {**weights(model), **history(fit)}


def csv_appended(job: Job) -> Results:
    """Two calls of `fit` append to one file: each line is there once."""
    model = job.compiled("sgd")
    path = job.shared / "log.csv"
    for _ in range(2):
        logger = keras.callbacks.CSVLogger(str(path), append=True)
        model.fit(*data(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[logger])
    lines = path.read_text().splitlines()
    return {
        "first": [ord(letter) for letter in lines[0][:5]],
        "epochs": [int(line.split(",")[0]) for line in lines[1:]],
    }


def monitored(job: Job) -> Results:
    """A server hears of each epoch once, with what all ranks have seen."""
    heard = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"])).decode()
            heard.append(json.loads(urllib.parse.parse_qs(content)["data"][0]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monitor = keras.callbacks.RemoteMonitor(f"http://127.0.0.1:{server.server_port}")
        fit = job.compiled("sgd").fit(*data(), epochs=2, callbacks=[monitor], **OPTIONS)
        server.shutdown()
    counted = job.strategy.reduce("SUM", len(heard), axis=None).numpy() if job.strategy else len(heard)
    losses = [each["loss"] for each in heard]
    assert losses == (fit.history["loss"] if job.rank == 0 else [])
    return {**history(fit), "heard by servers of all ranks": counted}


def orbax(job: Job) -> Results:
    """OrbaxCheckpoint in one directory for all ranks, also within epochs: what it leaves is what one process has."""

    def build() -> Model:
        hidden, out = keras.layers.Dense(16, activation="tanh", name="hidden"), keras.layers.Dense(10, name="out")
        return keras.Sequential([keras.Input((64,)), hidden, MovingMean(name="moving"), out], name="named")

    model = job.compiled(lambda: keras.optimizers.Adam(0.01), build=build)
    checkpoint = keras.callbacks.OrbaxCheckpoint
    in_epochs = {"save_freq": 2, "save_best_only": True, "monitor": "loss", "mode": "min", "max_to_keep": None}
    callbacks = [
        checkpoint(str(job.shared / "last")),
        checkpoint(str(job.shared / "best"), save_on_background=False, **in_epochs),
    ]
    callbacks[1].monitor_op = np.less  # which Keras leaves open until the first epoch ends
    x, y = data()
    x[::2] += 0.5  # ranks have different data
    fit = model.fit(x, y, epochs=2, callbacks=callbacks, **OPTIONS)
    if job.strategy:
        job.strategy.reduce("SUM", 1.0, axis=None)  # rank 0 has written
    ends = {**weights(model), **history(fit), "best": callbacks[1].best}
    steps = sorted(int(each.name) for each in (job.shared / "best").iterdir() if each.name.isdigit())
    for name in ("last", "best"):  # of which Keras reads the latest
        restored = build()
        restored.compile(keras.optimizers.Adam(0.01))
        restored.load_weights(job.shared / name)
        ends |= {f"{name}/{each}": weight for each, weight in enumerate(restored.get_weights())}
    return {**ends, "steps": steps}
