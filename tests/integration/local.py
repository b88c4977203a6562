"""Worker: trains in modes "local" and "diloco", and saves its own weights after each step.

local.py FILE STEPS CASE ...      steps of each rank ("12" or "12,9"), and settings of local_training.Settings as JSON

With FAULT in the environment, `[rank, step, point]` as JSON, that rank fails there (see faults.py).
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Literal

import faults
import keras
import local_training
import tensorflow as tf
from local_training import OPTIMIZERS, SLICE_BYTES, Settings

import tfps
from tfps.types import Array, Logs, Value


def train(settings: Settings, steps: list[int], devices: list[str]) -> dict[str, Value]:
    slice_bytes: int | Literal["auto"] = "auto" if settings.compression == "none" else SLICE_BYTES
    config = tfps.Config.from_environment(deterministic=True, slice_bytes=slice_bytes, **settings.config())
    strategy = tfps.Strategy(config=config, devices=devices)
    # Others take rank 0's initial values, but only after they have been noted here.
    keras.utils.set_random_seed(1 if "FAULT" in os.environ else 1 + strategy.rank)
    with strategy.scope():
        model = local_training.model()
        model.compile(OPTIMIZERS[settings.optimizer](), local_training.loss())
    initial: list[list[Array]] = []
    own: list[list[Array]] = []
    pushed: list[int] = []

    def keep(batch: int, logs: Logs) -> None:
        own.append(model.get_weights())
        pushed.append(strategy.extended._runtime.exchanges)

    callbacks = [
        keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: initial.append(model.get_weights()),
            on_train_batch_end=keep,
        )
    ]
    data = local_training.dataset(strategy.rank, steps[strategy.rank], strategy.num_workers)
    model.fit(data, callbacks=callbacks, verbose=0)
    result = {"initial": initial[0], "own": own, "end": model.get_weights(), "pushed": pushed}
    strategy.close()
    return result


if __name__ == "__main__":
    file, counts, *cases = sys.argv[1:]
    count = int(os.environ.get("DEVICES", "1"))
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    )
    faulty, *fault = json.loads(os.environ.get("FAULT", "[-1]"))
    if faulty == int(os.environ["TFPS_RANK"]):
        faults.fail_at(*fault)
    numbers = [int(each) for each in counts.split(",")]
    names = [f"CPU:{number}" for number in range(count)]
    results = [train(Settings(**json.loads(case)), numbers, names) for case in cases]
    Path(file).write_bytes(pickle.dumps(results))
