"""Programs that the exactness tests train, with and without a strategy: small, each using something else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from tfps.types import Argument, Array, Optimizer, Structure, Value

Build = Callable[[], tuple[keras.Model, Structure, Array]]  # model, inputs, targets


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process saves, as TensorFlow's tutorial for several workers asks."""
    resolver = strategy.cluster_resolver
    kind, number, others = resolver.task_type, resolver.task_id, resolver.cluster_spec().as_dict()
    return kind is None or kind == "chief" or (kind == "worker" and number == 0 and "chief" not in others)


def digits(count: int = 320) -> tuple[np.ndarray, np.ndarray]:
    """Handwritten digits, [count, 64] float32 from 0 to 1, and their labels."""
    images, labels = load_digits(return_X_y=True)
    return (images[:count] / 16.0).astype("float32"), labels[:count].astype("int64")


def mlp(units: int = 32, **dense: Argument) -> tuple[keras.Model, Array, Array]:
    """Two hidden layers on digits."""
    layers = [keras.layers.Dense(units, activation="relu", **dense) for _ in range(2)]
    return keras.Sequential([keras.layers.Input((64,)), *layers, keras.layers.Dense(10)]), *digits()


def batch_normalization() -> tuple[keras.Model, Array, Array]:
    """A convolution with moving statistics and dropout."""
    images, labels = digits()
    layers = [
        keras.layers.Input((64,)),
        keras.layers.Reshape((8, 8, 1)),
        keras.layers.Conv2D(8, 3, use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Dropout(0.2),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
    return keras.Sequential(layers), images, labels


def _words() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    words = random.integers(0, 50, (320, 12))
    return words, (words.sum(1) % 10).astype("int64")


def embedding_sparse() -> tuple[keras.Model, Array, Array]:
    """An embedding whose gradient is IndexedSlices."""
    words, targets = _words()
    layers = [keras.layers.Input((12,)), keras.layers.Embedding(50, 8), keras.layers.Flatten(), keras.layers.Dense(10)]
    return keras.Sequential(layers), words, targets


class DenseEmbedding(keras.layers.Layer):
    """An embedding by a product with one-hot rows: its gradient is dense."""

    def build(self, input_shape: Structure) -> None:
        self.table = self.add_weight(shape=(50, 8), initializer="uniform", name="table")

    def call(self, words: Value) -> Value:
        return keras.ops.matmul(keras.ops.one_hot(words, 50), self.table)


def embedding_dense() -> tuple[keras.Model, Array, Array]:
    words, targets = _words()
    layers = [keras.layers.Input((12,)), DenseEmbedding(), keras.layers.Flatten(), keras.layers.Dense(10)]
    return keras.Sequential(layers), words, targets


class UniqueEmbedding(DenseEmbedding):
    """An embedding that looks up each word of the batch once."""

    def call(self, words: Value) -> Value:
        once, where = tf.unique(tf.reshape(words, [-1]))
        return tf.reshape(tf.gather(tf.gather(self.table.value, once), where), [-1, 12, 8])


def embedding_unique() -> tuple[keras.Model, Array, Array]:
    words, targets = _words()
    layers = [keras.Input((12,), dtype="int64"), UniqueEmbedding(), keras.layers.Flatten(), keras.layers.Dense(10)]
    return keras.Sequential(layers), words, targets


def shared_layer() -> tuple[keras.Model, Array, Array]:
    """One layer used twice, the functional way."""
    images, labels = digits()
    inputs = keras.Input((64,))
    shared = keras.layers.Dense(64, activation="tanh")
    return keras.Model(inputs, keras.layers.Dense(10)(shared(shared(inputs)))), images, labels


def normalized_shared_layer() -> tuple[keras.Model, Array, Array]:
    """A layer with a constraint used twice, and batch normalization, whose scale has a product as its gradient."""
    images, labels = digits()
    inputs = keras.Input((64,))
    shared = keras.layers.Dense(64, activation="tanh", kernel_constraint=keras.constraints.MaxNorm(0.5))
    normalized = keras.layers.BatchNormalization()(shared(shared(inputs)))
    return keras.Model(inputs, keras.layers.Dense(10)(normalized)), images, labels


def attention() -> tuple[keras.Model, Array, Array]:
    """Kernels of rank 3."""
    images, labels = digits()
    inputs = keras.Input((8, 8))
    hidden = keras.layers.Dense(16)(inputs)
    attended = keras.layers.Flatten()(keras.layers.MultiHeadAttention(2, 8)(hidden, hidden))
    return keras.Model(inputs, keras.layers.Dense(10)(attended)), images.reshape(-1, 8, 8), labels


def two_inputs() -> tuple[keras.Model, list[Array], Array]:
    images, labels = digits()
    left, right = keras.Input((32,)), keras.Input((32,))
    hidden = keras.layers.Concatenate()([keras.layers.Dense(16)(left), keras.layers.Dense(16)(right)])
    return keras.Model([left, right], keras.layers.Dense(10)(hidden)), [images[:, :32], images[:, 32:]], labels


class Subclassed(keras.Model):
    """Layers created in an order that is not that of their use."""

    def __init__(self) -> None:
        super().__init__()
        self.last = keras.layers.Dense(10)
        self.first = keras.layers.Dense(32, activation="relu")

    def call(self, inputs: Structure) -> Value:
        return self.last(self.first(inputs))


def subclassed() -> tuple[keras.Model, Array, Array]:
    return Subclassed(), *digits()


class WithoutCall(keras.Model):
    """A step of its own around layers that are built in it, and metrics and a loss that `compile` gets."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.Sequential([keras.layers.Dense(32, activation="relu")])
        self.out = keras.layers.Dense(10)

    def train_step(self, batch: Structure) -> dict[str, Value]:
        x, y, *_ = batch
        with tf.GradientTape() as tape:
            predicted = self.out(self.hidden(x, training=True))
            loss = self.compute_loss(y=y, y_pred=predicted)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.compute_metrics(x, y, predicted)

    def test_step(self, batch: Structure) -> dict[str, Value]:
        x, y, *_ = batch
        return self.compute_metrics(x, y, self.out(self.hidden(x)))


def without_call() -> tuple[keras.Model, Array, Array]:
    return WithoutCall(), *digits()


class CallOfNothing(WithoutCall):
    def call(self, inputs: Structure) -> None:
        """Keras asks for a `call()`; nobody calls it."""


class CallOfAPart(WithoutCall):
    def call(self, inputs: Structure) -> Value:
        return self.hidden(inputs)


def lstm() -> tuple[keras.Model, Array, Array]:
    images, labels = digits()
    layers = [keras.layers.Input((8, 8)), keras.layers.LSTM(12), keras.layers.Dense(10)]
    return keras.Sequential(layers), images.reshape(-1, 8, 8), labels


def compiled(
    strategy: tf.distribute.Strategy, optimizer: Optimizer = "adam", **options: Argument
) -> tuple[keras.Model, Array, Array]:
    """`mlp` under a strategy, its inputs and targets."""
    with strategy.scope():
        model, x, y = mlp()
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model, x, y


def train(
    strategy: tf.distribute.Strategy | None,
    optimizer: Callable[[], keras.optimizers.Optimizer],
    build: Build = mlp,
    *,
    epochs: int = 2,
    batch_size: int = 64,
    **compile_options: Argument,
) -> list[bytes]:
    """Trains from fixed seeds; returns weights and optimizer variables as bytes: equal means bitwise equal."""
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model, inputs, targets = build()
        model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), **compile_options)
        if model.built:
            # Without a strategy Keras builds the optimizer while it traces, where the initial values that
            # ScheduleFreeAdamW copies from the variables are lost; under any strategy it builds it before.
            model.optimizer.build(model.trainable_variables)
    model.fit(inputs, targets, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)
    variables = [*model.weights, *model.optimizer.variables]
    return [np.asarray(variable.numpy()).tobytes() for variable in variables]


#: One of each kind.
MODELS = (
    *(batch_normalization, embedding_sparse, embedding_dense, shared_layer, normalized_shared_layer),
    *(attention, two_inputs, subclassed, lstm),
)
