"""States of layers that a step assigns: means over rows are averaged over replicas, what is none is refused by name.

What the step depends on is averaged within it.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import contextlib
from collections.abc import Callable, Iterator

import companion
import keras
import pytest
import tensorflow as tf

import tfps
from tfps.errors import UnsupportedError
from tfps.graph.ops import called
from tfps.types import Argument, Value, Variable

Assigned = Callable[[Variable, Value], Value]  # of a state [3] and rows [rows, 3]
ROWS = tf.reshape(tf.range(12.0), [4, 3])


@pytest.fixture(scope="module")
def strategy() -> Iterator[tfps.Strategy]:
    """Rank 0 of two."""
    with pytest.MonkeyPatch.context() as patch, companion.strategy_with_companion(patch, tfps.Config()) as (made, _):
        yield made


def step(strategy: tfps.Strategy, assigned: Assigned, method: str = "assign", **options: Argument) -> None:
    with strategy.scope():
        state = keras.layers.Layer().add_weight(
            shape=(3,), initializer="zeros", trainable=False, name="state", **options
        )

    @tf.function
    def run(x: Value) -> None:
        strategy.run(lambda rows: getattr(state.value, method)(assigned(state, rows)), (x,))

    run.get_concrete_function(tf.TensorSpec([None, 3]))


@tf.function
def moving(state: Value, x: Value) -> Value:
    return 0.9 * state + 0.1 * tf.reduce_mean(x, 0)


MEANS: dict[str, Assigned] = {
    "a moving mean": lambda state, x: 0.9 * state.value + 0.1 * tf.reduce_mean(x, 0),
    "in a function": lambda state, x: moving(state.value, x),
    "in a branch": lambda state, x: tf.cond(state.value[0] > 3.0, lambda: state.value, lambda: tf.reduce_mean(x, 0)),
    "by its difference": lambda state, x: state.value - 0.1 * (state.value - tf.reduce_mean(x, 0)),
    "a variance": lambda state, x: 0.9 * state.value + 0.1 * tf.nn.moments(x, [0])[1],
    "fused": lambda state, x: tf.compat.v1.nn.fused_batch_norm(x[:, None, None], tf.ones(3), tf.zeros(3))[1],
    "a sum by the number of rows": lambda state, x: tf.reduce_sum(x, 0) / tf.cast(tf.shape(x)[0], tf.float32),
    "a loss": lambda state, x: state.value + tf.reduce_mean(tf.square(x)),
    "only sometimes": lambda state, x: tf.where(state.value[0] > 3.0, tf.reduce_mean(x, 0), state.value),
    "nothing of rows": lambda state, x: tf.math.l2_normalize(state.value + 1.0),
}
OTHERS: dict[str, tuple[Assigned, str]] = {
    "a maximum": (lambda state, x: tf.maximum(state.value, tf.reduce_max(x, 0)), "is not linear in means over rows"),
    "a queue": (lambda state, x: tf.concat([x, state.value[None]], 0)[0], "has values of single rows|is not known"),
    "a moving sum": (lambda state, x: 0.9 * state.value + tf.reduce_sum(x, 0), "is a sum over rows"),
    "a weighted mean": (lambda state, x: tf.reduce_sum(x * x[:, :1], 0) / tf.reduce_sum(x[:, 0]), "sums over rows"),
    "a norm": (lambda state, x: tf.sqrt(tf.reduce_mean(x**2, 0)), "is not linear in means over rows"),
    "rows so far": (lambda state, x: state.value + tf.cast(tf.shape(x)[0], tf.float32), "from the number of rows"),
}


@pytest.mark.parametrize("assigned", MEANS.values(), ids=MEANS)
def test_means_over_rows_are_taken(strategy: tfps.Strategy, assigned: Assigned) -> None:
    step(strategy, assigned)


@pytest.mark.parametrize(("assigned", "why"), OTHERS.values(), ids=OTHERS)
def test_what_is_no_mean_over_rows_is_refused_by_name(strategy: tfps.Strategy, assigned: Assigned, why: str) -> None:
    with pytest.raises(UnsupportedError, match=f"state.* is averaged over replicas.*({why}).*test_layer_states.py"):
        step(strategy, assigned)


def test_so_is_what_is_added_to_it(strategy: tfps.Strategy) -> None:
    step(strategy, lambda _, x: tf.reduce_mean(x, 0), "assign_add")
    with pytest.raises(UnsupportedError, match=r"is a sum over rows .*all_reduce"):
        step(strategy, lambda _, x: tf.reduce_sum(x, 0), "assign_add")


def test_a_mean_over_replicas_is_taken_where_the_program_asks_for_it(strategy: tfps.Strategy) -> None:
    step(strategy, lambda _, x: tf.reduce_max(x, 0), aggregation="mean")


def test_one_process_alone_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TFPS_RANK", "TFPS_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    with contextlib.closing(tfps.Strategy()) as alone:
        step(alone, lambda state, x: tf.maximum(state.value, tf.reduce_max(x, 0)))


def count(strategy: tfps.Strategy, counted: Callable[[Variable, Value], None], dtype: str = "int32") -> None:
    with strategy.scope():
        counter = keras.layers.Layer().add_weight(
            shape=(), initializer="zeros", trainable=False, name="seen", dtype=dtype
        )

    @tf.function
    def run(x: Value) -> None:
        strategy.run(lambda rows: counted(counter.value, rows), (x,))

    run.get_concrete_function(tf.TensorSpec([None, 3]))


COUNTERS: dict[str, Callable[[Variable, Value], None]] = {
    "steps": lambda seen, _: seen.assign_add(1),
    "a pointer": lambda seen, _: seen.assign((seen + 8) % 32),
    "columns": lambda seen, x: seen.assign_add(tf.shape(x)[1]),
    "all rows": lambda seen, x: seen.assign_add(
        tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.shape(x)[0])
    ),
}


@pytest.mark.parametrize("counted", COUNTERS.values(), ids=COUNTERS)
def test_counters_that_are_alike_on_all_replicas_are_taken(
    strategy: tfps.Strategy, counted: Callable[[Variable, Value], None]
) -> None:
    count(strategy, counted)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_that_come_from_a_replicas_rows_are_refused_by_name(strategy: tfps.Strategy, dtype: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"seen.*{dtype}.* number of rows \(at test_layer_states.*all_reduce"):
        count(strategy, lambda seen, x: seen.assign_add(tf.shape(x, dtype)[0]), dtype)
    with pytest.raises(UnsupportedError, match=r"seen.*all_gather"):
        count(strategy, lambda seen, x: seen.assign(tf.cast(tf.reduce_max(x), dtype)), dtype)


def exchanged(strategy: tfps.Strategy, used: Callable[[Variable, Value], Value]) -> int:
    """How many exchanges there are in a step that computes a loss with `used`, but for the sum of the rows."""
    with strategy.scope():
        state = keras.layers.Layer().add_weight(shape=(3,), initializer="zeros", trainable=False, name="state")
        kernel = keras.layers.Layer().add_weight(shape=(3,), initializer="ones", name="kernel")

    def forward(x: Value) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(used(state, x) * kernel.value)
        tape.gradient(loss, kernel.value)

    @tf.function
    def run(x: Value) -> None:
        strategy.run(forward, (x,))

    return exchanges(run.get_concrete_function(tf.TensorSpec([None, 3])).graph)


def exchanges(graph: tf.Graph) -> int:
    found = [op for op in graph.get_operations() if called(op) == "tfps_pull"]
    assert found  # whoever has not taken the batch from an iterator asks how many rows all have
    return len(found) - 1


def assigned(state: Variable, x: Value) -> None:
    state.assign(0.9 * state + 0.1 * tf.reduce_mean(x, 0))


def read_before(state: Variable, x: Value) -> Value:
    read = tf.convert_to_tensor(state.value)
    assigned(state, x)
    return x - read


def read_after(state: Variable, x: Value) -> Value:
    assigned(state, x)
    return x - state


def read_in_a_branch(state: Variable, x: Value) -> Value:
    assigned(state, x)
    return tf.cond(tf.shape(x)[1] > 2, lambda: x - state, lambda: x)


def not_read(state: Variable, x: Value) -> Value:
    assigned(state, x)
    return x


def not_of_rows(state: Variable, x: Value) -> Value:
    state.assign(0.9 * state + 0.1)
    return x - state


@pytest.mark.parametrize(
    ("used", "times"), [(read_before, 1), (read_after, 1), (read_in_a_branch, 1), (not_read, 0), (not_of_rows, 0)]
)
def test_a_state_is_averaged_in_the_step_if_that_reads_it(
    strategy: tfps.Strategy, used: Callable[[Variable, Value], Value], times: int
) -> None:
    assert exchanged(strategy, used) == times


def test_so_are_no_statistics_of_batch_normalization(strategy: tfps.Strategy) -> None:
    with strategy.scope():
        layer = keras.layers.BatchNormalization()
        layer.build((None, 3))

    @tf.function
    def run(x: Value) -> None:
        def forward(x: Value) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(layer(x, training=True))
            tape.gradient(loss, layer.gamma.value)

        strategy.run(forward, (x,))

    assert exchanges(run.get_concrete_function(tf.TensorSpec([None, 3])).graph) == 0
