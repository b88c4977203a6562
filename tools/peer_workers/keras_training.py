"""The model, the data and the training loop for all peers that have Keras: Keras 3, tf_keras, or TensorFlow 2.15's own.

Which Keras is an argument everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tools.peer_workers.common import Clock, Sleeper, Work

if TYPE_CHECKING:
    from tfps.types import Library

if TYPE_CHECKING:
    from tfps.types import Argument, Array, Batches, Callback, Layer, Logs, Model, Optimizer, Value, Variable

LEARNING_RATE = 0.01
ID_BATCHES = 32  # that differ, for a table


def build(
    keras: Library,
    work: Work,
    optimizer: Optimizer,
    sleeper: Sleeper,
    table: Callable[[int, int], Layer] | None = None,
) -> Model:
    """The compiled model. Call it in the strategy's scope.

    Args:
        table: makes a layer of so many rows of so many floats, for a work of `rows`.
    """
    if work.layers:
        model = keras.Sequential([keras.layers.Input((1,)), *sleeping_layers(keras, work, sleeper)])
        loss: Argument = "mse"
    elif table and work.rows:
        rows = [table(work.rows, work.classes), keras.layers.GlobalAveragePooling1D()]
        model = keras.Sequential([keras.layers.Input((work.width,), dtype="int64"), *rows])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    else:
        hidden = [keras.layers.Dense(work.width, activation="relu") for _ in range(work.depth)]
        model = keras.Sequential([keras.layers.Input((work.width,)), *hidden, keras.layers.Dense(work.classes)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if model.count_params() != work.items:
        raise ValueError(f"the model must have {work.items} parameters, got {model.count_params()}")
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    return model


def sleeping_layers(keras: Library, work: Work, sleeper: Sleeper) -> list[Layer]:
    """Layers that pass their input on, and sleep in forward, once their weight is there, and in backward.

    The gradient of the weight is complete when backward has slept.
    """

    class Sleeping(keras.layers.Layer):  # type: ignore[misc]  # Any: there are three of them
        def __init__(self, forward_s: float, backward_s: float, items: int, **options: Argument) -> None:
            super().__init__(**options)
            self._items = items
            self._operation = _operation(forward_s, backward_s, sleeper)

        def build(self, input_shape: object) -> None:
            self.weight = self.add_weight(shape=(self._items,), initializer="zeros", name="weight")
            self.built = True

        def call(self, inputs: Value) -> Value:
            return self._operation(inputs, tf.convert_to_tensor(self.weight))

    return [
        Sleeping(forward_s, backward_s, items, name=name, dtype="float32")
        for name, forward_s, backward_s, items in work.layers
    ]


def _operation(forward_s: float, backward_s: float, sleeper: Sleeper) -> Value:
    def sleep(seconds: float, *tensors: Value) -> Value:
        def pause(first: Array, *_: Array) -> Array:
            sleeper(seconds)
            return first

        slept = tf.numpy_function(pause, tensors, tf.float32)
        slept.set_shape(tensors[0].shape)
        return slept

    def forward(inputs: Value, weight: Variable) -> object:
        def backward(upstream: Value) -> object:
            passed = sleep(backward_s, upstream)
            return passed, tf.fill(weight.shape, tf.reduce_mean(passed))

        return sleep(forward_s, inputs, weight[:1]), backward  # one item: it waits for the weight and copies nothing

    return tf.custom_gradient(forward)


def data(work: Work, batch: int) -> Batches:
    """One random batch, again and again, for every worker alike (a strategy splits it if `batch` is that of all).

    With `work.rows` it is `ID_BATCHES` of them: the same ids in each step would have rows wait for the step before.
    """
    random = np.random.default_rng(0)
    if work.rows:
        ids = random.integers(0, work.rows, (ID_BATCHES, batch, work.width))
        classes = random.integers(0, work.classes, (ID_BATCHES, batch))
        return tf.data.Dataset.from_tensor_slices((ids, classes)).repeat()
    if work.layers:
        features: Array = np.full((batch, 1), 1e-3, np.float32)
        targets: Array = np.zeros((batch, 1), np.float32)
    else:
        features = random.random((batch, work.width), np.float32)
        targets = random.integers(0, work.classes, batch)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf.data.Dataset.from_tensors((features, targets)).repeat().with_options(options)


def fit(
    keras: Library, model: Model, work: Work, batch: int, clock: Clock, callbacks: Sequence[Callback] = ()
) -> float:
    """Trains with Keras' own loop, timed from the end of a batch to the end of the next; the weights' checksum."""
    found = 0.0

    def end(_: int, logs: Logs) -> None:
        nonlocal found
        clock.step_ended(logs["loss"])
        if clock.is_over:
            found = checksum(model)
            clock.drained()

    timing = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    model.fit(
        data(work, batch),
        steps_per_epoch=work.warmup_steps + work.steps,
        epochs=1,
        verbose=0,
        callbacks=[*callbacks, timing],
    )
    return found


def checksum(model: Model) -> float:
    """Reads all weights."""
    return float(sum(np.abs(weight).sum(dtype=np.float64) for weight in model.get_weights()))
