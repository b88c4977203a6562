"""Trains on two local devices (logical CPUs) and on one with the same global batch, and compares."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
import training

import tfps
from tfps.runtime.transfers import DeferredUpdate
from tfps.types import Argument, Structure, Value
from tfps.updates.pending import PlannedBucket

Adam, SGD = keras.optimizers.Adam, keras.optimizers.SGD


def loss_scaled() -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(Adam(), initial_scale=1024.0, dynamic_growth_steps=4)


# What is trained: model, optimizer, options of `compile`.
PROGRAMS: dict[str, tuple[training.Build, Callable[[], keras.optimizers.Optimizer], dict[str, Argument]]] = {
    "adam": (training.mlp, Adam, {}),
    "momentum": (training.mlp, lambda: SGD(0.05, momentum=0.9, nesterov=True), {}),
    "accumulation": (training.mlp, lambda: Adam(gradient_accumulation_steps=2), {}),
    "average": (training.mlp, lambda: Adam(use_ema=True), {}),
    "clipping": (training.mlp, lambda: SGD(0.05, global_clipnorm=1.0), {}),
    "loss scaling": (training.mlp, loss_scaled, {}),
    "sparse": (training.embedding_sparse, Adam, {}),
    "no call": (training.without_call, Adam, {"metrics": ["accuracy"]}),
    "eager": (training.mlp, Adam, {"run_eagerly": True}),
}
OVER_GRPC = ("accumulation", "sparse")


def watch_who_sends() -> dict[str, set[int]]:
    """Which replicas carry the sum of a bucket, by its name."""
    send = PlannedBucket.send
    carriers: dict[str, set[int]] = {}

    def watched(
        bucket: PlannedBucket,
        transfer: DeferredUpdate,
        queue: tf.Tensor,
        graph_run: tf.Tensor,
        carries: bool,
        times: tuple[Value, ...],
    ) -> None:
        if carries:
            carriers.setdefault(transfer.spec.name, set()).add(bucket.replica)
        send(bucket, transfer, queue, graph_run, carries, times)

    setattr(PlannedBucket, "send", watched)  # noqa: B010  # for the whole process
    return carriers


def trained(name: str, pservers: list[str], devices: list[str]) -> list[np.ndarray]:
    build, optimizer, options = PROGRAMS[name]
    config = tfps.Config(slice_bytes=4096, window_bytes=8192)
    strategy = tfps.Strategy(pservers or None, devices=devices, config=config)
    assert strategy.num_replicas_in_sync == len(devices)
    carriers = watch_who_sends()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model, x, y = build()
        model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    model.fit(x, y, batch_size=64, epochs=1 if options else 3, shuffle=False, verbose=0)
    for variable in [*model.weights, *model.optimizer.variables]:
        if "gradient_accumulator" in variable.path:
            continue  # what this replica's own batches have given
        replicas = [np.asarray(component).tobytes() for component in variable.value.values]
        assert len(replicas) == len(devices)
        assert len(set(replicas)) == 1, f"{variable.path}: the replicas differ"
    if not options:
        assert all(len(replicas) == 1 for replicas in carriers.values()), "one replica sends a bucket's sum"
        assert set().union(*carriers.values()) == set(range(len(devices))), "all devices carry buckets"
        assert len(carriers) == strategy._runtime.update_buckets() > 1
    weights = model.get_weights()
    strategy.close()
    return weights


def custom_loop(pservers: list[str], devices: list[str]) -> list[np.ndarray]:
    """Gradients that the program sums and clips by itself."""
    strategy = tfps.Strategy(pservers or None, devices=devices)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model, x, y = training.mlp()
        optimizer = Adam()
        optimizer.build(model.trainable_variables)

    def step(batch: Structure) -> None:
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(batch[1], model(batch[0]), from_logits=True)
            loss = tf.reduce_sum(losses) / 64
        gradients = tf.distribute.get_replica_context().all_reduce(
            "SUM", tape.gradient(loss, model.trainable_variables)
        )
        gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
        for gradient, variable in zip(gradients, model.trainable_variables, strict=True):
            variable.assign_sub(0.05 * gradient)

    run = tf.function(lambda batch: strategy.run(step, args=(batch,)), autograph=False)
    for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(64)):
        run(batch)
    for variable in model.trainable_variables:
        assert len({np.asarray(component).tobytes() for component in variable.value.values}) == 1, variable.path
    weights = model.get_weights()
    strategy.close()
    return weights


def epoch_in_a_function(pservers: list[str], devices: list[str]) -> list[np.ndarray]:
    """An epoch in one function, which creates the optimizer's variables, too, some of them from constants."""
    strategy = tfps.Strategy(pservers or None, devices=devices)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model, x, y = training.mlp()
        optimizer = keras.optimizers.Adafactor(epsilon_1=1e-12)  # with 1e-30 columns of zeros end in NaN

    def step(x: Value, y: Value) -> None:
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=64)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    @tf.function
    def epoch(batches: Structure) -> None:
        for batch in batches:
            strategy.run(step, args=batch)

    epoch(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(64)))
    weights = model.get_weights()
    strategy.close()
    return weights


