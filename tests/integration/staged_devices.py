"""Stages batches for two local devices (logical CPUs) and checks where they are, and what the last ones are."""

from __future__ import annotations

import gc
import threading

import keras
import tensorflow as tf

import tfps
from tfps.input.datasets import StagedDataset
from tfps.types import Batches, Structure, Value


def values(strategy: tfps.Strategy, batch: Structure) -> list[list[int]]:
    return [each.numpy().tolist() for each in strategy.experimental_local_results(batch)]


def main() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tfps.Strategy(devices=["CPU:0", "CPU:1"])
    plain = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    # 13 in batches of 4: two for each device, and at the end one for the first device alone.
    dataset = tf.data.Dataset.range(13).batch(4)
    distributed = strategy.experimental_distribute_dataset(dataset)
    assert isinstance(distributed, StagedDataset)
    expected = [values(plain, batch) for batch in plain.experimental_distribute_dataset(dataset)]
    assert [values(strategy, batch) for batch in distributed] == expected
    assert expected[-1] == [[12], []]
    for replica, value in enumerate(strategy.experimental_local_results(next(iter(distributed)))):
        assert value.device.endswith(f"CPU:{replica}"), value.device

    # Without partial batches the replicas' last ones are dropped where they are not enough.
    static = tf.data.Dataset.range(6).batch(2, drop_remainder=True)
    per_device = tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
    )
    by_function = strategy.distribute_datasets_from_function(lambda context: static)
    assert [values(strategy, batch) for batch in by_function] == [[[0, 1], [2, 3]]]
    each = strategy.distribute_datasets_from_function(lambda context: static, per_device)
    assert [values(strategy, batch) for batch in each] == [[[n, n + 1]] * 2 for n in (0, 2, 4)]

    # A batch of no examples is one also where TensorFlow knows the size of others: lengths differ, labels do not.
    padded = tf.data.Dataset.range(6).map(lambda n: (tf.range(n), n)).padded_batch(2, ([None], []), drop_remainder=True)

    def count(numbers: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return tf.stack([tf.shape(numbers)[0], tf.shape(labels)[0]])

    def counts(iterator: Batches) -> Value:
        return strategy.run(count, args=next(iterator))

    for step in (counts, tf.function(counts, autograph=False)):
        iterator = iter(strategy.distribute_datasets_from_function(lambda context: padded))
        assert [values(strategy, step(iterator)) for _ in range(2)] == [[[2, 2], [2, 2]], [[2, 2], [0, 0]]]

    # Strings cannot lie on every device: they pass through the host.
    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def following(iterator: Batches) -> Value:
        return strategy.run(lambda batch: batch["number"], args=(iterator.get_next(),))

    mixed = tf.data.Dataset.from_tensor_slices({"text": list("abcd"), "number": [1, 2, 3, 4]}).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(mixed))
    assert values(strategy, following(iterator)) == [[1, 2], [3, 4]]

    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = dataset.map(lambda x: (tf.cast(x[:, None], tf.float32) / 13, tf.cast(x[:, None], tf.float32)))
    history = model.fit(data, epochs=4, validation_data=data, verbose=0).history
    assert len(history["val_loss"]) == 4
    assert model.predict(data, verbose=0).shape == (13, 1)

    del iterator
    gc.collect()
    tick = threading.Event()
    for _ in range(3000):
        if not any(thread.name.startswith("tfps-stage") for thread in threading.enumerate()):
            break
        tick.wait(0.01)
    assert strategy.extended.staging.staged() == 0
    strategy.close()
    print("staged")


if __name__ == "__main__":
    main()
