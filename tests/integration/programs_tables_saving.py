"""Programs that save and restore models with tables of rows; see program.py."""

from __future__ import annotations

import contextlib
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from program import Job, Results
from programs_saving import Interrupt
from programs_tables import compiled, data, rows_of, table, words_model

import tfps
from tfps.types import Layer, Model, Options, Value

OPTIONS: Options = {"batch_size": 12, "shuffle": False, "verbose": 0}
ANY = np.arange(60) * 2**50


def built(job: Job) -> tuple[Model, list[Layer]]:
    """A model with a fixed and another table, under Adam, whose slots matter."""
    made: list[Layer] = []

    def build() -> Model:
        made.extend([table(name="fixed"), table(None, name="any")])
        return words_model(*made)

    return compiled(job, build, lambda: keras.optimizers.Adam(0.02)), made


def _ends(model: Model, made: list[Layer], fit: Value) -> Results:
    return {
        **{f"weights/{n}": each for n, each in enumerate(model.get_weights())},
        **rows_of(*made),
        "loss": fit.history["loss"],
    }


def _tables_of(model: Model) -> list[Layer]:
    return [layer for layer in model.layers if isinstance(layer, tfps.layers.Embedding)]


def _saved(job: Job, folder: Path) -> Results:
    """Saves, loads what was saved, and trains on with that: rows and slots go on as if nothing had been."""
    model, made = built(job)
    x, y = data()
    model.fit(x, y, **OPTIONS)
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    before = rows_of(*made)
    model.fit(x, y, epochs=2, **OPTIONS)
    with job.scope():
        loaded = keras.models.load_model(folder / "model.keras")
    for key, value in rows_of(*_tables_of(loaded)).items():
        np.testing.assert_array_equal(value, before[key])
    model.load_weights(folder / "model.weights.h5")
    for key, value in rows_of(*made).items():
        np.testing.assert_array_equal(value, before[key])
    return _ends(loaded, _tables_of(loaded), loaded.fit(x, y, **OPTIONS))


def saved_shared(job: Job) -> Results:
    return _saved(job, job.shared)


def saved_own(job: Job) -> Results:
    """Each rank has a file; the rows are beside that of rank 0."""
    return _saved(job, job.own)


def _backup(job: Job, folder: Path) -> Results:
    def backup() -> Value:
        return keras.callbacks.BackupAndRestore(str(folder), delete_checkpoint=False)

    model, made = built(job)
    x, y = data()
    with contextlib.suppress(KeyboardInterrupt):
        model.fit(x, y, epochs=4, callbacks=[backup(), Interrupt(2)], **OPTIONS)
    if job.strategy:
        job.strategy.close()
        job.strategy = tfps.Strategy()
    keras.utils.set_random_seed(100 + job.rank)
    again, made = built(job)
    fit = again.fit(x, y, epochs=4, callbacks=[backup()], **OPTIONS)
    made[0].load_rows(np.arange(3), np.ones((3, 4)))  # which all ranks do, though one has restored alone
    return {**_ends(again, made, fit), "epochs": fit.epoch}


def backup_shared(job: Job) -> Results:
    return _backup(job, job.shared / "backup")


def backup_own(job: Job) -> Results:
    """Only rank 0 has a backup."""
    return _backup(job, job.own / "backup")


def checkpoints(job: Job) -> Results:
    """ModelCheckpoint names files by epochs, and overwrites the best."""
    model, made = built(job)
    checkpoint = keras.callbacks.ModelCheckpoint
    callbacks = [
        checkpoint(str(job.shared / "{epoch}.keras")),
        checkpoint(str(job.shared / "best.weights.h5"), save_weights_only=True, save_best_only=True, monitor="loss"),
    ]
    x, y = data()
    fit = model.fit(x, y, epochs=3, callbacks=callbacks, **OPTIONS)
    ends = _ends(model, made, fit)
    with job.scope():
        first = keras.models.load_model(job.shared / "1.keras")
    ends |= {f"first/{key}": value for key, value in rows_of(*_tables_of(first)).items()}
    model.load_weights(job.shared / "best.weights.h5")
    assert len(list((job.shared / "best.weights.h5.tables").iterdir())) == 1
    return ends | {f"best/{key}": value for key, value in rows_of(*made).items()}


def copied(job: Job) -> Results:
    """Weights that a program copies and gives back: the best ones of a training, then what was there at first."""
    model, made = built(job)
    x, y = data()
    model.evaluate(x, y, verbose=0)  # from here on initial values are those of all ranks
    initial = model.get_weights()
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    others = x[:24], (y[:24] + np.arange(24) % 2) % 10  # of which half are as in training
    fit = model.fit(x, y, epochs=40, validation_data=others, callbacks=[stop], **OPTIONS)
    assert stop.stopped_epoch > stop.best_epoch
    assert stop.best_epoch > 0
    best = _ends(model, made, fit)
    again = _ends(model, made, model.fit(x, y, **OPTIONS))
    model.set_weights(initial)
    first = rows_of(*made)
    last = _ends(model, made, model.fit(x, y, **OPTIONS))
    results = {"best": best, "again": again, "first": first, "last": last}
    return {f"{part}/{key}": value for part, found in results.items() for key, value in found.items()}


def other_optimizer(job: Job) -> Results:
    """What is compiled again with another optimizer keeps its rows; so does what loads them under another one."""
    model, made = built(job)
    x, y = data()
    model.fit(x, y, **OPTIONS)
    model.save_weights(job.shared / "adam.weights.h5")
    with job.scope():
        model.compile(keras.optimizers.Adagrad(0.1), model.loss, jit_compile=False)
    fit = model.fit(x, y, **OPTIONS)
    ends = _ends(model, made, fit)
    model.load_weights(job.shared / "adam.weights.h5")
    again = model.fit(x, y, **OPTIONS)
    return ends | {f"again/{key}": value for key, value in _ends(model, made, again).items()}


def assigned(job: Job) -> Results:
    """Rows that a program assigns, before and after training."""
    model, made = built(job)
    x, y = data()
    ids = np.arange(0, 60, 2)
    values = np.linspace(-1, 1, len(ids) * 4, dtype=np.float32).reshape(len(ids), 4)
    made[0].load_rows(ids, values)
    made[1].load_rows(ids, -values)
    np.testing.assert_array_equal(made[1].read_rows(ids), -values)
    model.fit(x, y, **OPTIONS)
    made[0].load_rows(ids[:3], values[:3])
    if job.strategy:
        job.strategy.reduce("SUM", tf.constant(1.0), axis=None)
    return _ends(model, made, model.fit(x, y, **OPTIONS))
