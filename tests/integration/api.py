"""Worker: does what `tf.distribute` documents of a strategy, eagerly and in tf.function, and checks every result.

api.py DEVICES      on so many logical CPU devices; all workers have the same number
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

import tfps
from tfps.types import Layer, Structure, Value

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
Check = Callable[[tfps.Strategy], None]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def context() -> Value:
    return tf.distribute.get_replica_context()


def replica_id() -> tf.Tensor:
    return tf.cast(context().replica_id_in_sync_group, tf.float32)


def own_ids(strategy: tfps.Strategy) -> list[int]:
    """Ids of this worker's replicas."""
    local = strategy.num_replicas_in_sync // strategy.num_workers
    return list(range(strategy.rank * local, (strategy.rank + 1) * local))


def both(function: Callable[[], Value]) -> list[Value]:
    """What `function` returns eagerly, in a graph, and when that graph runs again."""
    graph = tf.function(function, autograph=False)
    return [function(), graph(), graph()]


def equal(actual: Value, expected: Value) -> None:
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def local(strategy: tfps.Strategy, value: Value) -> list[np.ndarray]:
    return [np.asarray(each) for each in strategy.experimental_local_results(value)]


def raises(kinds: type[Exception] | tuple[type[Exception], ...], text: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kinds as error:
        assert text in str(error), f"{text!r} is not in {error}"
    else:
        raise AssertionError(f"expected an error with {text!r}")


@check
def replicas_have_ids_over_all_workers(strategy: tfps.Strategy) -> None:
    for result in both(lambda: strategy.run(replica_id)):
        equal(local(strategy, result), own_ids(strategy))
    for result in both(lambda: strategy.run(lambda: tf.constant(context().num_replicas_in_sync))):
        equal(local(strategy, result), [strategy.num_replicas_in_sync] * len(own_ids(strategy)))


@check
def values_from_a_function_are_run_per_replica(strategy: tfps.Strategy) -> None:
    def value(context: tf.distribute.experimental.ValueContext) -> tf.Tensor:
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
        return tf.constant(10.0 * context.replica_id_in_sync_group)

    values = strategy.experimental_distribute_values_from_function(value)
    equal(local(strategy, values), [10.0 * each for each in own_ids(strategy)])
    for result in both(lambda: strategy.run(lambda value: value + replica_id(), args=(values,))):
        equal(local(strategy, result), [11.0 * each for each in own_ids(strategy)])


@check
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


@check
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


@check
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


@check
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


@check
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


@check
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


@check
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


@check
def each_value_of_a_structure_is_reduced_by_itself(strategy: tfps.Strategy) -> None:
    count, workers = strategy.num_replicas_in_sync, strategy.num_workers
    for ids in both(lambda: strategy.run(replica_id)):
        reduced = strategy.reduce("MEAN", {"ids": ids, "more": (float(strategy.rank), [ids])}, axis=None)
        equal(reduced["ids"], (count - 1) / 2)
        equal(reduced["more"][0], (workers - 1) / 2)
        equal(reduced["more"][1][0], (count - 1) / 2)


@check
def merge_call_brings_the_replicas_together(strategy: tfps.Strategy) -> None:
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        variable = tf.Variable([0.0])

    def merged(strategy: tf.distribute.Strategy, value: Value) -> Value:
        assert tf.distribute.in_cross_replica_context()
        total = strategy.reduce("SUM", value, axis=None)
        mean = strategy.extended.reduce_to(MEAN, value, variable)
        strategy.extended.update(variable, lambda v, a: v.assign([a]), args=(mean,))
        return total

    def in_replica() -> tf.Tensor:
        return context().merge_call(merged, args=(replica_id(),)) + 0.0

    in_graph = tf.function(lambda: strategy.run(in_replica), autograph=False)
    for run in (lambda: strategy.run(in_replica), in_graph, in_graph):
        equal(local(strategy, run()), [sum(range(count))] * len(own_ids(strategy)))
        for component in strategy.experimental_local_results(variable):
            equal(component, [sum(range(count)) / count])
        variable.assign([-1.0])

    def in_a_branch() -> tf.Tensor:
        return tf.cond(replica_id() >= 0.0, in_replica, replica_id)

    raises(RuntimeError, "control flow", lambda: tf.function(lambda: strategy.run(in_a_branch), autograph=False)())


@check
def reduce_to_and_update_in_cross_replica_context(strategy: tfps.Strategy) -> None:
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        first, second = tf.Variable(1.0), tf.Variable([1.0, 2.0])

    def step() -> Value:
        ones, ids = strategy.run(lambda: (tf.ones([2]), replica_id()))
        to_second, to_first = strategy.extended.batch_reduce_to("SUM", [(ones, second), (ids, first)])
        strategy.extended.update(second, lambda v, a: v.assign_add(a), args=(to_second,))
        strategy.extended.update(first, lambda v, a, b: v.assign(a + b), args=(to_first,), kwargs={"b": 0.5})
        return strategy.extended.reduce_to("MEAN", ids, "/device:CPU:0")

    def run(step: Callable[[], Value]) -> None:
        with strategy.scope():
            equal(step(), (count - 1) / 2)

    run(step)
    graph = tf.function(step, autograph=False)
    run(graph)
    run(graph)
    for component in strategy.experimental_local_results(second):
        equal(component, [1.0 + 3 * count, 2.0 + 3 * count])
    for component in strategy.experimental_local_results(first):
        equal(component, sum(range(count)) + 0.5)


@check
def variables_know_where_they_were_made(strategy: tfps.Strategy) -> None:
    outside = tf.Variable(1.0)
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
        with strategy.extended.colocate_vars_with(variable):
            slot = tf.Variable([0.0, 0.0], trainable=False)
    assert strategy.extended.variable_created_in_scope(variable)
    assert not strategy.extended.variable_created_in_scope(outside)
    devices = [component.device for component in strategy.experimental_local_results(variable)]
    assert devices == [component.device for component in strategy.experimental_local_results(slot)]
    assert len(set(devices)) == len(own_ids(strategy)) == len(strategy.extended.worker_devices)
    with strategy.scope():
        raises(ValueError, "", lambda: strategy.extended.colocate_vars_with(outside).__enter__())


@check
def scopes_nest_only_in_their_own(strategy: tfps.Strategy) -> None:
    assert not tf.distribute.has_strategy()
    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy and tf.distribute.in_cross_replica_context()
        with strategy.scope():
            assert tf.distribute.get_strategy() is strategy
        other = tf.distribute.OneDeviceStrategy("CPU:0")
        raises(RuntimeError, "", lambda: other.scope().__enter__())
        raises(RuntimeError, "", lambda: other.run(lambda: 1))
    raises(RuntimeError, "", lambda: strategy.run(lambda: strategy.run(lambda: 1)))
    raises(RuntimeError, "", lambda: strategy.run(lambda: strategy.reduce("SUM", 1.0, axis=None)))


@check
def replicas_write_variables_by_their_aggregation(strategy: tfps.Strategy) -> None:
    count = strategy.num_replicas_in_sync
    mean_id = (count - 1) / 2
    aggregation = tf.VariableAggregation
    with strategy.scope():
        summed = tf.Variable(0.0, aggregation=aggregation.SUM)
        trained = tf.Variable(0.0, aggregation=aggregation.MEAN)
        first = tf.Variable(0, aggregation=aggregation.ONLY_FIRST_REPLICA, dtype=tf.int64)
        moving = {
            kind: tf.Variable(1.0, trainable=False, aggregation=kind) for kind in (aggregation.MEAN, aggregation.NONE)
        }
        on_read = {
            kind: tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=kind)
            for kind in (aggregation.SUM, aggregation.MEAN, aggregation.ONLY_FIRST_REPLICA)
        }

    def in_replica() -> None:
        summed.assign(1.0 + replica_id())
        trained.assign(replica_id())
        first.assign(tf.cast(100 + context().replica_id_in_sync_group, tf.int64))
        for variable in moving.values():
            variable.assign(0.5 * variable + 0.5 * replica_id())
        for variable in on_read.values():
            variable.assign_add(replica_id())

    expected = 1.0
    in_graph = tf.function(lambda: strategy.run(in_replica), autograph=False)
    for number, run in enumerate([lambda: strategy.run(in_replica), in_graph, in_graph], 1):
        run()
        expected = 0.5 * expected + 0.5 * mean_id
        equal(summed.numpy(), sum(1.0 + i for i in range(count)))
        equal(trained.numpy(), mean_id)
        for component in strategy.experimental_local_results(first):
            equal(component, 100 + own_ids(strategy)[0])
        for kind, variable in moving.items():
            np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6, err_msg=str(kind))
            components = [each.numpy() for each in strategy.experimental_local_results(variable)]
            assert len(set(components)) == 1, "after a read all replicas go on from the same value"
        equal(on_read[aggregation.SUM].numpy(), number * sum(range(count)))
        equal(on_read[aggregation.MEAN].numpy(), number * mean_id)
        equal(on_read[aggregation.ONLY_FIRST_REPLICA].numpy(), 0.0)

    for kind, variable in on_read.items():
        for value in (7.0, 3.0):
            variable.assign(value)
            equal(variable.numpy(), value)
        run()
        equal(
            variable.numpy(),
            3.0 + {aggregation.SUM: sum(range(count)), aggregation.MEAN: mean_id}.get(kind, 0.0),
        )
    raises(ValueError, "assign_add", lambda: on_read[aggregation.SUM].assign_add(1.0))
    on_read[aggregation.MEAN].assign_add(1.0)
    on_read[aggregation.MEAN].assign_sub(0.5)
    read_in_graph = tf.function(lambda: on_read[aggregation.SUM] + 0.0, autograph=False)
    with strategy.scope():
        equal(read_in_graph(), on_read[aggregation.SUM].numpy())


