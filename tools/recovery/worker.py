"""A worker of tools/recovery/job.py: worker.py exchange|fit FOLDER, which notes the end of each step in FOLDER."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import threading
import time
from typing import NamedTuple

from tfps.types import Json
from tools.recovery.job import TICK, TIME

BUCKET_BYTES = 12_500_000  # at most


class Task(NamedTuple):
    """What the arguments say."""

    what: str
    folder: str
    units: int  # of each layer
    steps: int  # of an epoch
    mb: int  # per exchange
    backup: bool
    paced: bool  # each epoch begins with a line of stdin
    adam: bool
    row_ms: float  # that a worker sleeps for each row, as if it had a machine of its own to compute it


def exchange(folder: str, size_mb: int) -> None:
    """Exchanges gradients, without TensorFlow, until the process is ended."""
    import numpy as np

    from tfps.config import Config
    from tfps.exchange.interface import BucketSpec, Reply
    from tfps.exchange.update_spec import StepScalars, UpdateSpec
    from tfps.recovery.exchange import ElasticExchange
    from tfps.trace.recorder import Recorder

    rank, config = int(os.environ["TFPS_RANK"]), Config.from_environment(min_workers=1)
    addresses = os.environ["TFPS_PSERVERS"].split(",")
    worker = ElasticExchange(addresses, rank=rank, config=config, recorder=Recorder())
    nbytes = min(size_mb * 1_000_000, BUCKET_BYTES)
    names = [f"gradient {number}" for number in range(size_mb * 1_000_000 // nbytes)]
    update, items = None, nbytes // 4
    if config.update == "server":
        constants, slots = (("momentum", 0.9), ("nesterov", 0.0)), (("momentum", 0.0),)
        update = UpdateSpec("sgd", constants, slots, (items,), (False,))
    specs = [BucketSpec((name,), "sum", nbytes, "float32", i, update=update) for i, name in enumerate(names)]
    buckets, payload = worker.declare(specs), np.ones(items, np.float32)
    for bucket in buckets if update is not None and rank == 0 else ():
        worker.state.write(bucket, 0, 0, payload)
    with pathlib.Path(folder, f"{rank}.times").open("ab", buffering=0) as times:
        for step in range(2**31):
            replied = threading.Semaphore(0)

            def note(reply: Reply, replied: threading.Semaphore = replied) -> None:
                replied.release()

            for bucket in buckets:
                mark = int(step == 0)  # all ranks have assigned the parameters
                scalars = StepScalars(mark, (float(step), 1e-3), wrote=mark > 0 and rank == 0).pack()
                worker.push(bucket, payload, note, b"" if update is None else scalars)
            for _ in buckets:
                replied.acquire()
            times.write(TIME.pack(0, step, time.monotonic()))
            TICK.wait(0.01)


def fit(task: Task) -> None:
    """Trains with Keras 3 until the process is ended."""
    import keras
    import tensorflow as tf

    import tfps
    from tools.recovery import training

    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tfps.Strategy()
    with strategy.scope():
        model = training.build(keras, task.units, task.row_ms / 1e3)
        optimizer = keras.optimizers.Adam if task.adam else keras.optimizers.SGD
        model.compile(optimizer(training.LEARNING_RATE), "mse", jit_compile=False)
    rows = training.rows(task.units)
    data = tf.data.Dataset.from_tensors((rows, rows)).repeat(task.steps)

    class Times(keras.callbacks.Callback):
        def on_train_begin(self, logs: Json = None) -> None:
            path = pathlib.Path(task.folder, f"{os.environ['TFPS_RANK']}.times")
            self.file = path.open("ab", buffering=0)

        def on_epoch_begin(self, epoch: int, logs: Json = None) -> None:
            self.epoch = epoch
            if task.paced:
                sys.stdin.readline()

        def on_train_batch_end(self, batch: int, logs: Json = None) -> None:
            self.file.write(TIME.pack(self.epoch, batch, time.monotonic()))

    callbacks = [Times()]
    if task.backup:
        callbacks.append(keras.callbacks.BackupAndRestore(pathlib.Path(task.folder, "backup")))
    model.fit(data, epochs=10**6, verbose=0, callbacks=callbacks)


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["exchange", "fit"])
    parser.add_argument("folder")
    parser.add_argument("--units", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--mb", type=int, default=0)
    parser.add_argument("--backup", action="store_true")
    parser.add_argument("--paced", action="store_true")
    parser.add_argument("--adam", action="store_true")
    parser.add_argument("--row-ms", type=float, default=0.0)
    task = Task(**vars(parser.parse_args()))
    if task.what == "exchange":
        exchange(task.folder, task.mb)
    else:
        fit(task)


if __name__ == "__main__":
    main()
