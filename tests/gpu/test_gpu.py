"""tfps on one GPU, or on two if there are two: `python -m pytest -s -m gpu tests/gpu` on a machine with one.

Each test names what it would show to be wrong. Never run so far (docs/gpus.md).
"""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfps
from tfps.graph.ops import HOST, for_devices, tensor_of
from tfps.types import Argument, Array, Value
from tfps.wire.shared_memory import aligned_empty

GPUS = tf.config.list_logical_devices("GPU")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs a GPU")]


@pytest.fixture
def strategy() -> Iterator[tfps.Strategy]:
    made = tfps.Strategy(devices=["GPU:0"])
    yield made
    made.close()


def conv_net() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Conv2D(64, 3, padding="same") for _ in range(6)]
    inputs = x = keras.Input((64, 64, 3))
    for layer in layers:
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(layer(x)))
    x = keras.layers.Dropout(0.1)(keras.layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, keras.layers.Dense(10, dtype="float32")(x))


def mlp(width: int = 1024, layers: int = 8) -> keras.Model:
    keras.utils.set_random_seed(1)
    body = [keras.layers.Dense(width, "relu") for _ in range(layers)]
    return keras.Sequential([keras.Input((width,)), *body, keras.layers.Dense(10)])


def batches(shape: tuple[int, ...], rows: int = 64, count: int = 10, kind: str = "int32") -> tf.data.Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows * count, *shape)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, rng.integers(0, 10, rows * count).astype(kind))).batch(rows)


def trained(
    build: Callable[[], keras.Model],
    strategy: tfps.Strategy | None,
    data: tf.data.Dataset,
    optimizer: Argument = "adam",
    epochs: int = 2,
    **options: Argument,
) -> keras.Model:
    scope = strategy.scope() if strategy else tf.device("GPU:0")
    with scope:
        model = build()
        model.compile(
            keras.optimizers.get(optimizer),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            **{"jit_compile": False, **options},
        )
    model.fit(data, epochs=epochs, verbose=0)
    return model


def test_everything_is_where_it_should_be(strategy: tfps.Strategy) -> None:
    """Variables and slots on the GPU; gates, queues and what updates keep on the host."""
    model = trained(mlp, strategy, batches((1024,)), epochs=1)
    for variable in [*model.trainable_variables, *model.optimizer.variables]:
        if variable.dtype == "float32" and len(variable.shape):
            assert "GPU" in variable.value.values[0].device, variable.path
    for gate in strategy._runtime.gate_watch.gates():
        assert "CPU" in gate.handle.device
    assert "CPU" in strategy._runtime.queue.device


@pytest.mark.parametrize("kind", ["int32", "int64"])  # int32 labels in an area (MapStage) on the GPU
def test_staged_batches_arrive_unchanged(strategy: tfps.Strategy, kind: str) -> None:
    data = batches((4,), rows=8, count=6, kind=kind)
    expected = [(x.numpy(), y.numpy()) for x, y in data]
    seen = []
    for x, y in strategy.experimental_distribute_dataset(data):
        seen.append(
            (strategy.experimental_local_results(x)[0].numpy(), strategy.experimental_local_results(y)[0].numpy())
        )
    assert len(seen) == 6
    assert all((a == c).all() and (b == d).all() for (a, b), (c, d) in zip(seen, expected, strict=True))


def test_half_precision_embeddings_accumulation_and_loss_scaling(strategy: tfps.Strategy) -> None:
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        trained(lambda: conv_net(), strategy, batches((64, 64, 3)), keras.optimizers.Adam(1e-3))
    finally:
        keras.mixed_precision.set_global_policy("float32")
    trained(mlp, strategy, batches((1024,)), keras.optimizers.Adam(1e-3, gradient_accumulation_steps=2))

    def embeds() -> keras.Model:
        inputs = keras.Input((8,), dtype="int32")
        x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(1000, 32)(inputs))
        return keras.Model(inputs, keras.layers.Dense(10)(x))

    ids = np.random.default_rng(0).integers(0, 1000, (256, 8)).astype("int32")
    data = tf.data.Dataset.from_tensor_slices((ids, ids[:, 0] % 10)).batch(32)
    trained(embeds, strategy, data)


