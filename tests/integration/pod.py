"""Worker of tests with pods: pod.py FOLDER. Trains and saves its weights to FOLDER/RANK.npz.

Before FOLDER/begun exists, it trains without end, and rank 0 makes that file after some steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np

import tfps

STEPS, BATCH = 20, 16


def main(folder: str) -> None:
    begun = Path(folder) / "begun"
    endless = not begun.exists()
    strategy = tfps.Strategy()
    keras.utils.set_random_seed(strategy.rank)  # rank 0's values must win
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(256), keras.layers.Dense(4)])
        model.compile("adam", "mse")

    def mark(batch: int, logs: object) -> None:
        if endless and strategy.rank == 0 and batch == STEPS // 2:
            begun.touch()

    random = np.random.default_rng(0)
    inputs, targets = (random.normal(size=(STEPS * BATCH, size)).astype("float32") for size in (8, 4))
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=mark)
    epochs = 10**6 if endless else 1
    model.fit(inputs, targets, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[callback], shuffle=False)
    np.savez(Path(folder) / f"{strategy.rank}.npz", *model.get_weights())
    print(f"rank={strategy.rank} workers={strategy.num_workers} pservers={','.join(strategy.pservers)}")
    strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
