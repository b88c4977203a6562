"""States of layers that a step assigns: means over rows are averaged over replicas, what is none is refused by name."""

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
