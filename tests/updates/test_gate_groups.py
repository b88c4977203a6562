"""Which variables share a gate, and that reads still wait for the right updates."""

from __future__ import annotations

from collections.abc import Sequence

import companion
import keras
import numpy as np
import pytest
import tensorflow as tf
import training

import tfps
from tfps.updates.pending import group_gates
from tfps.updates.variables import GatedVariable

CONFIG = tfps.Config(slice_bytes=4096, window_bytes=8192, step_timeout_s=60)
LIMIT = 1000


def made(
    strategy: tfps.Strategy, *items: int, name: str = "kernel", dtype: tf.DType = tf.float32
) -> list[GatedVariable]:
    with strategy.scope():
        return [tf.Variable(tf.zeros([each], dtype), name=name) for each in items]


def gates(variables: Sequence[GatedVariable]) -> list[int]:
    """For each variable the position of the first that waits at the same gate."""
    ids = [id(variable.gates[0]) for variable in variables]
    return [ids.index(each) for each in ids]


def test_neighbors_share_a_gate_up_to_the_limit(strategy: tfps.Strategy) -> None:
    variables = made(strategy, 100, 100, 100, 20, 300, 20, 20)  # of 4 bytes each; 300 alone are too many
    group_gates(variables, LIMIT)
    assert gates(variables) == [0, 0, 2, 2, 4, 5, 5]


def test_dtypes_do_not_mix_and_embeddings_keep_their_own(strategy: tfps.Strategy) -> None:
    variables = [
        *made(strategy, 10, 10),
        *made(strategy, 10, name="embeddings"),
        *made(strategy, 10, 10),
        *made(strategy, 10, 10, dtype=tf.float64),
    ]
    group_gates(variables, LIMIT)
    assert gates(variables) == [0, 0, 2, 3, 3, 5, 5]


def test_codecs_do_not_mix(strategy: tfps.Strategy) -> None:
    """They are in different buckets, and one that waits for the other's gate would wait for its exchange."""
    variables = [*made(strategy, 10, 10), *made(strategy, 10, name="bias"), *made(strategy, 10)]
    group_gates(variables, LIMIT, lambda variable: "none" if "bias" in variable.name else "int8")
    assert gates(variables) == [0, 0, 2, 3]


def test_a_second_optimizer_changes_no_group(strategy: tfps.Strategy) -> None:
    variables = made(strategy, 10, 10, 10)
    group_gates(variables[:2], LIMIT)
    group_gates(variables[::-1], LIMIT)
    assert gates(variables) == [0, 0, 2]


def test_a_gate_that_a_graph_waits_at_is_not_replaced_and_buckets_are_as_elsewhere(
    strategy: tfps.Strategy,
) -> None:
    variables = made(strategy, 10, 10)

    @tf.function
    def read() -> tf.Tensor:
        return strategy.run(lambda: variables[1] + 1.0)

    read()
    group_gates(variables, LIMIT)
    assert gates(variables) == [0, 1]
    assert variables[0].group == variables[1].group != 0


def test_slots_wait_where_their_variable_does(strategy: tfps.Strategy) -> None:
    variables = made(strategy, 10, 10)
    with strategy.scope(), strategy.extended.colocate_vars_with(variables[1]):
        slot = tf.Variable(tf.zeros([10]), trainable=False)
    group_gates(variables, LIMIT)
    assert slot.gates == variables[0].gates


def test_reading_one_of_a_group_waits_for_the_update_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer knows both layers, the step trains one of them; the other's reads wait, and get its value."""
    with companion.strategy_with_companion(monkeypatch, CONFIG) as (strategy, other):
        with strategy.scope():
            layers = [keras.layers.Dense(4, use_bias=False) for _ in range(2)]
            model = keras.Sequential([keras.layers.Input((4,)), *layers])
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build(model.trainable_variables)
        first, second = (layer.kernel for layer in layers)
        assert first.value.gates == second.value.gates
        before = first.numpy(), second.numpy()

        @tf.function
        def step(x: tf.Tensor) -> None:
            def train(x: tf.Tensor) -> None:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(model(x) ** 2)
                optimizer.apply_gradients([(tape.gradient(loss, second.value), second)])

            strategy.run(train, [x])

        with other._lock:
            other.holds = lambda spec: "kernel" in spec.name
        step(tf.ones([2, 4]))
        assert other.wait_held()
        assert all(gate.closed for gate in first.value.gates)
        other.release()
        assert (first.numpy() == before[0]).all()
        assert (second.numpy() != before[1]).any()


@pytest.mark.parametrize("before", [pytest.param("nothing", marks=pytest.mark.long), "predicted"])
def test_training_ends_bitwise_as_in_plain_keras(before: str, strategy: tfps.Strategy) -> None:
    def trained(where: tfps.Strategy | None) -> list[bytes]:
        keras.utils.set_random_seed(1)
        with where.scope() if where else tf.init_scope():
            layers = [keras.layers.Dense(8, activation="tanh") for _ in range(6)]
            model = keras.Sequential([keras.layers.Input((64,)), *layers, keras.layers.Dense(10)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.01), loss, jit_compile=False)
        x, y = training.digits(96)
        if before == "predicted":  # a graph waits at the gates before they could be shared
            model.predict(x, verbose=0)
        model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
        if where:
            assert (len(set(gates([each.value for each in model.trainable_variables]))) == 1) == (before == "nothing")
        return [np.asarray(weight).tobytes() for weight in model.get_weights()]

    assert trained(strategy) == trained(None)
