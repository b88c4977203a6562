"""Checks of api.py: values of replicas, and what reduces and gathers them, with gradients."""

from __future__ import annotations

import itertools

import numpy as np
import tensorflow as tf
from api_checks import MEAN, Checks, both, context, equal, local, own_ids, raises, replica_id

import tfps

CHECKS = Checks()


@CHECKS.add
def replicas_have_ids_over_all_workers(strategy: tfps.Strategy) -> None:
    for result in both(lambda: strategy.run(replica_id)):
        equal(local(strategy, result), own_ids(strategy))
    for result in both(lambda: strategy.run(lambda: tf.constant(context().num_replicas_in_sync))):
        equal(local(strategy, result), [strategy.num_replicas_in_sync] * len(own_ids(strategy)))


@CHECKS.add
def values_from_a_function_are_run_per_replica(strategy: tfps.Strategy) -> None:
    def value(context: tf.distribute.experimental.ValueContext) -> tf.Tensor:
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
        return tf.constant(10.0 * context.replica_id_in_sync_group)

    values = strategy.experimental_distribute_values_from_function(value)
    equal(local(strategy, values), [10.0 * each for each in own_ids(strategy)])
    for result in both(lambda: strategy.run(lambda value: value + replica_id(), args=(values,))):
        equal(local(strategy, result), [11.0 * each for each in own_ids(strategy)])


@CHECKS.add
def reduce_sums_and_averages_over_all_replicas(strategy: tfps.Strategy) -> None:
    count = strategy.num_replicas_in_sync
    total = sum(range(count))
    for result in both(lambda: strategy.reduce("SUM", strategy.run(replica_id), axis=None)):
        equal(result, total)
    for result in both(lambda: strategy.reduce(MEAN, strategy.run(replica_id), axis=None)):
        equal(result, total / count)
    nested = lambda: {"a": replica_id(), "b": [tf.ones([2])]}  # noqa: E731
    for result in both(lambda: strategy.reduce("SUM", strategy.run(nested), axis=None)):
        equal(result["a"], total)
        equal(result["b"][0], [count] * 2)
    whole = strategy.reduce("SUM", strategy.run(lambda: tf.ones([], tf.int64)), axis=None)
    assert whole.dtype == tf.int64 and int(whole) == count
    assert float(strategy.reduce("MEAN", 2.0, axis=None)) == 2.0


@CHECKS.add
def reduce_along_an_axis_weighs_by_size(strategy: tfps.Strategy) -> None:
    count = strategy.num_replicas_in_sync

    def rows() -> tf.Tensor:  # replica i has i + 1 rows of value i
        return tf.fill([context().replica_id_in_sync_group + 1, 2], replica_id())

    expected = sum(i * (i + 1) for i in range(count))
    for result in both(lambda: strategy.reduce("SUM", strategy.run(rows), axis=0)):
        equal(result, [expected] * 2)
    size = sum(i + 1 for i in range(count))
    for result in both(lambda: strategy.reduce("MEAN", strategy.run(rows), axis=0)):
        np.testing.assert_allclose(np.asarray(result), [expected / size] * 2, rtol=1e-6)


@CHECKS.add
def gather_joins_in_order_of_replica_ids(strategy: tfps.Strategy) -> None:
    count = strategy.num_replicas_in_sync

    def rows() -> tf.Tensor:
        return tf.fill([context().replica_id_in_sync_group + 1, 3], context().replica_id_in_sync_group)

    ids = [i for i in range(count) for _ in range(i + 1)]
    for result in both(lambda: strategy.gather(strategy.run(rows), axis=0)):
        equal(result, np.repeat(np.array(ids)[:, None], 3, 1))
    for result in both(lambda: strategy.gather(strategy.run(lambda: tf.transpose(rows())), axis=1)):
        equal(result, np.repeat(np.array(ids)[None], 3, 0))
    cube = np.arange(12).reshape(2, 2, 3)
    for axis, dtype in itertools.product(range(3), (tf.float16, tf.int8, tf.complex64, tf.float64)):

        def gathered(axis: int = axis, dtype: tf.DType = dtype) -> tf.Tensor:
            return strategy.gather(strategy.run(lambda: tf.cast(cube, dtype)), axis=axis)

        for result in both(gathered):
            equal(result, np.concatenate([cube] * count, axis))
            assert result.dtype == dtype
    for result in both(lambda: strategy.gather(strategy.run(lambda: replica_id()[None] > 0), axis=0)):
        equal(result, [i > 0 for i in range(count)])
    # A rank without rows, the end of an uneven data set.
    for result in both(lambda: strategy.gather(strategy.run(lambda: rows()[1:]), axis=0)):
        equal(result, np.repeat(np.array([i for i in range(count) for _ in range(i)])[:, None], 3, 1))


