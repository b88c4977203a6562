"""Worker: trains until something ends it; prints `training` once steps are running and the error that ended it.

endless.py [LAST_STEP]     ends by itself after LAST_STEP steps
endless.py stays           stays in front of a step once it has printed `training`
endless.py fills           writes to a full disk then
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import keras
import training

import tfps


class Say(keras.callbacks.Callback):
    def __init__(self, last: str) -> None:
        super().__init__()
        self.last, self.steps = last, 0

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.steps += 1
        if self.steps == 5:
            print("training", flush=True)
            if self.last == "stays":
                threading.Event().wait()
            if self.last == "fills":
                Path("/dev/full").write_bytes(b"a checkpoint")
        if str(self.steps) == self.last:
            sys.exit(0)


def main(last: str = "") -> None:
    strategy = tfps.Strategy()
    with strategy.scope():
        model, x, y = training.mlp()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    try:
        model.fit(x, y, batch_size=32, epochs=100_000, verbose=0, callbacks=[Say(last)])
    except Exception as error:
        print(f"fit raised {type(error).__name__} {error}", flush=True)
        try:
            model.get_weights()
        except Exception as second:
            print("get_weights raised", type(second).__name__, second, flush=True)
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
