"""What tests of tables share: data, a dense table as reference, and a look into the process' own tables."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfps
from tfps.tables.table import TableStats
from tfps.types import Argument, Array, Layer, Library, Model, Optimizer, Structure, Value

L: Library = keras.layers
ROWS, DIM = 40, 4  # of a table
WORDS, BATCH = 6, 8


def data(rows: int = 36) -> tuple[Array, Array]:
    """Words that come several times in a batch, and labels."""
    words = np.minimum(np.random.default_rng(0).geometric(0.1, (rows, WORDS)), ROWS - 2)
    return words, words.sum(1) % 10


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model_of(layer: Layer, words: int = WORDS) -> Model:
    """A layer after `layer`, which begins alike in all models."""
    head = L.Dense(10, kernel_initializer=keras.initializers.RandomUniform(-0.5, 0.5, seed=7))
    return keras.Sequential([L.Input((words,), dtype="int64"), layer, L.Flatten(), head])


def trained(
    layer: Layer, optimizer: Optimizer, x: Array, y: Array, *, epochs: int = 2, **options: Argument
) -> tuple[Model, list[float]]:
    """The model that has been trained with `layer`, and its losses."""
    model = model_of(layer, x.shape[1])
    model.compile(optimizer, loss(), jit_compile=False, **options)
    fit = model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    return model, fit.history["loss"]


def check(layer: Layer, reference: Layer, tolerance: float = 1e-5) -> None:
    """The two have the same rows."""
    ids = np.arange(ROWS)
    np.testing.assert_allclose(layer.read_rows(ids), reference.read_rows(ids), rtol=0, atol=tolerance)


def embedding(rows: int | None, dim: int = DIM, **options: Argument) -> Layer:
    """A table whose rows begin as those of others with this seed."""
    seeded = keras.initializers.RandomUniform(seed=5)
    return tfps.layers.Embedding(rows, dim, **{"embeddings_initializer": seeded, **options})


def initial(rows: int, dim: int = DIM) -> Array:
    """The rows that they begin with."""
    found: Array = embedding(None, dim).read_rows(np.arange(rows))
    return found


class DenseTable(keras.layers.Layer):
    """An embedding by a product with one-hot rows, whose gradient is dense."""

    def __init__(self, rows: int, dim: int = DIM) -> None:
        super().__init__()
        self.rows, self.dim = rows, dim

    def build(self, input_shape: Structure = None) -> None:
        def begin(shape: Structure, dtype: Argument) -> Array:
            with tf.init_scope():
                return initial(*shape)

        self.table = self.add_weight(shape=(self.rows, self.dim), initializer=begin, name="table")

    def call(self, ids: Value) -> Value:
        return keras.ops.matmul(keras.ops.one_hot(ids, self.rows, dtype=self.compute_dtype), self.table)

    def read_rows(self, ids: Array) -> Array:
        rows: Array = self.table.numpy()[ids]
        return rows


def stats(layer: Layer) -> TableStats:
    """Of a table in this process, none if it has never been declared."""
    table = layer._rows.table
    assert table.runtime.settle(60.0)
    found = table.runtime.exchange.tables._tables.get(table.bucket)
    return TableStats(0, 0, 0, 0, 0, 0) if found is None else found.stats()
