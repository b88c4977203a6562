"""Worker: trains with the callback Trace on every rank, in two runs, and with a block that only rank 0 traces.

traced.py LOG_DIR
"""

from __future__ import annotations

import sys

import keras
import training

import tfps

STEPS = (4, 8)


def main(log_dir: str) -> None:
    strategy = tfps.Strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model, x, y = training.mlp(64)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with strategy.trace(f"{log_dir}/begin"):  # the initial values are exchanged while rank 0 records
        model.fit(x[:64], y[:64], batch_size=32, epochs=1, verbose=0)
    for name in ("first", "second"):
        trace = tfps.callbacks.Trace(f"{log_dir}/{name}", steps=STEPS)
        model.fit(x, y, batch_size=32, epochs=1, verbose=0, callbacks=[trace])
    with strategy.trace(f"{log_dir}/block"):
        model.fit(x, y, batch_size=32, epochs=1, verbose=0)
    strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
