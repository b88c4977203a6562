"""Horovod: tf.keras `fit` with DistributedOptimizer over Gloo, with its defaults; the rank comes from HOROVOD_RANK."""

from __future__ import annotations

import horovod.tensorflow.keras as hvd  # type: ignore[import-not-found]
import tensorflow as tf

from tools.peer_workers import keras_training
from tools.peer_workers.common import Clock, Sleeper, Work


def main() -> None:
    hvd.init()
    work, sleeper = Work.from_environment(), Sleeper()
    if hvd.size() != work.workers:
        raise ValueError(f"Horovod must have {work.workers} ranks, got {hvd.size()}")
    clock = Clock(work, hvd.rank())
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(keras_training.LEARNING_RATE))
    model = keras_training.build(tf.keras, work, optimizer, sleeper)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    checksum = keras_training.fit(tf.keras, model, work, work.batch, clock, [broadcast])
    clock.report(checksum, overslept_s=sleeper.overslept_s)


if __name__ == "__main__":
    main()
