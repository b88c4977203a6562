"""Programs whose optimizer runs on pservers, where they differ from others; see program.py."""

from __future__ import annotations

import keras
import numpy as np
from program import BATCH, Job, Results, data, history, weights

from tfps.errors import MismatchError
from tfps.types import Logs, Options

OPTIONS: Options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}


def saved_by_one_rank(job: Job) -> Results:
    """Rank 0 alone reads slots and saves, in the middle of an epoch and after it: nobody waits for others."""
    model = job.compiled()
    x, y = data()

    def save(batch: int, logs: Logs) -> None:
        if job.rank == 0 and batch == 3:
            slots = [each.numpy() for each in model.optimizer.variables[2:]]
            assert all(np.isfinite(each).all() for each in slots)
            keras.models.load_model(_saved(model, job, "middle"))

    fits = [model.fit(x, y, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=save)], **OPTIONS)]
    if job.rank == 0:
        _saved(model, job, "end")
    fits.append(model.fit(x, y, **OPTIONS))
    return {**weights(model), **history(*fits)}


def _saved(model: keras.Model, job: Job, name: str) -> str:
    path = str(job.own / f"{name}.weights.h5")
    model.save_weights(path)
    path = str(job.own / f"{name}.keras")
    model.save(path)
    return path


def slots_loaded(job: Job) -> Results:
    """What load_weights and optimizer.set_weights bring goes to the pservers."""
    model = job.compiled(lambda: keras.optimizers.Adam(0.01))
    x, y = data()
    model.fit(x, y, **OPTIONS)
    model.save(job.own / "model.keras")
    model.save_weights(job.own / "model.weights.h5")
    state = [each.numpy() for each in model.optimizer.variables]
    fits = [model.fit(x, y, **OPTIONS)]
    model.load_weights(job.own / "model.weights.h5")
    model.optimizer.set_weights(state)
    fits.append(model.fit(x, y, **OPTIONS))
    with job.scope():
        loaded = keras.models.load_model(job.own / "model.keras")
    fits.append(loaded.fit(x, y, **OPTIONS))
    for name in ("loss", "accuracy"):
        assert len({str(fit.history[name]) for fit in fits}) == 1, [fit.history[name] for fit in fits]
    ends = {f"slots/{n}": each.numpy() for n, each in enumerate(loaded.optimizer.variables[2:])}
    return {**weights(model, loaded), **history(*fits), **ends}


def finished_and_run_again(job: Job) -> Results:
    """A job that had finished is run again: no step follows, and every rank has the slots that rank 0 has restored."""
    x, y = data()
    slots = []
    for _ in range(2):
        model = job.compiled(lambda: keras.optimizers.Adam(0.01))
        backup = keras.callbacks.BackupAndRestore(job.own / "backup", delete_checkpoint=False)
        model.fit(x, y, callbacks=[backup], **OPTIONS)
        slots.append([each.numpy() for each in model.optimizer.variables[2:]])
    for before, after in zip(*slots, strict=True):
        np.testing.assert_array_equal(before, after)
    return {**weights(model), **{f"slots/{n}": each for n, each in enumerate(slots[1])}}


def assigned_on_one_rank(job: Job) -> Results:
    """A rank that assigns alone after the first step is told, as are the others."""
    model = job.compiled("sgd")
    x, y = data()
    model.fit(x, y, **OPTIONS)
    if job.rank == 1:
        model.layers[0].kernel.assign(model.layers[0].kernel * 2.0)
    try:
        model.fit(x, y, **OPTIONS)
    except MismatchError as error:
        return {"own refused": str(error)}
    return {"own refused": ""}
