"""What overlaps: sends with backward, replies with the next forward pass. Asserted on order, not on clocks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import companion
import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf
from recorded import note_in_flight, sends

import tfps
from tfps.types import Array, Structure, Value, Variable
from tfps.worker.worker import Worker

LAYERS = 5
UNITS = 32
CONFIG = tfps.Config(slice_bytes=4 * UNITS * UNITS, window_bytes=16 * UNITS * UNITS, step_timeout_s=60)


class Watched(keras.layers.Dense):
    """A dense layer that tells `on_forward` its number in each forward pass; `on_backward` may hold backward up."""

    def __init__(
        self, number: int, on_forward: Callable[[int], object], on_backward: Callable[[], object] | None = None
    ) -> None:
        super().__init__(UNITS, use_bias=False)
        self.number, self.on_forward, self.on_backward = number, on_forward, on_backward

    def call(self, inputs: Structure, training: bool | None = None) -> Value:
        @tf.custom_gradient
        def watched(x: Value) -> Value:
            def forward(value: Value) -> Value:
                self.on_forward(self.number)
                return value

            def backward(value: Value) -> Value:
                if self.on_backward is not None:
                    self.on_backward()
                return value

            def gradient(upstream: Value) -> Value:
                result = tf.numpy_function(backward, [upstream], upstream.dtype)
                result.set_shape(upstream.shape)
                return result

            result = tf.numpy_function(forward, [x], x.dtype)
            result.set_shape(x.shape)
            return result, gradient

        return watched(super().call(inputs))


def build(
    strategy: tfps.Strategy, on_last_gradient: Callable[[], object] | None = None, passes: list[int] | None = None
) -> keras.Model:
    on_forward = ([] if passes is None else passes).append  # Keras would copy a list
    with strategy.scope():
        layers = [Watched(n, on_forward, on_last_gradient if n == 0 else None) for n in range(LAYERS)]
        model = keras.Sequential([keras.layers.Input((UNITS,)), *layers])
        model.compile("sgd", "mse", jit_compile=False)
    return model


def fit(model: keras.Model, steps: int) -> None:
    data = np.random.default_rng(0).random((8 * steps, UNITS), np.float32)
    model.fit(data, data, batch_size=8, verbose=0, shuffle=False)  # two workers share the batch


def test_the_first_send_is_seen_before_the_last_gradient_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    with companion.strategy_with_companion(monkeypatch, CONFIG) as (strategy, _):
        sent_before: list[bool] = []

        def on_last_gradient() -> None:  # layer 0 is the last that backward reaches
            if recorder.enabled:
                sent_before.append(companion.wait_until(lambda: sends(recorder)))

        recorder = strategy._runtime.recorder

        model = build(strategy, on_last_gradient)
        fit(model, 1)
        recorder.start()
        fit(model, 1)
        assert sent_before == [True]


def test_the_next_forward_pass_runs_before_the_last_reply_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with companion.strategy_with_companion(monkeypatch, CONFIG) as (strategy, other):
        passes: list[int] = []
        model = build(strategy, passes=passes)
        fit(model, 1)
        model.get_weights()  # its updates are done: none is held
        ahead, behind, released, ended = companion.passes_while_held(other, lambda: fit(model, 2), passes, LAYERS - 1)
        assert ahead
        assert (behind, released) == (1, 1), "layer 4 itself must wait for its own reply"
        assert ended


def test_nothing_stale_is_read_while_a_reply_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with companion.strategy_with_companion(monkeypatch, CONFIG) as (strategy, other):
        model = build(strategy)
        fit(model, 1)
        before = [weight.copy() for weight in model.get_weights()]
        variable = model.trainable_variables[-1].value
        last = max(other.specs, key=lambda spec: spec.priority)
        other.holds = lambda spec: spec is last
        fit(model, 1)
        assert other.wait_held()
        read: list[Value] = []
        ways = [
            lambda: read.extend(model.get_weights()),
            lambda: strategy.experimental_local_results(variable),
            lambda: repr(variable),
        ]
        readers = [threading.Thread(target=way, daemon=True) for way in ways]
        for reader in readers:
            reader.start()
        assert [reader.is_alive() for reader in readers] == [True] * 3
        assert other.release() == 1
        for reader in readers:
            reader.join(jobs.DEADLINE_S)
        assert len(read) == LAYERS
        assert all((new != old).any() for new, old in zip(read, before, strict=True))


def test_a_strategy_that_one_rank_has_forgotten_stays_in_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with companion.strategy_with_companion(monkeypatch, CONFIG) as (strategy, other):
        model = build(strategy)
        fit(model, 1)
        model.get_weights()  # its updates are done: none is held
        last = max(other.specs, key=lambda spec: spec.priority)
        other.holds = lambda spec: spec is last
        fit(model, 1)
        assert other.wait_held()
        # The garbage collector may choose the thread that has to bring the reply.
        collecting = threading.Thread(target=strategy._forget, daemon=True)
        collecting.start()
        collecting.join(jobs.DEADLINE_S)
        assert not collecting.is_alive()
        assert other.release() == 1
        model.get_weights()
        assert other._worker.failure is None
        again = tfps.Strategy(strategy.pservers, config=strategy.config)
        assert again._runtime is strategy._runtime
        again._runtime.close()
        again.close()


def test_priorities_follow_the_first_use_in_forward_and_not_creation(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reversed(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.used_last = keras.layers.Dense(4, use_bias=False)
            self.used_first = keras.layers.Dense(UNITS, use_bias=False)

        def build(self, shape: object) -> None:
            self.used_last.build(shape)
            self.used_first.build(shape)

        def call(self, inputs: Structure) -> Value:
            return self.used_last(self.used_first(inputs))

    with companion.strategy_with_companion(monkeypatch, CONFIG) as (strategy, other):
        with strategy.scope():
            model = Reversed()
            model.compile("sgd", "mse")
        data = np.zeros((8, UNITS), np.float32)
        model.fit(data, data[:, :4], batch_size=8, verbose=0)
        priorities = {spec.nbytes: spec.priority for spec in other.specs if "kernel" in spec.name}
        assert priorities == {4 * UNITS * UNITS: 0, 4 * UNITS * 4: 1}


def test_small_neighbours_share_a_bucket_and_large_variables_are_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    with companion.strategy_with_companion(monkeypatch, CONFIG) as (strategy, other):
        with strategy.scope():
            layers = [keras.layers.Dense(units) for units in (UNITS * 4, 4, 4, 4)]
            model = keras.Sequential([keras.layers.Input((UNITS,)), *layers])
            model.compile("sgd", "mse")
        data = np.zeros((8, UNITS), np.float32)
        model.fit(data, data[:, :4], batch_size=8, verbose=0)
        updates = [spec for spec in other.specs if "kernel" in spec.name]
        assert [len(spec.names) for spec in updates] == [1, 7]  # the large kernel, all that follows
        model.get_weights()  # nothing of the first step leaves any more
        recorder = strategy._runtime.recorder
        recorder.start()
        model.fit(data, data[:, :4], batch_size=8, verbose=0)
        model.get_weights()
        large = other.specs.index(updates[0])
        assert len([sent for sent in sends(recorder) if sent.nbytes > 64 and sent.bucket == large]) == 4


@pytest.mark.parametrize(("transport", "buckets"), [("shared memory", 1), ("both", 5)])
def test_where_nothing_travels_all_small_gradients_share_a_bucket(
    monkeypatch: pytest.MonkeyPatch, transport: jobs.Transport, buckets: int
) -> None:
    jobs.use(transport, monkeypatch)
    with companion.strategy_with_companion(monkeypatch, tfps.Config()) as (strategy, _):
        with strategy.scope():  # ten of 160 KB: between hosts a bucket is at most as large as all before it
            layers = [keras.layers.Dense(200, use_bias=False) for _ in range(10)]
            model = keras.Sequential([keras.layers.Input((200,)), *layers])
            model.compile("sgd", "mse", jit_compile=False)
        model.fit(np.ones((8, 200), np.float32), np.ones((8, 200), np.float32), batch_size=8, verbose=0)
        assert strategy._runtime.update_buckets() == buckets


def test_bytes_in_flight_never_exceed_the_window_by_more_than_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tfps.Config(slice_bytes=512, window_bytes=1024, transport="grpc")
    with companion.strategy_with_companion(monkeypatch, config) as (strategy, _):
        model = build(strategy)
        fit(model, 1)
        runtime = strategy._runtime
        assert isinstance(runtime.exchange, Worker)
        queues = {(-1, pserver): queue for pserver, queue in enumerate(runtime.exchange._queues)}
        in_flight = note_in_flight(runtime.recorder, queues)
        runtime.recorder.start()
        fit(model, 3)
        model.get_weights()  # the last slices have left when their replies are back
        assert len(in_flight) >= 3 * LAYERS * 8
        assert max(in_flight) <= config.first_window_bytes + config.first_slice_bytes + 32  # and the slice's header


def test_the_first_layer_is_updated_while_the_update_of_the_last_one_runs() -> None:
    first_done = threading.Event()
    seen = []

    class Held(keras.optimizers.SGD):
        """Holds the update of the last layer, whose gradient comes first, until the first layer's has run."""

        def update_step(self, gradient: tf.Tensor, variable: Variable, learning_rate: tf.Tensor) -> None:
            def meet(value: Array) -> Array:
                if "last" in variable.name:
                    seen.append(first_done.wait(jobs.DEADLINE_S))
                else:
                    first_done.set()
                return value

            met = tf.numpy_function(meet, [gradient], gradient.dtype)
            met.set_shape(gradient.shape)
            super().update_step(met, variable, learning_rate)

    strategy = tfps.Strategy(config=CONFIG)
    with strategy.scope():
        layers = [keras.layers.Dense(UNITS, use_bias=False, name=name) for name in ("first", "last")]
        model = keras.Sequential([keras.layers.Input((UNITS,)), *layers])
        model.compile(Held(), "mse", jit_compile=False)
    fit(model, 1)
    model.get_weights()
    strategy.close()
    assert seen == [True]
