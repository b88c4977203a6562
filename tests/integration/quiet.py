"""Trains, evaluates and predicts, each to its end, and prints nothing itself."""

from __future__ import annotations

import keras
import tensorflow as tf
import training

import tfps
from tfps.types import Logs, Structure


class Own(keras.Model):
    """Its `train_step` returns a value that is no metric's."""

    def train_step(self, data: Structure) -> Logs:
        return {**super().train_step(data), "weight": tf.reduce_sum(self.trainable_variables[0])}


def main() -> None:
    strategy = tfps.Strategy()
    with strategy.scope():
        model, x, y = training.mlp()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
    for data in ({"x": x, "y": y, "batch_size": 32}, {"x": batches}):
        model.fit(**data, epochs=2, verbose=0, shuffle=False, validation_data=(x, y))
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    with strategy.scope():
        inputs = keras.Input(x.shape[1:])
        own = Own(inputs=inputs, outputs=keras.layers.Dense(10)(inputs))
        own.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    own.fit(x, y, batch_size=32, epochs=2, verbose=0)


if __name__ == "__main__":
    main()
