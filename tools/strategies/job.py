"""What small Keras programs start from: where they run, made-up data, a model, and the results of training it."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfps.types import Argument, Array, Batches, Structure, Value

EXAMPLES, FEATURES, CLASSES, BATCH, EPOCHS = 256, 16, 5, 32, 2
STEPS = EXAMPLES // BATCH  # per epoch
Results = dict[str, Value]  # name -> array


@dataclass
class Job:
    """Where a program runs.

    Args:
        strategy: None: one process without a strategy.
        folder: empty at first; shared by all processes of the job.
    """

    strategy: tf.distribute.Strategy
    rank: int
    folder: pathlib.Path

    def scope(self) -> contextlib.AbstractContextManager[object]:
        scope: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        return self.strategy.scope() if self.strategy is not None else scope

    def train(self, step: Callable[[Batches], object], epochs: int = EPOCHS) -> None:
        """A training loop of one's own: `step(batch)` on every batch, in replica context if there is a strategy."""
        if isinstance(self.strategy, tf.distribute.ParameterServerStrategy):
            self._coordinate(step, epochs)
            return
        data, run = batches(), step
        if self.strategy is not None:
            data = self.strategy.experimental_distribute_dataset(data)

            def run(batch: Structure) -> object:
                return self.strategy.run(step, args=(batch,))

        compiled = tf.function(run)
        for _ in range(epochs):
            for batch in data:
                compiled(batch)

    def _coordinate(self, step: Callable[[Batches], object], epochs: int) -> None:
        """As the documentation of ParameterServerStrategy has it."""
        coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)

        @tf.function
        def run(iterator: Batches) -> None:
            self.strategy.run(step, args=(next(iterator),))

        iterator = iter(coordinator.create_per_worker_dataset(lambda: batches().repeat()))
        for _ in range(epochs * STEPS):
            coordinator.schedule(run, args=(iterator,))
        coordinator.join()


def examples(seed: int = 0) -> tuple[Array, Array]:
    """[EXAMPLES, FEATURES] float32 and labels int64, which can be learned."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(EXAMPLES, FEATURES)).astype("float32")
    directions = np.random.default_rng(1).normal(size=(FEATURES, CLASSES))
    return features, (features @ directions).argmax(1)


def dataset(*arrays: Argument) -> Batches:
    """Global batches of `arrays`, which each worker gets its part of."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH, drop_remainder=True).with_options(options)


def batches() -> Batches:
    return dataset(*examples())


def held_out() -> Batches:
    return dataset(*examples(2))


def mlp(*middle: keras.layers.Layer) -> keras.Model:
    hidden = keras.layers.Dense(24, activation="tanh")
    return keras.Sequential([keras.layers.Input((FEATURES,)), hidden, *middle, keras.layers.Dense(CLASSES)])


def crossentropy(**options: Argument) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def momentum(**options: Argument) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def compiled(
    job: Job,
    build: Callable[[], keras.Model] = mlp,
    optimizer: Callable[[], keras.optimizers.Optimizer] = momentum,
    **options: Argument,
) -> keras.Model:
    with job.scope():
        model = build()
        model.compile(optimizer(), crossentropy(), metrics=["accuracy"], jit_compile=False, **options)
    return model


def results(model: keras.Model, history: Mapping[str, Sequence[float]] | None = None) -> Results:
    """All weights, and what `fit` or `evaluate` returned."""
    found = {f"weight {index}": np.asarray(weight) for index, weight in enumerate(model.get_weights())}
    return {**found, **{key: np.asarray(value) for key, value in (history or {}).items()}}


def fitted(model: keras.Model, **options: Argument) -> Results:
    history = model.fit(batches(), **{"epochs": EPOCHS, "verbose": 0, **options}).history
    return results(model, history)
