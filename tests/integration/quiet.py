"""Trains, evaluates and predicts, each to its end, and prints nothing itself."""

from __future__ import annotations

import keras
import tensorflow as tf
import training

import tfps


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


if __name__ == "__main__":
    main()
