"""The script that the documents' commands start, if they do not show it. tests/test_doc_blocks.py runs it."""

import keras
import numpy as np

import tfps

keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
strategy = tfps.Strategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=16, epochs=1, verbose=0)
strategy.close()
