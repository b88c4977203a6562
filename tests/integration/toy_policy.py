"""A mode of a program's own: workers train alone, and take the mean of their parameters when an epoch ends."""

from __future__ import annotations

import keras
import numpy as np
from program import DEVICES, Job, Results, data, mlp, weights

import tfps
from tfps.policies import POLICIES
from tfps.policies.policy import Policy
from tfps.types import Model

ROWS, BATCH, WORKERS = 24, 8, 2
OPTIONS = {"batch_size": BATCH, "shuffle": False, "verbose": 0}


class EpochMeans(Policy):
    """One module is all that a new mode needs."""

    setting = "a mode of its own"
    together = False
    exchanges_gradients = False

    def end_epoch(self, model: Model) -> None:
        strategy = model.distribute_strategy
        for variable in model.trainable_variables:
            variable.assign(strategy.reduce("MEAN", variable.value._values[0].read_value(), axis=None))


def compiled() -> Model:
    model = mlp()
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def epoch_means(job: Job) -> Results:
    x, y = data(ROWS)
    if job.strategy is not None:
        POLICIES["sync"] = EpochMeans
        with tfps.Strategy(devices=DEVICES).scope():
            model = compiled()
        model.fit(x, y, epochs=2, **OPTIONS)
        return weights(model)
    model, rows = compiled(), np.arange(ROWS)
    for _ in range(2):
        begun, ended = model.get_weights(), []
        for worker in range(WORKERS):
            model.set_weights(begun)
            own = rows[rows % BATCH // (BATCH // WORKERS) == worker]
            model.fit(x[own], y[own], **{**OPTIONS, "batch_size": BATCH // WORKERS})
            ended.append(model.get_weights())
        model.set_weights([np.mean(each, axis=0) for each in zip(*ended, strict=True)])
    return weights(model)
