"""Programs about number formats and when an update happens; see program.py."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import recorded
from program import BATCH, SAMPLES, Job, Results, data, history, mlp, weights

from tfps.types import Model, Options, Structure, Value

OPTIONS: Options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}


def loss_scaling(job: Job) -> Results:
    """mixed_float16; in the third step a gradient of the last rank's part overflows."""
    keras.config.set_dtype_policy("mixed_float16")
    model = job.compiled(lambda: keras.optimizers.Adam(0.01))
    keras.config.set_dtype_policy("float32")
    assert type(model.optimizer).__name__ == "LossScaleOptimizer"
    heavy = np.ones(SAMPLES)
    heavy[3 * BATCH - 1] = 1e4
    scales: list[float] = []
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: scales.append(float(model.optimizer.dynamic_scale.numpy()))
    )
    fit = model.fit(*data(), sample_weight=heavy, epochs=2, callbacks=[keep], **OPTIONS)
    return {
        **weights(model),
        **history(fit),
        "scales": scales,
        "iterations": int(model.optimizer.inner_optimizer.iterations.numpy()),
        "scaling": [int(model.optimizer.step_counter.numpy()), float(model.optimizer.dynamic_scale.numpy())],
    }


def loss_scaling_growth(job: Job) -> Results:
    """The scale doubles every three good steps and is halved by a bad one, which one rank sees."""

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.01, momentum=0.9), initial_scale=8.0, dynamic_growth_steps=3
        )

    model = job.compiled(optimizer)
    x, y = data()
    x = x.copy()
    x[2 * BATCH - 1, 0] = np.inf
    scales: list[float] = []
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: scales.append(float(model.optimizer.dynamic_scale.numpy()))
    )
    model.fit(x, y, epochs=2, callbacks=[keep], **OPTIONS)
    return {**weights(model), "scales": scales}


def mixed_bfloat16(job: Job) -> Results:
    model = job.compiled(build=lambda: mlp(dtype="mixed_bfloat16"))
    fit = model.fit(*data(), epochs=1, **OPTIONS)
    return {**weights(model), **history(fit)}


def float64(job: Job) -> Results:
    model = job.compiled(build=lambda: mlp(dtype="float64"))
    assert model.trainable_variables[0].dtype == "float64"
    fit = model.fit(*data(), epochs=2, **OPTIONS)
    return {**weights(model), **history(fit)}


def accumulation(job: Job) -> Results:
    """Accumulated over three steps: something is sent when it is applied only."""
    model = job.compiled(lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3))
    if job.strategy:
        job.strategy._runtime.recorder.start()
    fit = model.fit(*data(), epochs=2, **OPTIONS)
    pushes = 0
    if job.strategy:
        assert job.strategy._runtime.settle(60.0)  # variables can be read a moment before an update is noted
        job.strategy._runtime.recorder.stop()
        pushes = sum(span.kind == "update" for span in recorded.spans(job.strategy._runtime.recorder))
        pushes //= job.strategy._runtime.update_buckets()
    return {**weights(model), **history(fit), "own pushes": pushes}


def options_of_optimizers(job: Job) -> Results:
    """EMA, clipping, weight decay, a schedule: on what the sum over ranks makes of them."""
    schedule = keras.optimizers.schedules.CosineDecay(0.05, 12)
    model = job.compiled(
        lambda: keras.optimizers.AdamW(schedule, weight_decay=0.01, use_ema=True, ema_overwrite_frequency=4)
    )
    fit = model.fit(*data(), epochs=2, **OPTIONS)
    return {**weights(model), **history(fit), "iterations": int(model.optimizer.iterations.numpy())}


class Regularized(keras.layers.Layer):
    """A penalty by add_loss beside a regularizer."""

    def build(self, shape: Sequence[int]) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 10), regularizer=keras.regularizers.L2(0.01), name="kernel")

    def call(self, inputs: Structure) -> Value:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(self.kernel)))
        return inputs @ self.kernel


def regularizers_and_constraints(job: Job) -> Results:
    def build() -> Model:
        hidden = keras.layers.Dense(16, activation="tanh", kernel_constraint=keras.constraints.MaxNorm(0.5))
        return keras.Sequential([keras.Input((64,)), hidden, Regularized()])

    model = job.compiled(lambda: keras.optimizers.SGD(0.1), build=build)
    fit = model.fit(*data(), epochs=2, **OPTIONS)
    return {**weights(model), **history(fit)}
