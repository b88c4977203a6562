"""Worker: trains in mode "async" with batches that are handed out, and saves what it had after each epoch.

handed_out.py FILE EPOCHS      with FAULT in the environment as for local.py; TABLE: pixels are words of a table
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import faults
import keras
import local_training
import numpy as np

import tfps
from tfps.types import Array, Logs, Model

OPTIMIZER = os.environ.get("OPTIMIZER", "SGD")


def model_with_table() -> Model:
    words = tfps.layers.Embedding(None, 4, optimizer=keras.optimizers.Adagrad(0.1))
    inputs = keras.Input((64,))
    found = words(keras.ops.cast(16 * inputs, "int64"))
    return keras.Model(inputs, keras.layers.Dense(64)(keras.layers.Flatten()(found)))


def weights_of(model: Model) -> list[Array]:
    tables = [layer for layer in model.layers if isinstance(layer, tfps.layers.Embedding)]
    return [*model.get_weights(), *(table.read_rows(np.arange(17)) for table in tables)]


if __name__ == "__main__":
    file, epochs = sys.argv[1:]
    faulty, *fault = json.loads(os.environ["FAULT"])
    if faulty == int(os.environ["TFPS_RANK"]):
        faults.fail_at(*fault)
    strategy = tfps.Strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = model_with_table() if "TABLE" in os.environ else local_training.model()
        optimizer = keras.optimizers.get({"class_name": OPTIMIZER, "config": {"learning_rate": 0.01}})
        model.compile(optimizer, local_training.loss())
    found: list[tuple[list[Array], int, int]] = []  # after each epoch: weights, mean steps so far, own batches
    batches: list[int] = []

    def end_epoch(epoch: int, logs: Logs) -> None:
        found.append((weights_of(model), int(model.optimizer.iterations.numpy()), len(batches)))
        batches.clear()

    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batches.append(batch), on_epoch_end=end_epoch
    )
    x, y = local_training.rows(0, 60)
    model.fit(x, y, batch_size=3 * local_training.ROWS, epochs=int(epochs), callbacks=[count], verbose=0)
    Path(file).write_bytes(pickle.dumps(found))
    strategy.close()
