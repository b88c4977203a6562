"""Programs that compress; see program.py. Ranks end bitwise equal; plain Keras is not compared."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from program import BATCH, Job, Results, data, weights
from programs_saving import OPTIONS, Interrupt

import tfps
from tfps.errors import MismatchError
from tfps.types import Model, Value
from tfps.updates.compressing import Compressing


def wide() -> Model:
    layers = [keras.layers.Dense(128, activation="tanh") for _ in range(2)]
    return keras.Sequential([keras.layers.Input((64,)), *layers, keras.layers.Dense(10)])


def optimizer() -> keras.optimizers.Optimizer:
    adam = os.environ.get("OPTIMIZER") == "adam"
    return keras.optimizers.Adam(0.003) if adam else keras.optimizers.SGD(0.1, momentum=0.9)


def compiled(job: Job) -> Model:
    return job.compiled(optimizer, build=wide)


def trained(job: Job) -> Results:
    model = compiled(job)
    x, y = data()
    fit = model.fit(x, y, epochs=3, **OPTIONS)
    return {**weights(model), "loss": np.asarray(fit.history["loss"])}


def uneven(job: Job) -> Results:
    """Batches whose rows do not divide, the last of one row: a replica has none."""
    model = compiled(job)
    x, y = data(2 * BATCH + 1)
    fit = model.fit(x, y, epochs=2, batch_size=BATCH, shuffle=False, verbose=0)
    return {**weights(model), "loss": np.asarray(fit.history["loss"])}


def accumulated(job: Job) -> Results:
    """Gradient accumulation under loss scaling, which skips steps that are not finite."""
    scaled = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), initial_scale=2.0**127
    )
    model = job.compiled(lambda: scaled, build=wide)
    x, y = data()
    model.fit(x, y, epochs=4, **OPTIONS)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    return weights(model)


def _held(job: Job, model: Model) -> dict[str, np.ndarray]:
    """The residuals, and what pservers that update have beyond what workers were shown."""
    assert job.strategy is not None
    job.strategy.combine()
    compressing: Compressing = job.strategy.extended.compressing
    variables = [each.value for each in model.trainable_variables]
    held = {f"held {place}": each for place, each in compressing.residuals(variables).items()}
    return held | {f"exact {place}": each.exact for place, each in compressing.ahead(variables).items()}


def checkpointed(job: Job) -> Results:
    """Training that goes on and training that is restored end bitwise equal."""
    model = compiled(job)
    x, y = data()
    model.fit(x, y, **OPTIONS)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.write(str(job.own / "checkpoint"))
    held = _held(job, model)
    assert held
    assert max(np.abs(each).max() for each in held.values()) > 0
    model.fit(x, y, **OPTIONS)
    went_on = [weight.tobytes() for weight in model.get_weights()]
    checkpoint.read(path).assert_consumed()  # in the same job, which has other residuals by now
    for place, each in _held(job, model).items():
        assert each.tobytes() == held[place].tobytes()
    model.fit(x, y, **OPTIONS)
    assert [weight.tobytes() for weight in model.get_weights()] == went_on
    assert job.strategy is not None
    job.strategy.close()
    job.strategy = tfps.Strategy()
    again = compiled(job)
    tf.train.Checkpoint(model=again, optimizer=again.optimizer).read(path).expect_partial()
    again.fit(x, y, **OPTIONS)
    assert [weight.tobytes() for weight in again.get_weights()] == went_on
    return weights(again)


def written_alone(job: Job) -> Results:
    """What one rank writes to a replica's component is neither replaced nor unnoticed."""
    model = compiled(job)
    x, y = data()
    model.fit(x, y, **OPTIONS)
    if job.rank == 1 and job.strategy is not None:
        (component,) = job.strategy.experimental_local_results(model.layers[0].kernel.value)
        component.assign_add(tf.ones(component.shape))
    try:
        model.fit(x, y, epochs=3, **OPTIONS)
    except MismatchError as error:
        return {"own refused": str(error)}
    return {"own refused": ""}


def saved_by_one_rank(job: Job) -> Results:
    """At the end of an epoch, and after combine() in a loop, one rank may save alone."""
    model = compiled(job)
    x, y = data()
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    def save(epoch: int, logs: Value) -> None:
        if job.rank == 0:
            checkpoint.write(str(job.own / f"epoch{epoch}"))

    model.fit(x, y, epochs=2, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=save)], **OPTIONS)
    model.train_on_batch(x[:BATCH], y[:BATCH])
    assert job.strategy is not None
    job.strategy.combine()
    save(2, None)
    return weights(model)


def backed_up(job: Job) -> Results:
    """BackupAndRestore after an interruption in an epoch: as if there had been none."""
    x, y = data()

    def backup(folder: Path) -> Value:
        return keras.callbacks.BackupAndRestore(str(folder), delete_checkpoint=False)

    reference = compiled(job)
    initial = reference.get_weights()
    reference.fit(x, y, epochs=3, callbacks=[backup(job.shared / "whole")], **OPTIONS)
    expected = [weight.tobytes() for weight in reference.get_weights()]
    assert job.strategy is not None
    model = compiled(job)
    model.set_weights(initial)
    with contextlib.suppress(KeyboardInterrupt):
        model.fit(x, y, epochs=3, callbacks=[backup(job.shared / "backup"), Interrupt(1)], **OPTIONS)
    job.strategy.close()
    job.strategy = tfps.Strategy()
    again = compiled(job)
    again.fit(x, y, epochs=3, callbacks=[backup(job.shared / "backup")], **OPTIONS)
    assert [weight.tobytes() for weight in again.get_weights()] == expected
    files = sorted(path.name for path in (job.shared / "backup").iterdir())
    return {**weights(again), "own files": files}


def written(job: Job) -> Results:
    """Writes a checkpoint for `read` in a job of another size."""
    model = compiled(job)
    x, y = data()
    model.fit(x, y, **OPTIONS)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    if job.rank == 0:
        checkpoint.write(os.environ["CHECKPOINT"])
    held = _held(job, model)
    assert held
    return {"ranks held": np.concatenate([each for _, each in sorted(held.items())])}


def read(job: Job) -> Results:
    model = compiled(job)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    checkpoint.read(os.environ["CHECKPOINT"]).expect_partial()
    x, y = data()
    with job.scope():
        model.optimizer.build(model.trainable_variables)
    held = _held(job, model)
    model.fit(x, y, **OPTIONS)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    return {"ranks held": np.concatenate([each for _, each in sorted(held.items())])}