@check
def what_nobody_has_written_is_read_on_one_rank_alone(strategy: tfps.Strategy) -> None:
    options = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
    with strategy.scope():
        moving = tf.Variable([1.0], trainable=False)
        counted = tf.Variable(0, dtype=tf.int64, **options)

    def in_replica() -> None:
        moving.assign([replica_id()])
        counted.assign_add(1)

    with strategy.scope():
        restored = tf.Variable(1.0, **options)
    restored.assign(7.0)  # before the ranks have agreed on anything
    step = tf.function(lambda: strategy.run(in_replica), autograph=False)
    step()
    strategy.run(lambda: restored.assign_add(1.0))
    equal(restored.numpy(), 7.0 + strategy.num_replicas_in_sync)
    strategy.combine()
    if strategy.rank == 0:
        equal(moving.numpy(), [(strategy.num_replicas_in_sync - 1) / 2])
        equal(counted.numpy(), strategy.num_replicas_in_sync)
        strategy.combine()
    step()
    equal(counted.numpy(), 2 * strategy.num_replicas_in_sync)
    if strategy.rank == 1:
        equal(counted.numpy(), 2 * strategy.num_replicas_in_sync)
        equal(moving.numpy(), [(strategy.num_replicas_in_sync - 1) / 2])
    counted.assign(5)
    equal(counted.numpy(), 5)


