"""What tests of tables share: a dense table as reference, and a look into the process' own tables."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfps
from tfps.tables.table import TableStats
from tfps.types import Argument, Array, Layer, Structure, Value

DIM = 4


def embedding(rows: int | None, dim: int = DIM, **options: Argument) -> Layer:
    """A table whose rows begin as those of others with this seed."""
    seeded = keras.initializers.RandomUniform(seed=5)
    return tfps.layers.Embedding(rows, dim, **{"embeddings_initializer": seeded, **options})


def initial(rows: int, dim: int = DIM) -> Array:
    """The rows that they begin with."""
    return embedding(None, dim).read_rows(np.arange(rows))


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


def stats(layer: Layer) -> TableStats | None:
    """Of a table in this process; None if it has never been declared."""
    table = layer._rows.table
    assert table.runtime.settle(60.0)
    found = table.runtime.exchange._tables.get(table.bucket)
    return found and found.stats()
