"""Worker: a program in which something fails that all its workers would meet.

failing.py FOLDER KIND      FOLDER/place: where files go, which cannot
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import keras
import numpy as np

import tfps
from tfps.types import Argument

PLACE, KIND = Path(sys.argv[1]) / "place", sys.argv[2]


class Changes(keras.callbacks.Callback):
    """Changes the learning rate on one rank only."""

    def on_train_batch_end(self, batch: int, logs: Argument = None) -> None:
        if batch == 3 and os.environ["TFPS_RANK"] == "1":
            self.model.optimizer.learning_rate = 0.5


class Saves(keras.callbacks.Callback):
    """Saves on the first rank, as programs do."""

    def on_epoch_end(self, epoch: int, logs: Argument = None) -> None:
        if strategy.rank == 0:
            self.model.save(PLACE / "model.keras")


strategy = tfps.Strategy()
keras.utils.set_random_seed(1)
ids = np.random.default_rng(0).integers(0, 10**6, (192, 8))
callbacks = {"difference": Changes, "save": Saves, "snapshot": keras.callbacks.Callback}
with strategy.scope():
    layers = [tfps.layers.Embedding(None, 16, name="words"), keras.layers.Flatten()] if KIND == "snapshot" else []
    inputs = keras.Input((8,), dtype="int64" if layers else "float32")
    model = keras.Sequential([inputs, *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-9), "mse")
model.fit(ids, ids[:, :1] / 10**6, batch_size=12, epochs=3, verbose=0, callbacks=[callbacks[KIND]()])
