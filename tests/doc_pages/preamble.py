"""What blocks of Python in the documents take for granted: data, a strategy, a model (tests/test_doc_blocks.py)."""

import keras
import numpy as np
import tensorflow as tf

import tfps

rows = tf.data.Dataset.from_tensor_slices(
    (np.random.default_rng(0).normal(size=(512, 8)).astype("float32"), np.zeros((512, 1), "float32"))
)
dataset = rows.batch(16)
batches = [*dataset.take(2)]
path = "checkpoint"


def build_model() -> keras.Model:
    return keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])


def build_and_compile() -> keras.Model:
    made = build_model()
    made.compile("sgd", "mse")
    return made


def train_step(batch: tuple[tf.Tensor, tf.Tensor]) -> None:
    model.train_on_batch(*batch)


strategy = tfps.Strategy()
with strategy.scope():
    model = build_and_compile()
    checkpoint = tf.train.Checkpoint(model=model)
