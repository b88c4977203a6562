"""Worker: trains a model with moving statistics and metrics, and reads them, alone and together.

reading.py DEVICES FOLDER      compares the ranks through files in FOLDER
reading.py alone               rank 0 reads after a step, rank 1 goes on training
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
import training

import tfps
from tfps.exchange.interface import OnReply, Payload
from tfps.types import Logs, Structure, Value

BATCH, STEPS = 32, 6


@keras.saving.register_keras_serializable("tests")
class MovingMean(keras.layers.Layer):  # type: ignore[misc]
    """A moving mean of its inputs that nothing depends on in training, so that one process has the same."""

    def build(self, input_shape: Structure) -> None:
        self.mean = self.add_weight(shape=(input_shape[-1],), initializer="zeros", trainable=False, name="mean")

    def call(self, inputs: Structure, training: bool = False) -> Value:
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(inputs, 0))
            return inputs
        return inputs - self.mean


def data() -> tf.data.Dataset:
    images, labels = training.digits(BATCH * STEPS)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return dataset.with_options(options)


def compiled(normalized: bool) -> keras.Model:
    keras.utils.set_random_seed(1)
    # Names are given: numbers that Keras appends would tell how many models this rank has made, and the ranks differ.
    statistics = keras.layers.BatchNormalization(name="norm") if normalized else MovingMean(name="moving")
    layers = [keras.layers.Dense(16, activation="tanh", name="dense_a"), statistics, keras.layers.Dense(10, name="out")]
    model = keras.Sequential([keras.layers.Input((64,)), *layers], name="model")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3, name="top")]
    model.compile(keras.optimizers.Adam(name="adam"), loss, metrics=metrics)
    return model


def close(actual: Value, expected: Value, name: str) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-5, atol=1e-6, err_msg=name)


def like_one_process(strategy: tfps.Strategy) -> None:
    """History, statistics and evaluation are those of one process, after each of two fits."""
    expected = compiled(normalized=False)
    with strategy.scope():
        model = compiled(normalized=False)
    for _ in range(2):
        one = expected.fit(data(), epochs=2, validation_data=data(), verbose=0).history
        several = model.fit(data(), epochs=2, validation_data=data(), verbose=0).history
        assert one.keys() == several.keys()
        for name in one:
            close(several[name], one[name], name)
        for weight, mine, his in zip(model.weights, model.get_weights(), expected.get_weights(), strict=True):
            close(mine, his, weight.path)
        close(model.evaluate(data(), verbose=0), expected.evaluate(data(), verbose=0), "evaluate")


def statistics_are_averaged(strategy: tfps.Strategy) -> None:
    """BatchNormalization's value is the mean over the replicas that TensorFlow would have left apart."""
    if strategy.num_workers == 1 and strategy.num_replicas_in_sync > 1:
        apart = tf.distribute.MirroredStrategy([f"CPU:{each}" for each in range(strategy.num_replicas_in_sync)])
        with apart.scope():
            expected = compiled(normalized=True)
        expected.fit(data(), verbose=0)
        with strategy.scope():
            model = compiled(normalized=True)
        model.fit(data(), verbose=0)
        for mine, his in zip(model.weights, expected.weights, strict=True):
            components = [np.asarray(each) for each in apart.experimental_local_results(his.value)]
            assert ("moving" in his.path) == (len({each.tobytes() for each in components}) > 1)
            close(mine.numpy(), np.mean(components, 0), his.path)


