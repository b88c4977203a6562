"""Reads the kernels of convolutions before Keras enters a function that XLA compiles, where nothing can wait for them.

Keras compiles those with `groups`, and Conv3D with `channels_first`, by XLA: TensorFlow has no kernels for CPUs.

Tested in tests/keras_hooks/test_convolutions.py.
"""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from tfps.keras_hooks.exchanged_variable import of_tensorflow
from tfps.keras_hooks.keras_private import nn_module
from tfps.types import Argument, Value


@functools.cache
def read_kernels_before() -> None:
    """Makes Keras pass the values of kernels that belong to a strategy; done once per process."""
    original = nn_module.conv

    @functools.wraps(original)
    def conv(inputs: Value, kernel: Value, *arguments: Argument, **options: Argument) -> Value:
        if isinstance(kernel, keras.Variable) and isinstance(of_tensorflow(kernel), tf.distribute.DistributedValues):
            kernel = tf.convert_to_tensor(kernel)
        return original(inputs, kernel, *arguments, **options)

    nn_module.conv = conv
