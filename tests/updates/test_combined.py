"""When variables that every replica writes for itself are combined, and when nothing has to travel."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import companion
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfps
from tfps.exchange.interface import OnReply, Payload
from tfps.types import Value, Variable

ON_READ, SUM = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> Iterator[tfps.Strategy]:
    """Rank 0 of two; rank 1 adds nothing to any sum, so that a mean is half of what rank 0 has."""
    with companion.strategy_with_companion(monkeypatch, tfps.Config(step_timeout_s=30)) as (strategy, _):
        yield strategy


@pytest.fixture
def pushes(strategy: tfps.Strategy, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Buckets that rank 0 pushes."""
    pushed: list[int] = []
    push = strategy._runtime.exchange.push

    def counted(bucket: int, payload: Payload | None, on_reply: OnReply, step_scalars: bytes = b"") -> None:
        pushed.append(bucket)
        push(bucket, payload, on_reply, step_scalars)

    monkeypatch.setattr(strategy._runtime.exchange, "push", counted)
    return pushed


def made(strategy: tfps.Strategy) -> tuple[Variable, Variable]:
    with strategy.scope():
        moving = tf.Variable([8.0], trainable=False, name="moving")
        total = tf.Variable(0.0, synchronization=ON_READ, aggregation=SUM, name="total")
    strategy.run(lambda: None)  # the ranks agree on initial values
    return moving, total


def test_what_a_graph_writes_is_combined_at_the_first_read_after_it_ran(
    strategy: tfps.Strategy, pushes: list[int]
) -> None:
    moving, total = made(strategy)
    step = tf.function(lambda: strategy.run(lambda: (moving.assign([4.0]), total.assign_add(3.0))), autograph=False)
    pushes.clear()
    assert (total.numpy(), moving.numpy()) == (0.0, 8.0)
    for _ in range(3):
        step()
    assert pushes == []
    assert (total.numpy(), moving.numpy()) == (9.0, 2.0)
    assert total.numpy() == 9.0
    assert len(pushes) == 1
    step()
    assert (moving.numpy(), total.numpy()) == (2.0, 12.0)
    assert len(pushes) == 2


def _checkpointed(moving: Variable, folder: Path) -> Value:
    path = tf.train.Checkpoint(moving=moving).write(str(folder))
    return tf.train.load_checkpoint(path).get_tensor("moving/.ATTRIBUTES/VARIABLE_VALUE")


def _exported(moving: Variable, folder: Path) -> Value:
    module = tf.Module()
    module.moving = moving
    tf.saved_model.save(module, str(folder))
    return tf.saved_model.load(str(folder)).moving.numpy()


READS: dict[str, Callable[[Variable, Path], Value]] = {
    "numpy": lambda moving, folder: moving.numpy(),
    "array": lambda moving, folder: np.array(moving),
    "tensor": lambda moving, folder: tf.convert_to_tensor(moving).numpy(),
    "sum": lambda moving, folder: (moving + 0.0).numpy(),
    "value": lambda moving, folder: moving.value().numpy(),
    "read_value": lambda moving, folder: moving.read_value().numpy(),
    "handle": lambda moving, folder: tf.raw_ops.ReadVariableOp(resource=moving.handle, dtype=tf.float32).numpy(),
    "keras": lambda moving, folder: keras.ops.convert_to_numpy(moving),
    "checkpoint": _checkpointed,
    "export": _exported,
}


@pytest.mark.parametrize("in_scope", [True, False], ids=["in scope", "outside"])
def test_every_way_to_read_combines_first_also_outside_of_the_scope(
    strategy: tfps.Strategy, in_scope: bool, tmp_path: Path
) -> None:
    moving, _ = made(strategy)
    step = tf.function(lambda: strategy.run(lambda: moving.assign([4.0])), autograph=False)
    for name, read in READS.items():
        if in_scope and name == "handle":
            continue  # TensorFlow has none there
        step()
        with strategy.scope() if in_scope else contextlib.nullcontext():
            assert read(moving, tmp_path / name) == [2.0], name


def test_replicas_read_their_own_value(strategy: tfps.Strategy, pushes: list[int]) -> None:
    moving, _ = made(strategy)

    def in_replica() -> Value:
        moving.assign([4.0])
        return moving + 0.0, moving.value(), moving.read_value(), tf.convert_to_tensor(moving)

    pushes.clear()
    for run in (in_replica, tf.function(in_replica, autograph=False)):
        for value in strategy.run(run):
            assert value == [4.0]
    assert pushes == []