def test_sends_leave_during_backward_and_the_device_is_not_drained(strategy: tfps.Strategy) -> None:
    """Arrivals of gradients are spread over backward; and what tfps adds to a step of plain Keras."""
    arrivals: list[float] = []
    original = strategy._runtime.push

    def push(*arguments: Argument, **named: Argument) -> Value:
        arrivals.append(time.perf_counter())
        return original(*arguments, **named)

    strategy._runtime.push = push  # type: ignore[method-assign]
    width, rows, layers = 4096, 4096, 12
    data = batches((width,), rows, 2).repeat()

    def timed(strategy: tfps.Strategy | None) -> tuple[Array, list[float]]:
        class Clock(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: object = None) -> None:
                ends.append(time.perf_counter())

        ends: list[float] = []
        with strategy.scope() if strategy else tf.device("GPU:0"):
            model = mlp(width, layers)
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        model.fit(data, steps_per_epoch=40, verbose=0, callbacks=[Clock()])
        _ = model.get_weights()
        return np.diff(ends)[10:], ends

    plain, _ = timed(None)
    own, ends = timed(strategy)
    spreads: list[float] = []
    for low, high in itertools.pairwise(ends[10:]):
        inside = [at for at in arrivals if low < at <= high]
        spreads += [max(inside) - min(inside)] if len(inside) > 2 else []
    step, spread = statistics.median(own), statistics.median(spreads)
    print(
        f"plain {statistics.median(plain) * 1e3:.1f} ms, tfps {step * 1e3:.1f} ms, gradients over {spread * 1e3:.1f} ms"
    )
    print(strategy.report())
    assert spread > 0.3 * step, "gradients arrive together: copies wait for the whole backward pass"
    # 4 GB/s of gradients each way must not double the step of a GPU with PCIe 3
    assert step < 2.0 * statistics.median(plain)


def test_the_link_to_the_host_is_used_at_full_speed(strategy: tfps.Strategy) -> None:
    """Gradients come through pinned memory, and parameters go through it: they are copied there first."""
    with tf.device("GPU:0"):
        value = tf.random.normal([64 << 20])
    _ = value.numpy()
    host, times = tensor_of(aligned_empty(256 << 20)), dict[str, float]()

    @tf.function(autograph=False)
    def copied(data: tf.Tensor) -> tf.Tensor:
        data = for_devices(data, ["GPU:0"])
        with tf.device("GPU:0"):
            return data[-1:] + data[:1]

    copies: dict[str, Callable[[], object]] = {"device to host": value.cpu, "host to device, pageable": host.gpu}
    copies["host to device"] = lambda: copied(host).numpy()
    for name, copy in copies.items():
        copy()
        began = time.perf_counter()
        for _ in range(4):
            copy()
        times[name] = 4 * 0.268 / (time.perf_counter() - began)
    print({name: f"{rate:.1f} GB/s" for name, rate in times.items()})


def test_a_hundred_closed_gates_hold_no_thread_and_reads_wait(strategy: tfps.Strategy) -> None:
    model = trained(mlp, strategy, batches((1024,)), epochs=1)
    gate = model.trainable_variables[0].value.gates[0]
    with tf.device(HOST):
        gate._queue.dequeue()
    done = threading.Event()

    def predict() -> None:
        model.predict(np.zeros((8, 1024), "float32"), verbose=0)
        done.set()

    thread = threading.Thread(target=predict)
    thread.start()
    assert not done.wait(2)
    gate.open()
    assert done.wait(60)
    thread.join()


def test_auto_is_no_xla_and_true_compiles_in_parts(strategy: tfps.Strategy) -> None:
    """Keras: "auto" is XLA on a GPU, but never under a strategy."""
    with strategy.scope():
        model = mlp()
        model.compile("sgd", "mse")
    assert model.jit_compile is False
    plain = mlp()
    plain.compile("sgd", "mse")
    assert plain.jit_compile is True
    data = batches((1024,))
    own = trained(mlp, strategy, data, jit_compile=True)
    assert strategy.extended.compiled.made[0].parts
    expected = trained(mlp, None, data, jit_compile=True)
    for a, b in zip(expected.get_weights(), own.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
def test_two_gpus_sum_by_nccl_and_stay_equal() -> None:
    two = tfps.Strategy(devices=["GPU:0", "GPU:1"])
    model = trained(conv_net, two, batches((64, 64, 3)), epochs=2)
    for variable in model.trainable_variables:
        first, second = (each.numpy() for each in variable.value.values)
        assert (first == second).all(), variable.path
    two.close()


@pytest.mark.parametrize("build, shape", [(mlp, (1024,)), (conv_net, (64, 64, 3))])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_one_worker_ends_with_the_weights_of_plain_keras(
    strategy: tfps.Strategy, build: Callable[[], keras.Model], shape: tuple[int, ...], optimizer: str
) -> None:
    """Bitwise on CPUs. On GPUs only with deterministic ops: last in the file, as nothing turns that off again."""
    tf.config.experimental.enable_op_determinism()
    data = batches(shape)
    plain, own = trained(build, None, data, optimizer), trained(build, strategy, data, optimizer)
    for a, b in zip(plain.get_weights(), own.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    print("bitwise:", all((a == b).all() for a, b in zip(plain.get_weights(), own.get_weights(), strict=True)))