@CHECKS.add
def gather_refuses_what_it_cannot_join(strategy: tfps.Strategy) -> None:
    raises(tfps.UnsupportedError, "at least one", lambda: strategy.gather(strategy.run(replica_id), axis=0))
    raises(
        tfps.UnsupportedError, "from 0 to 0", lambda: strategy.gather(strategy.run(lambda: replica_id()[None]), axis=1)
    )
    raises(
        tfps.UnsupportedError, "numbers", lambda: strategy.gather(strategy.run(lambda: tf.constant(["text"])), axis=0)
    )
    if strategy.num_replicas_in_sync == strategy.num_workers:  # else TensorFlow refuses to join the local ones
        different = lambda: tf.zeros([1, 1 + context().replica_id_in_sync_group])  # noqa: E731
        raises(
            tf.errors.InvalidArgumentError,
            "all other sizes must be the same",
            lambda: strategy.gather(strategy.run(different), axis=0),
        )


@CHECKS.add
def all_gather_has_gradients(strategy: tfps.Strategy) -> None:
    count = strategy.num_replicas_in_sync

    def in_replica() -> tuple[tf.Tensor, tf.Tensor]:
        mine = tf.fill([1, 2], replica_id())
        with tf.GradientTape() as tape:
            tape.watch(mine)
            gathered = context().all_gather(mine, axis=0)
            loss = tf.reduce_sum(gathered * tf.cast(tf.range(count), tf.float32)[:, None])
        return gathered, tape.gradient(loss, mine)

    for gathered, gradient in both(lambda: strategy.run(in_replica)):
        for each in local(strategy, gathered):
            equal(each, np.repeat(np.arange(count)[:, None], 2, 1))
        for identity, each in zip(own_ids(strategy), local(strategy, gradient), strict=True):
            equal(each, np.full((1, 2), identity * count))


@CHECKS.add
def all_reduce_has_gradients(strategy: tfps.Strategy) -> None:
    count = strategy.num_replicas_in_sync
    total = sum(range(count))

    def in_replica() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        mine = tf.stack([replica_id(), 1.0])
        with tf.GradientTape() as tape:
            tape.watch(mine)
            summed = context().all_reduce("SUM", mine)
            mean = context().all_reduce(MEAN, {"nested": mine})["nested"]
            loss = tf.reduce_sum(summed * (1.0 + replica_id())) + tf.reduce_sum(mean)
        return summed, mean, tape.gradient(loss, mine)

    for summed, mean, gradient in both(lambda: strategy.run(in_replica)):
        for each in local(strategy, summed):
            equal(each, [total, count])
        for each in local(strategy, mean):
            equal(each, [total / count, 1.0])
        for each in local(strategy, gradient):
            equal(each, [total + count + 1] * 2)


@CHECKS.add
def all_reduce_takes_sparse_and_half_values(strategy: tfps.Strategy) -> None:
    count = strategy.num_replicas_in_sync

    def in_replica() -> tuple[tf.Tensor, tf.Tensor]:
        index = tf.reshape(context().replica_id_in_sync_group, [1])
        rows = tf.IndexedSlices(tf.ones([1, 2]), index, tf.constant([count, 2]))
        half = tf.fill([3], tf.cast(replica_id(), tf.float16))
        return tf.convert_to_tensor(context().all_reduce("SUM", rows)), context().all_reduce("SUM", half)

    for dense, half in both(lambda: strategy.run(in_replica)):
        for each in local(strategy, dense):
            equal(each, np.ones((count, 2)))
        for each in local(strategy, half):
            equal(each, [sum(range(count))] * 3)
            assert each.dtype == np.float16


@CHECKS.add
def each_value_of_a_structure_is_reduced_by_itself(strategy: tfps.Strategy) -> None:
    count, workers = strategy.num_replicas_in_sync, strategy.num_workers
    for ids in both(lambda: strategy.run(replica_id)):
        reduced = strategy.reduce("MEAN", {"ids": ids, "more": (float(strategy.rank), [ids])}, axis=None)
        equal(reduced["ids"], (count - 1) / 2)
        equal(reduced["more"][0], (workers - 1) / 2)
        equal(reduced["more"][1][0], (count - 1) / 2)
