"""Variables of a tfps strategy as Python numbers and NumPy arrays, like plain variables."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from numpy.typing import DTypeLike

from tfps.types import Array


class Converted:
    """What TensorFlow's distributed variables lack: without it `int(v)` raises, and an array would hold an object.

    Truth is left out: `bool(v)` is always true, as TensorFlow itself asks `if destinations` of such variables.
    """

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        if not tf.executing_eagerly():
            raise NotImplementedError("the value of a variable is known only in eager execution")  # as TensorFlow's
        return np.asarray(self._tensor().numpy(), dtype)  # a copy: replicas' memory is written by updates

    def __int__(self) -> int:
        return int(self._tensor())

    def __float__(self) -> float:
        return float(self._tensor())

    def __complex__(self) -> complex:
        return complex(self._tensor())

    def _tensor(self) -> tf.Tensor:
        return tf.convert_to_tensor(self)
