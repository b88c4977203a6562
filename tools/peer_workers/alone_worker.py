"""One process without communication: Keras 3 as it is."""

from __future__ import annotations

import keras

from tools.peer_workers import keras_training
from tools.peer_workers.common import Clock, Sleeper, Work


def main() -> None:
    work, sleeper = Work.from_environment(), Sleeper()
    clock = Clock(work, 0)
    model = keras_training.build(keras, work, keras.optimizers.SGD(keras_training.LEARNING_RATE), sleeper)
    checksum = keras_training.fit(keras, model, work, work.batch, clock)
    clock.report(checksum, overslept_s=sleeper.overslept_s)


if __name__ == "__main__":
    main()
