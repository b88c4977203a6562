"""Worker: trains in and out of the scope of its strategy.

scopes.py PSERVER PSERVER      two jobs, one after the other
"""

from __future__ import annotations

import os
import sys

import keras
import numpy as np
import training

import tfps
from tfps.types import Model

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
X, Y = training.digits(75)


def fit(model: Model) -> None:
    model.compile(keras.optimizers.Adam(0.01), LOSS)
    model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)


def lora(strategy: tfps.Strategy | None) -> list[np.ndarray]:
    keras.utils.set_random_seed(1)
    keras.backend.clear_session()
    if strategy is None:
        model, *_ = training.mlp()
    else:
        with strategy.scope():
            model, *_ = training.mlp()
    model.layers[0].enable_lora(2)  # outside
    model.add(keras.layers.Dense(10))
    fit(model)
    return [np.asarray(weight) for weight in model.get_weights()]


def main(alone: str, together: str) -> None:
    expected = lora(None)
    strategy = tfps.Strategy([alone])
    model, *_ = training.mlp()
    model = keras.Sequential(model.layers, name="forgotten")
    for _ in range(2):
        fit(model)
    strategy.close()
    print("closed", flush=True)
    strategy = tfps.Strategy([together])
    for own, other in zip(lora(strategy), expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-5)
    with strategy.scope():
        memory = keras.layers.LSTM(4, stateful=True, name="memory")
        stateful = keras.Sequential([keras.Input(batch_shape=(6, 8, 8)), memory, keras.layers.Dense(10)])
    try:
        stateful.compile("sgd", LOSS)
        stateful.fit(X[:12].reshape(-1, 8, 8), Y[:12], batch_size=6, verbose=0)
    except tfps.UnsupportedError as error:
        print("refused", error, flush=True)
    plain, *_ = training.mlp()
    try:
        with strategy.scope():
            fit(plain)
    except tfps.UnsupportedError as error:
        print("refused", error, flush=True)
    strategy.close()


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main(*sys.argv[1:])
