"""Programs that save different content to one path; see program.py."""

from __future__ import annotations

import functools

import jobs
import keras
import numpy as np
from keras.saving import save_model
from program import BATCH, Job, Results, data

from tfps.types import Optimizer


def scaled() -> Optimizer:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))


def saved_one_after_the_other(job: Job) -> Results:
    """Rank 1 skips a step: its loss scale is lower. Each rank is the last one to save once."""
    assert job.strategy is not None
    x, y = data()
    if job.rank == 1:
        x[:BATCH] = np.inf  # not all: others wait for its first step
    model = job.compiled(scaled)
    model.fit(x, y, epochs=2, batch_size=BATCH, shuffle=False, verbose=0)
    paths = [job.shared / f"{last} {way}.keras" for way in ("method", "function") for last in range(2)]
    for path in paths:
        if job.rank == int(path.name[0]):
            jobs.poll(path.exists)
        save = model.save if "method" in path.name else functools.partial(save_model, model)
        save(path)
        keras.models.load_model(path)
    job.strategy.synchronize()  # all have saved
    saved = [keras.models.load_model(path).optimizer for path in paths]
    return {"scales": [float(each.dynamic_scale) for each in saved], "own scale": float(model.optimizer.dynamic_scale)}
