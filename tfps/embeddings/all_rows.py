"""All rows of a table where a program wants them as one tensor: an index of candidates, or weights that are tied.

Tested in tests/layers/test_distributed.py.
"""

from __future__ import annotations

import tensorflow as tf

from tfps.embeddings.variable import TableVariable
from tfps.types import Argument, Array


class AllRows:
    """Reads as a tensor of all rows, float32 [rows, dim]: those of the moment, eagerly or in a graph when it runs.

    TensorFlow, Keras and NumPy take it where they take a tensor. Each time pservers are asked for all rows, and in a
    step that trains all rows have gradients. Ranks may read it one by one.
    """

    dtype = "float32"

    def __init__(self, layer: str, rows: TableVariable) -> None:
        """ValueError: the table has no number of rows; `layer` is the name of its layer."""
        if rows.rows is None:
            raise ValueError(
                f"layer {layer!r}: there is no tensor of all rows of a table for any id, which has no last one; look "
                "up those of known ids"
            )
        self.shape = tf.TensorShape([rows.rows, rows.dim])
        self._rows = rows

    def __tf_tensor__(self, dtype: Argument = None, name: str | None = None) -> tf.Tensor:
        found = self._rows.lookup(tf.range(self.shape[0], dtype=tf.int64))
        found.set_shape(self.shape)
        return found if dtype is None else tf.cast(found, dtype)

    def numpy(self) -> Array:
        found: Array = tf.convert_to_tensor(self).numpy()
        return found

    def __array__(self, dtype: Argument = None, copy: bool | None = None) -> Array:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)