def reduced(strategy: tf.distribute.Strategy) -> dict[str, Value]:
    """What `reduce` makes of structures, by operation and structure; the name of the error where it raises one."""
    first = strategy.run(
        lambda: 1.0 + tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
    )
    second = strategy.run(lambda each: tf.fill([2], 10.0 + each), args=(first,))
    with strategy.scope():
        variable = tf.Variable(5.0)
    structures: dict[str, Structure] = {
        "one": first,
        "nested": {"a": first, "b": (second, [first])},
        "with a number": (first, 7.0),
        "a number first": (7.0, second, [first]),
        "with a tensor": [first, tf.constant([3.0])],
        "with a variable": (variable, first),
        "a number": 7.0,
        "nothing": {"a": first, "b": None},
    }
    results: dict[str, Value] = {}
    for operation in ("SUM", "MEAN"):
        for name, structure in structures.items():
            try:
                value = strategy.reduce(operation, structure, axis=None)
                value = tf.nest.map_structure(lambda each: None if each is None else np.asarray(each).tolist(), value)
            except ValueError:
                value = "ValueError"
            results[f"{operation} of {name}"] = value
    return results


def gradients_that_all_replicas_share(strategy: tf.distribute.Strategy) -> list[float]:
    """One tensor for all replicas, eagerly and in a graph: each contributes it."""
    gradient = tf.constant([1.0])
    with strategy.scope():
        variable = keras.Variable([0.0])
        optimizer = SGD(1.0)
    strategy.run(lambda: optimizer.apply([gradient], [variable]))
    eagerly = float(variable.numpy()[0])
    tf.function(lambda: strategy.run(lambda: optimizer.apply([gradient], [variable])), autograph=False)()
    return [eagerly, float(variable.numpy()[0])]


def rows_are_joined(devices: list[str]) -> None:
    """Rows of sparse gradients: in the order of replicas, however many each has in each turn of a loop in a graph."""
    strategy = tfps.Strategy(devices=devices)

    def in_replica(sizes: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        replica = tf.cast(context.replica_id_in_sync_group, tf.int32)

        def joined(sizes: tf.Tensor) -> tf.Tensor:
            indices = 100 * replica + tf.range(sizes[replica])
            values = tf.tile(tf.cast(indices, tf.float32)[:, None], [1, 3])
            gradients = context.all_reduce("SUM", [tf.IndexedSlices(values, indices), tf.ones([2])])
            with tf.control_dependencies([tf.debugging.assert_equal(gradients[1], [2.0, 2.0])]):
                return tf.concat([gradients[0].indices, tf.cast(gradients[0].values[:, 2], tf.int32)], 0)

        nested = tf.function(joined, input_signature=[tf.TensorSpec([2], tf.int32)])  # called twice, traced once
        branch = tf.cond(sizes[0] >= 0, lambda: joined(sizes), lambda: sizes)
        return tf.concat([joined(sizes), nested(sizes), nested(sizes[::-1]), branch], 0)

    @tf.function
    def loop(table: tf.Tensor) -> tf.Tensor:
        found = tf.TensorArray(tf.int32, len(table), infer_shape=False, element_shape=[None])
        for turn in tf.range(len(table)):
            both = strategy.experimental_local_results(strategy.run(in_replica, args=(table[turn],)))
            found = found.write(turn, tf.concat(both, 0))
        return found.concat()

    def expected(first: int, second: int) -> list[int]:
        return 2 * [*range(first), *range(100, 100 + second)]

    table = [(4, 4), (2, 2), (2, 5), (0, 3), (0, 0), (4, 4), (1, 0)]
    want = [row for a, b in table for row in 2 * (2 * expected(a, b) + expected(b, a) + expected(a, b))]
    for _ in range(2):
        assert loop(tf.constant(table)).numpy().tolist() == want
    strategy.close()


def values_of_two_devices() -> None:
    devices = ["CPU:0", "CPU:1"]
    for order in (devices, devices[::-1]):
        rows_are_joined(order)
    strategy = tfps.Strategy(devices=devices)
    expected, actual = reduced(tf.distribute.MirroredStrategy(devices)), reduced(strategy)
    assert actual == expected, (actual, expected)
    assert gradients_that_all_replicas_share(strategy) == [-2.0, -4.0]
    strategy.close()


def main(*pservers: str) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    if not pservers:
        values_of_two_devices()
    programs: dict[str, Callable[[list[str], list[str]], list[np.ndarray]]] = {
        **{name: functools.partial(trained, name) for name in (OVER_GRPC if pservers else PROGRAMS)},
        "custom loop": custom_loop,
        **({} if pservers else {"epoch in a function": epoch_in_a_function}),
    }
    for name, run in programs.items():
        one, two = run(list(pservers), ["CPU:0"]), run(list(pservers), ["CPU:0", "CPU:1"])
        difference = max(np.abs(a - b).max() / np.abs(a).max() for a, b in zip(one, two, strict=True))
        assert difference < 1e-5, f"{name}: {difference}"
        print("devices agree:", name, difference, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
