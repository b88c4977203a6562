"""Worker: trains a model with two tables of rows and dense layers while rank 0 records, and says what the report says.

traced_tables.py LOG_DIR
"""

from __future__ import annotations

import sys

import keras
import numpy as np

import tfps

IDS, ROWS = 4, 64


def main(log_dir: str) -> None:
    strategy = tfps.Strategy()
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(1)
    words, items = random.integers(0, 20, (2048, IDS)), random.integers(-(2**60), 2**60, (2048, 1))
    with strategy.scope():
        inputs = keras.Input((IDS,), dtype="int64"), keras.Input((1,), dtype="int64")
        layers = (
            tfps.layers.Embedding(20, 8, combiner="sum", name="words"),
            tfps.layers.Embedding(None, 16, name="items"),
        )
        found = [keras.layers.Flatten()(layer(each)) for layer, each in zip(layers, inputs, strict=True)]
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(found)))
        model.compile("adagrad", "mse")
    trace = tfps.callbacks.Trace(log_dir, steps=(6, 12))
    model.fit((words, items), words.sum(1) % 2, batch_size=2 * ROWS, verbose=0, shuffle=False, callbacks=[trace])
    print(f"of {ROWS} rows:\n{strategy.report()}")
    strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