def one_rank_saves(strategy: tfps.Strategy, folder: Path) -> None:
    """After fit and after evaluate rank 0 alone saves in every way; what it saves is what all ranks read."""
    with strategy.scope():
        model = compiled(normalized=True)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    save = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.save(folder / "epoch.keras"))
    history = model.fit(data(), epochs=2, verbose=0, callbacks=[save] if strategy.rank == 0 else []).history
    where = folder / str(strategy.rank)
    evaluated = None
    for moment in ("fit", "evaluate"):
        if strategy.rank == 0:
            model.save(folder / "model.keras")
            model.save_weights(folder / f"{moment}.weights.h5")
            path = checkpoint.write(str(folder / "checkpoint"))
            model.export(folder / "exported", verbose=False)
            saved = keras.models.load_model(folder / "model.keras")
            for mine, other in zip(model.get_weights(), saved.get_weights(), strict=True):
                np.testing.assert_array_equal(mine, other)
            x = training.digits(8)[0]
            exported = tf.saved_model.load(str(folder / "exported"))
            close(exported.serve(x), model(x), "exported")
            close(saved(x), model(x), "saved")
            plain = compiled(normalized=True)
            tf.train.Checkpoint(model=plain).read(path).expect_partial()
            for mine, other in zip(model.get_weights(), plain.get_weights(), strict=True):
                np.testing.assert_array_equal(mine, other)
        evaluated = model.evaluate(data(), verbose=0)
    for variable in [*model.weights, *model.optimizer.variables]:
        components = [np.asarray(each).tobytes() for each in strategy.experimental_local_results(variable.value)]
        assert len(set(components)) == 1, variable.path
    results = {f"weight/{index}": weight for index, weight in enumerate(model.get_weights())}
    results |= {f"history/{name}": np.asarray(each) for name, each in history.items()}
    np.savez(where.with_suffix(".npz"), evaluated=np.asarray(evaluated), **results)
    # Everybody restores what rank 0 has written, and goes on.
    strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None)
    checkpoint.read(str(folder / "checkpoint"))
    model.fit(data(), verbose=0)
    first = dict(np.load(folder / "0.npz")) if strategy.rank == 0 else {}
    if strategy.rank == 0:
        for rank in range(1, strategy.num_workers):
            other = folder / f"{rank}.npz"
            for name, value in np.load(other).items():
                assert value.tobytes() == first[name].tobytes(), name


def counts_what_travels(strategy: tfps.Strategy) -> None:
    """Steps send nothing of statistics and metrics; an epoch has one exchange that combines them, and one of logs."""
    pushed: list[str] = []
    runtime = strategy._runtime
    push = runtime.exchange.push

    def counted(bucket: int, payload: Payload | None, on_reply: OnReply, step_scalars: bytes = b"") -> None:
        pushed.append(runtime.declared.spec(bucket).name)
        push(bucket, payload, on_reply, step_scalars)

    with strategy.scope():
        model = compiled(normalized=True)
    model.fit(data(), verbose=0)
    setattr(runtime.exchange, "push", counted)  # noqa: B010
    model.fit(data(), epochs=2, verbose=0)
    for _ in range(3):
        model.get_weights()
        model.get_metrics_result()
    setattr(runtime.exchange, "push", push)  # noqa: B010
    trained = {name for name in pushed if "dense" in name and not name.startswith("values of")}
    assert trained
    others = [name for name in pushed if name not in trained and name != "batches"]
    assert [name.split(" ")[0] for name in others] == ["values", "gather", "states"] * 2, others


def alone() -> None:
    strategy = tfps.Strategy(config=tfps.Config(step_timeout_s=15))  # ranks trace their steps less than that apart
    with strategy.scope():
        model = compiled(normalized=True)
    model.fit(data(), verbose=0)

    class Read(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
            if strategy.rank == 0 and batch == 2:
                self.model.get_weights()

    started = time.monotonic()
    try:
        model.fit(data(), verbose=0, callbacks=[Read()])
    except Exception as error:
        print("raised", type(error).__name__, error, f"within {time.monotonic() - started:.0f} s", flush=True)
        raise


def main(devices: str, folder: str = "") -> None:
    if devices == "alone":
        alone()
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * int(devices))
    config = tfps.Config(step_timeout_s=60, slice_bytes=4096, window_bytes=8192)
    strategy = tfps.Strategy(devices=[f"CPU:{each}" for each in range(int(devices))], config=config)
    like_one_process(strategy)
    statistics_are_averaged(strategy)
    one_rank_saves(strategy, Path(folder))
    if strategy.num_workers > 1:
        counts_what_travels(strategy)
    strategy.close()
    print("all passed")


if __name__ == "__main__":
    main(*sys.argv[1:])