def test_a_branch_that_is_not_taken_writes_nothing(strategy: tfps.Strategy, pushes: list[int]) -> None:
    moving, _ = made(strategy)

    def in_replica(taken: tf.Tensor) -> None:
        tf.cond(taken, lambda: tf.identity(moving.assign([6.0])), lambda: tf.constant([0.0]))

    step = tf.function(lambda taken: strategy.run(in_replica, args=(taken,)), autograph=False)
    step(tf.constant(False))
    pushes.clear()
    assert moving.numpy() == 8.0
    assert pushes == []
    step(tf.constant(True))
    assert moving.numpy() == 3.0
    assert len(pushes) == 1


def test_a_step_that_ends_for_want_of_data_writes_nothing(strategy: tfps.Strategy, pushes: list[int]) -> None:
    _, total = made(strategy)
    data = iter(tf.data.Dataset.range(2).map(lambda each: tf.cast(each, tf.float32)))

    step = tf.function(lambda: strategy.run(lambda value: total.assign_add(value), args=(next(data),)), autograph=False)
    for _ in range(2):
        step()
    assert total.numpy() == 1.0
    pushes.clear()
    for _ in range(20):
        with pytest.raises((tf.errors.OutOfRangeError, StopIteration)):
            step()
    assert total.numpy() == 1.0
    assert pushes == []


def test_what_is_assigned_outside_a_step_is_the_value_and_needs_no_exchange(
    strategy: tfps.Strategy, pushes: list[int]
) -> None:
    moving, total = made(strategy)
    pushes.clear()
    total.assign(5.0)
    moving.assign([7.0])
    assert (total.numpy(), moving.numpy()) == (5.0, 7.0)
    assert pushes == []


def test_a_read_of_what_no_replica_has_written_combines_nothing(strategy: tfps.Strategy, pushes: list[int]) -> None:
    moving, total = made(strategy)
    pushes.clear()
    tf.function(lambda: strategy.run(lambda: moving.assign([4.0])), autograph=False)()
    total.assign(5.0)
    assert total.numpy() == 5.0
    assert pushes == []
    assert moving.numpy() == [2.0]
    assert len(pushes) == 1


def test_a_variable_that_an_update_writes_alike_everywhere_is_not_combined(
    strategy: tfps.Strategy, pushes: list[int]
) -> None:
    with strategy.scope():
        trained = tf.Variable([1.0])
        factor = tf.Variable([1.0], trainable=False)

    def update(variable: Variable, gradient: Value) -> None:
        factor.assign(factor * 2.0)
        variable.assign_sub(gradient * factor)

    def in_replica() -> None:
        strategy.extended.update(trained, update, args=(tf.ones([1]),))

    tf.function(lambda: strategy.run(in_replica), autograph=False)()
    pushes.clear()
    assert factor.numpy() == 2.0
    assert pushes == []


def test_graphs_that_are_gone_are_forgotten(strategy: tfps.Strategy) -> None:
    moving, total = made(strategy)
    for _ in range(3):
        step = tf.function(lambda: strategy.run(lambda: total.assign_add(1.0)), autograph=False)
        step()
        del step
        gc.collect()
    np.testing.assert_equal(total.numpy(), 3.0)  # also of graphs that were gone before the read
    strategy.combine()
    assert len(strategy.extended.combiner._graphs) == 0
    del moving


def test_what_was_written_is_combined_although_this_rank_has_dropped_it(
    strategy: tfps.Strategy, pushes: list[int]
) -> None:
    def written() -> Value:
        moving, total = made(strategy)
        both = lambda: (moving.assign([4.0]), total.assign_add(3.0))  # noqa: E731
        tf.function(lambda: strategy.run(both), autograph=False)()
        return total

    total = written()
    gc.collect()  # the graph and the other variable, which another rank may still hold
    pushes.clear()
    assert total.numpy() == 3.0
    assert len(pushes) == 1
    bucket = strategy._runtime.declared.spec(pushes[0])
    assert (bucket.name, bucket.nbytes) == ("values of moving and 1 more variables", 16)
