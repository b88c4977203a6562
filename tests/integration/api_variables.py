"""Checks of api.py: merge_call, updates, variables, scopes, random numbers, predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf
from api_checks import MEAN, Checks, context, equal, local, own_ids, raises, replica_id

import tfps
from tfps.types import Layer, Structure, Value

CHECKS = Checks()


@CHECKS.add
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


@CHECKS.add
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


@CHECKS.add
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


@CHECKS.add
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


@CHECKS.add
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


@CHECKS.add
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


@CHECKS.add
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


@CHECKS.add
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
