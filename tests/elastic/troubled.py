"""Worker: trains in trouble, and saves its weights as FOLDER/<rank>.npz, or plain.npz: troubled.py FOLDER TROUBLE"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import psutil
from jobs import poll

import tfps
from tfps.types import Argument

FOLDER, TROUBLE = Path(sys.argv[1]), sys.argv[2]
RANK = os.environ.get("TFPS_RANK", "plain")
STEP_S, EPOCHS, WORKERS = 0.05, 12, 3
KEPT_BYTES = 2**20


def first_time(what: str) -> bool:
    try:
        (FOLDER / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def make() -> None:
    """Makes the trouble of this rank."""
    if TROUBLE.startswith("stopped") and RANK == "1":
        pause = f"kill -STOP {os.getpid()}; sleep {TROUBLE.split()[1]}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", pause])
    if TROUBLE.startswith("two") and RANK in "12":
        os.kill(os.getpid(), getattr(signal, TROUBLE.split()[1]))
    if TROUBLE == "out of memory" and RANK == "1":
        most = psutil.Process().memory_info().vms + KEPT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    if TROUBLE == "pserver" and RANK == "0":
        launched = psutil.Process(os.getppid()).children()
        next(each for each in launched if "tfps.pserver.cli" in each.cmdline()).kill()


class Trouble(keras.callbacks.Callback):
    epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Argument = None) -> None:
        self.epoch = epoch
        if (
            epoch == EPOCHS - 1 and RANK == "0" and TROUBLE.startswith(("stopped", "two"))
        ):  # those who come back to the end
            exchange = strategy._runtime.exchange
            poll(lambda: len(exchange.view.ranks) + len(exchange.joining.joiners(1)) >= WORKERS)

    def on_train_batch_end(self, batch: int, logs: Argument = None) -> None:
        if RANK != "plain":
            time.sleep(STEP_S)
            if (self.epoch, batch) == (1, 3) and first_time(f"{RANK} has had it"):
                make()


strategy = tfps.Strategy()
keras.utils.set_random_seed(1)
random = np.random.default_rng(1)
ids, y = random.integers(0, 1000, (192, 8)), random.normal(size=(192, 1))
with strategy.scope():
    rows = tfps.layers.Embedding(None, 4, optimizer=keras.optimizers.SGD(0.1), name="words")
    layers = [rows, keras.layers.Flatten()] if "TFPS_SNAPSHOT_FOLDER" in os.environ else []
    inputs = keras.Input((8,), dtype="int64" if layers else "float32")
    model = keras.Sequential([inputs, *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
model.fit(
    ids if layers else ids / 1000, y, batch_size=12, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[Trouble()]
)
np.savez(FOLDER / f"{RANK}.npz", *model.get_weights(), *([rows.read_rows(np.arange(1000))] if layers else []))
