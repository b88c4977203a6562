"""TensorFlow's ParameterServerStrategy: tf_keras `fit`, variables sharded over the servers; the cluster is TF_CONFIG's.

It is asynchronous: workers take steps from the coordinator's queue and wait for nobody, and single steps have no
callbacks. So epochs are timed, from their beginning to where all their steps are done, and divided by the steps of one
worker.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import tensorflow as tf
import tf_keras  # type: ignore[import-not-found]

from tools.peer_workers import keras_training
from tools.peer_workers.common import Clock, Sleeper, Work

if TYPE_CHECKING:
    from tfps.types import Logs

TIMED_EPOCHS = 2


def main() -> None:
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if cluster.task_type != "chief":
        server = tf.distribute.Server(
            cluster.cluster_spec(), job_name=cluster.task_type, task_index=cluster.task_id, protocol="grpc", start=True
        )
        server.join()
    coordinate(cluster, Work.from_environment())


def coordinate(cluster: tf.distribute.cluster_resolver.ClusterResolver, work: Work) -> None:
    """What the chief does: it gives the steps to the workers."""
    shards = tf.distribute.experimental.partitioners.FixedShardsPartitioner(work.servers)
    strategy = tf.distribute.ParameterServerStrategy(cluster, variable_partitioner=shards)
    clock = Clock(work, 0)
    with strategy.scope():
        optimizer = tf_keras.optimizers.SGD(keras_training.LEARNING_RATE)
        model = keras_training.build(tf_keras, work, optimizer, Sleeper())
    steps = max(1, work.steps // TIMED_EPOCHS)
    began_s = 0.0

    def begin(epoch: int, _: object) -> None:
        nonlocal began_s
        if epoch == 1:
            clock.warm()
        began_s = time.perf_counter()

    def end(epoch: int, logs: Logs) -> None:
        if epoch >= 1:
            clock.epoch_ended(logs["loss"], time.perf_counter() - began_s, steps)
        if epoch == TIMED_EPOCHS:
            clock.drained()  # here, because `fit` stays for seconds after the last epoch

    model.fit(
        keras_training.data(work, work.batch),
        steps_per_epoch=steps * work.workers,
        epochs=1 + TIMED_EPOCHS,
        verbose=0,
        callbacks=[tf_keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_epoch_end=end)],
    )
    clock.report(keras_training.checksum(model), timed_steps=steps * TIMED_EPOCHS)


if __name__ == "__main__":
    main()
