"""What tfps is compared with, on the same work: peer_worker.py KIND --work JSON. It answers as worker.py does.

Kinds:
    tf_ps: ParameterServerStrategy and ClusterCoordinator, the table sharded over the servers (FixedShardsPartitioner),
        tf.nn.embedding_lookup, in a loop without Keras whose rule of update is TensorFlow's own for sparse Adagrad.
    tf_ps_unique: the same, where a worker asks for each row of a batch once.
    tfra: TensorFlow Recommenders Addons in one process: its Embedding layer and its optimizer in tf_keras `fit`.
    tfra_ps: the same with ParameterServerStrategy, rows on the servers, as in its example movielens-1m-keras-ps.
    serve: a worker or a server of these; TF_CONFIG says which.
Steps of all of these repeat the batches of the first round. Those with servers are asynchronous: all steps are put into
the coordinator's queue, and timed until they are done. Of the second one of two epochs, where Keras fits.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tools.tables import work as works
from tools.tables.work import Work, say

Round = Callable[[], float]  # takes the steps of a round: seconds per step
KINDS = ("tf_ps", "tf_ps_unique", "tfra", "tfra_ps", "serve")
SERVERS = 2
_FILLED = 2**16  # rows at a time


def main() -> None:
    """The program."""
    parser = works.parser("Trains embeddings with a peer of tfps.")
    parser.add_argument("kind", choices=KINDS)
    options = parser.parse_args()
    if options.kind == "serve":
        if importlib.util.find_spec("tensorflow_recommenders_addons"):
            importlib.import_module("tensorflow_recommenders_addons")  # servers must know its operations
        _cluster(serve=True)
    stdout = works.own_stdout()  # TFRA writes to it, too
    if options.kind.startswith("tfra"):
        take = _tfra(options.work, options.steps, on_servers=options.kind == "tfra_ps")
    else:
        take = _tf_ps(options.work, options.warmup, options.steps, unique=options.kind == "tf_ps_unique")
    for line in sys.stdin:
        if line.startswith("prepare"):
            say({}, stdout)
            continue
        say({"step_s": take(), "wait_s": 0.0}, stdout)


def _cluster(*, serve: bool = False) -> tf.distribute.cluster_resolver.ClusterResolver:
    found = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if serve:
        tf.distribute.Server(
            found.cluster_spec(), job_name=found.task_type, task_index=found.task_id, protocol="grpc", start=True
        ).join()
    return found


def _batches(work: Work, count: int) -> tf.data.Dataset:
    x, y = work.examples(0, count)
    shape = [count, work.batch, -1]
    return tf.data.Dataset.from_tensor_slices((x.reshape(shape), y.reshape(shape))).repeat().prefetch(2)


# ParameterServerStrategy


def _tf_ps(work: Work, warmup: int, steps: int, *, unique: bool) -> Round:
    shards = tf.distribute.experimental.partitioners.FixedShardsPartitioner(SERVERS)

    def partitioner(shape: tf.TensorShape, dtype: tf.DType, **options: object) -> list[int]:
        if shape.rank == 2 and shape[0] == work.rows:
            found: list[int] = shards(shape, dtype, **options)
            return found
        return [1] * (shape.rank or 1)  # dense layers are whole

    strategy = tf.distribute.ParameterServerStrategy(_cluster(), variable_partitioner=partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        table = tf.Variable(tf.random.uniform([work.rows, work.dim], -0.05, 0.05))
        rows = list(zip(table.variables, _accumulators([table])[0].variables, strict=True))
        inputs = work.features * work.dim
        shapes = [[inputs, works.UNITS], [works.UNITS], [works.UNITS, 1], [1]]
        dense = [tf.Variable(tf.random.uniform(shape, -0.1, 0.1)) for shape in shapes]
        slots = _accumulators(dense)

    def replica(ids: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        flat, places = tf.reshape(ids, [-1]), None
        if unique:
            flat, places = tf.unique(flat)
        with tf.GradientTape() as tape:
            found = tf.nn.embedding_lookup(table, flat)
            if places is not None:
                found = tf.gather(found, places)
            hidden = tf.nn.relu(tf.reshape(found, [-1, inputs]) @ dense[0] + dense[1])
            logits = hidden @ dense[2] + dense[3]
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
        sparse, others = tape.gradient(loss, [[variable for variable, _ in rows], dense])
        for (variable, accumulator), gradient in zip(rows, sparse, strict=True):
            _update_rows(variable, accumulator, gradient)
        for variable, accumulator, gradient in zip(dense, slots, others, strict=True):
            with tf.device(variable.device):
                tf.raw_ops.ResourceApplyAdagradV2(
                    var=variable.handle,
                    accum=accumulator.handle,
                    lr=works.LEARNING_RATE,
                    epsilon=works.EPSILON,
                    grad=gradient,
                )
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def step(batches: object) -> tf.Tensor:
        return strategy.run(replica, next(batches))  # type: ignore[call-overload]

    batches = iter(coordinator.create_per_worker_dataset(lambda: _batches(work, warmup + steps)))

    def take(count: int) -> None:
        losses = [coordinator.schedule(step, args=(batches,)) for _ in range(count)]
        coordinator.join()
        losses[-1].fetch()

    def round_() -> float:
        take(warmup)
        began_s = time.perf_counter()
        take(steps)
        return (time.perf_counter() - began_s) / steps

    return round_


def _accumulators(variables: list[tf.Variable]) -> list[tf.Variable]:
    return [tf.Variable(tf.fill(each.shape, works.ACCUMULATOR), trainable=False) for each in variables]


def _update_rows(variable: tf.Variable, accumulator: tf.Variable, gradient: tf.IndexedSlices) -> None:
    """As optimizers of tf_keras do it: the gradients of a row are added, where the variable is."""
    with tf.device(variable.device):
        ids, places = tf.unique(gradient.indices)
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=variable.handle,
            accum=accumulator.handle,
            lr=works.LEARNING_RATE,
            epsilon=works.EPSILON,
            grad=tf.math.unsorted_segment_sum(gradient.values, places, tf.size(ids)),
            indices=ids,
        )


# TensorFlow Recommenders Addons


def _tfra(work: Work, steps: int, *, on_servers: bool) -> Round:
    import tf_keras  # type: ignore[import-not-found]
    from tensorflow_recommenders_addons import dynamic_embedding as de  # type: ignore[import-not-found]

    strategy, devices = tf.distribute.get_strategy(), None
    if on_servers:
        strategy = tf.distribute.ParameterServerStrategy(_cluster())
        devices = [f"/job:ps/replica:0/task:{number}/device:CPU:0" for number in range(SERVERS)]
    with strategy.scope():
        table = de.keras.layers.Embedding(
            work.dim,
            initializer=tf_keras.initializers.RandomUniform(-0.05, 0.05),
            devices=devices,
            init_capacity=2 * work.rows,
        )
        layers = [
            table,
            tf_keras.layers.Flatten(),
            tf_keras.layers.Dense(works.UNITS, activation="relu"),
            tf_keras.layers.Dense(1),
        ]
        inputs = tf_keras.layers.Input((work.features,), dtype="int64")
        model = tf_keras.Sequential([inputs, *layers])
        adagrad = tf_keras.optimizers.legacy.Adagrad(works.LEARNING_RATE, works.ACCUMULATOR, works.EPSILON)
        model.compile(de.DynamicEmbeddingOptimizer(adagrad), tf_keras.losses.BinaryCrossentropy(from_logits=True))
    for begin in range(0, work.rows, _FILLED):
        ids = work.ids(np.arange(begin, min(begin + _FILLED, work.rows), dtype=np.int64))
        table.params.upsert(tf.constant(ids), tf.fill([len(ids), work.dim], 0.01))
    data, began_s, took_s = _batches(work, steps), 0.0, 0.0

    def start(epoch: int, _: object) -> None:
        nonlocal began_s
        began_s = time.perf_counter()

    def end(epoch: int, _: object) -> None:
        nonlocal took_s
        took_s = time.perf_counter() - began_s

    clock = tf_keras.callbacks.LambdaCallback(on_epoch_begin=start, on_epoch_end=end)

    def round_() -> float:
        model.fit(data, steps_per_epoch=steps, epochs=2, verbose=0, callbacks=[clock])
        return took_s / steps

    return round_


if __name__ == "__main__":
    main()
