"""TensorFlow's MultiWorkerMirroredStrategy: tf_keras `fit`, with its defaults; the cluster comes from TF_CONFIG.

With Keras 3 `fit` fails (3.15: a PerReplica value cannot be converted).
"""

from __future__ import annotations

import json
import os

import tensorflow as tf
import tf_keras  # type: ignore[import-not-found]

from tools.peer_workers import keras_training
from tools.peer_workers.common import Clock, Sleeper, Work


def main() -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    work, sleeper = Work.from_environment(), Sleeper()
    if strategy.num_replicas_in_sync != work.workers:
        raise ValueError(f"the strategy must have {work.workers} replicas, got {strategy.num_replicas_in_sync}")
    clock = Clock(work, json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    with strategy.scope():
        optimizer = tf_keras.optimizers.SGD(keras_training.LEARNING_RATE)
        model = keras_training.build(tf_keras, work, optimizer, sleeper)
    checksum = keras_training.fit(tf_keras, model, work, work.batch * work.workers, clock)
    clock.report(checksum, overslept_s=sleeper.overslept_s)


if __name__ == "__main__":
    main()
