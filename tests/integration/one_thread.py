"""Trains 100 variables with TensorFlow's pools at one thread each: a wait that holds a thread would deadlock."""

from __future__ import annotations

import sys

import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)

import keras
import numpy as np

import tfps


def main(*pservers: str) -> None:
    # Small slices: several buckets, so that gates close and open independently of each other.
    strategy = tfps.Strategy(list(pservers) or None, config=tfps.Config(slice_bytes=2048, window_bytes=4096))
    with strategy.scope():
        layers = [keras.layers.Dense(16, activation="tanh") for _ in range(50)]
        model = keras.Sequential([keras.layers.Input((16,)), *layers])
        model.compile("sgd", "mse")
    data = np.random.default_rng(0).random((80, 16), np.float32)
    model.fit(data, data, batch_size=8, epochs=2, verbose=0)
    assert len(model.trainable_variables) == 100
    assert strategy._runtime.update_buckets() > 10
    print("ended", float(np.abs(model.get_weights()[0]).sum()))
    strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