@check
def replicas_draw_random_numbers_of_their_own(strategy: tfps.Strategy) -> None:
    keras.utils.set_random_seed(1)  # the same on all ranks
    layers = keras.layers
    plain = [layers.Dropout(0.5, seed=3), layers.GaussianNoise(1.0, seed=4), layers.RandomRotation(0.5, seed=5)]
    plain_seeds = keras.random.SeedGenerator(6)
    with strategy.scope():
        noisy = [type(layer).from_config(layer.get_config()) for layer in plain]
        seeds, generator = keras.random.SeedGenerator(6), tf.random.Generator.from_seed(7)
    image = np.arange(1.0, 65.0, dtype=np.float32).reshape(1, 8, 8, 1)

    def drawn(layers: list[Layer], seeds: keras.random.SeedGenerator) -> list[Value]:
        values = [layer(image, training=True) for layer in layers]
        return [*values, keras.random.normal([8], seed=seeds), keras.random.uniform([8], seed=seeds)]

    def of_replicas(function: Callable[[], Value], ways: str) -> Iterator[list[np.ndarray]]:
        """Values by replica of all workers, of each thing that `function` draws; Eagerly, in a Graph."""

        def run() -> Value:
            return strategy.run(lambda: [tf.reshape(each, [1, -1]) for each in function()])

        in_graph = tf.function(run, autograph=False)
        for way in ways:
            yield [np.asarray(strategy.gather(each, axis=0)) for each in (in_graph if way == "G" else run)()]

    def all_differ(values: Structure) -> None:
        assert len({value.tobytes() for value in values}) == strategy.num_replicas_in_sync

    for results in of_replicas(lambda: drawn(noisy, seeds), "EGG"):
        for values, expected in zip(results, drawn(plain, plain_seeds), strict=True):
            all_differ(values)
            np.testing.assert_allclose(values[0], np.reshape(expected, -1), rtol=1e-5, atol=1e-5)
    states = strategy.gather(strategy.run(lambda: tf.reshape(seeds.state.value + 0, [1, 2])), axis=0)
    assert len({state.tobytes() for state in np.asarray(states)}) == 1, "what is stored is the same everywhere"

    def by_name(name: str) -> Callable[[], Value]:
        drawing: dict[str, Callable[[], Value]] = {
            "tf.random.Generator": lambda: [generator.normal([8])],
            "no seed": lambda: [keras.random.normal([8]), keras.random.shuffle(tf.range(64))],
            "tf.random": lambda: [tf.random.normal([8]), tf.nn.dropout(tf.ones([64]), 0.5)],
        }
        return drawing[name]

    # In a graph, Keras would make its seed generator in every trace, as under MirroredStrategy; eagerly,
    # TensorFlow's own operations draw alike on all workers.
    for name, ways in (("tf.random.Generator", "EG"), ("no seed", "E"), ("tf.random", "G")):
        for results in of_replicas(by_name(name), ways):
            for values in results:
                all_differ(values)


@check
def predictions_are_one_process_on_every_rank(strategy: tfps.Strategy) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), Noise()])
    images = np.zeros((2, 4), np.float32)
    first, second = model.predict_on_batch(images), model.predict(images, verbose=0)
    for drawn in (first, second):
        values = strategy.gather(tf.constant([drawn.reshape(-1)]), axis=0)
        assert len({each.tobytes() for each in np.asarray(values)}) == 1, "ranks differ"


class Noise(keras.layers.Layer):
    """Draws whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, inputs: Structure) -> Value:
        return inputs + keras.random.normal(tf.shape(inputs), seed=self.seeds)


def main(devices: str) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * int(devices))
    config = tfps.Config(step_timeout_s=60, slice_bytes=4096, window_bytes=8192)
    strategy = tfps.Strategy(devices=[f"CPU:{each}" for each in range(int(devices))], config=config)
    for each in CHECKS:
        try:
            each(strategy)
        except BaseException:
            print("FAILED:", each.__name__, flush=True)
            raise
        print("passed:", each.__name__, flush=True)
    strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
