"""Worker: is interrupted by Ctrl-C in `fit`, and calls `fit` again, as somebody at a notebook does.

interrupted.py OUT BATCH         at the end of batch BATCH
interrupted.py OUT declare GO    rank 0 while it waits for rank 1, which begins when the file GO is there

Without TFPS_PSERVERS it is plain Keras. Prints the error that the second `fit` raises, if any.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

import jobs
import keras
import numpy as np
import training

import tfps
from tfps.types import Array, Logs, Options


class Interrupt(keras.callbacks.Callback):
    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if batch == self.batch:
            os.kill(os.getpid(), signal.SIGINT)


def when_waiting(strategy: tfps.Strategy) -> None:
    """Ctrl-C to this process as soon as its main thread waits for what the ranks declare together."""

    def send() -> None:
        jobs.poll(lambda: any(thread.name.startswith("tfps-sheltered") for thread in threading.enumerate()))
        print("interrupted", flush=True)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()


def main(out: str, when: str, go: str = "") -> None:
    strategy = tfps.Strategy() if "TFPS_PSERVERS" in os.environ else None
    keras.utils.set_random_seed(1 + (strategy.rank if strategy else 0))
    model, x, y = build(strategy)
    options: Options = {"batch_size": 32, "shuffle": False, "verbose": 0}
    if when != "declare":
        options["callbacks"] = [Interrupt(int(when))]
    elif strategy and strategy.rank == 0:
        when_waiting(strategy)
    elif strategy:
        jobs.poll(Path(go).exists)
    if when != "declare" or (strategy and strategy.rank == 0):
        try:
            model.fit(x, y, **options)
        except KeyboardInterrupt:
            print("fit was interrupted", flush=True)
    options.pop("callbacks", None)
    try:
        model.fit(x, y, epochs=2, **options)
    except Exception as error:
        print(f"fit raised {type(error).__name__} {error}", flush=True)
        raise
    np.savez(out, *model.get_weights(), iterations=model.optimizer.iterations.numpy())


def build(strategy: tfps.Strategy | None) -> tuple[keras.Model, Array, Array]:
    with strategy.scope() if strategy else contextlib.nullcontext():
        model, x, y = training.mlp()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model, x, y


if __name__ == "__main__":
    main(*sys.argv[1:])
