"""tfps: Keras 3 `fit` under `tfps.Strategy`, with its defaults; the place in the job comes from TFPS_... variables."""

from __future__ import annotations

import keras

import tfps
from tools.peer_workers import keras_training
from tools.peer_workers.common import Clock, Sleeper, Work


def main() -> None:
    work, sleeper = Work.from_environment(), Sleeper()
    strategy = tfps.Strategy()
    clock = Clock(work, strategy.rank)
    with strategy.scope():
        model = keras_training.build(keras, work, keras.optimizers.SGD(keras_training.LEARNING_RATE), sleeper)
    checksum = keras_training.fit(keras, model, work, work.batch * work.workers, clock)
    clock.report(checksum, overslept_s=sleeper.overslept_s)
    strategy.close()


if __name__ == "__main__":
    main()
