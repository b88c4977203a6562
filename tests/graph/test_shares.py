"""What a replica's part of a batch counts for; with real replicas: tests/integration/test_rows.py."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pytest
import tensorflow as tf

from tfps.graph.rows import UNKNOWN, rows_of
from tfps.graph.shares import LastBatch, NestedShare, Share, current_share, say_once, with_share
from tfps.types import Value

EVEN = np.float32(1 / 3)


def share(rows: int, total: int | None, others: int = 0) -> Share:
    """Of one of three replicas; `others`: rows that an exchange finds elsewhere."""
    count = tf.constant(rows, tf.int64)
    last = None if total is None else (tf.constant(total, tf.int64), count)
    return Share(count, 3, last, lambda own: own + tf.cast(others, own.dtype))


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        ((tf.zeros([5, 2]), tf.zeros([4])), 5),
        (({"b": np.zeros([3]), "a": tf.zeros([2])}, 7), 2),
        ((1.0, "text", tf.constant(3.0), None), None),
        (tf.ragged.constant([[1], [2, 3], []]), 3),
        (tf.sparse.from_dense([[1, 0], [0, 2]]), 2),
        (tf.zeros([0, 4]), 0),
    ],
)
def test_rows_are_those_of_the_first_value_that_has_any(value: Value, rows: int | None) -> None:
    found = rows_of(value)
    assert found is None if rows is None else int(found) == rows


def test_a_value_of_unknown_rank_has_rows_or_not_when_it_is_known() -> None:
    counted = tf.function(lambda value: rows_of(value), input_signature=[tf.TensorSpec(None, tf.float32)])
    assert int(counted(tf.zeros([6, 1]))) == 6
    assert int(counted(tf.constant(1.0))) == UNKNOWN


@pytest.mark.parametrize("rows", [1, 2, 7, 1000003])
def test_where_all_have_as_many_rows_the_weight_is_that_of_keras_to_the_bit(rows: int) -> None:
    known = share(rows, 3 * rows)
    assert known.weight(tf.constant(EVEN)).numpy().tobytes() == EVEN.tobytes()
    assert float(known.relative(tf.float32)) == 1.0


@pytest.mark.parametrize("replicas", [3, 7, 49])
@pytest.mark.parametrize("rows", [1, 3, 49, 1000003])
def test_where_rows_are_known_a_weight_is_of_rows_alone_and_exact_in_graphs_too(rows: int, replicas: int) -> None:
    @tf.function
    def weights(total: tf.Tensor) -> tuple[tf.Tensor, ...]:
        own = tf.constant(rows, tf.int64)
        known = Share(own, replicas, (total, own), lambda own: own, "training")
        return known.weight(tf.constant(np.nan, tf.float64)), known.relative(tf.float64), known.of_whole_sum(tf.float64)

    weight, relative, whole = weights(tf.constant(rows * replicas, tf.int64))
    assert (float(weight), float(relative), float(whole)) == (1 / replicas, 1.0, replicas)


@pytest.mark.parametrize(("rows", "total"), [(2, 5), (0, 4), (4, 4)])
def test_otherwise_it_is_the_part_of_the_batch(rows: int, total: int) -> None:
    known = share(rows, total)
    np.testing.assert_allclose(known.weight(tf.constant(EVEN)), rows / total)
    np.testing.assert_allclose(known.relative(tf.float64), 3 * rows / total)


def test_what_is_not_of_the_batch_taken_last_counts_alike() -> None:
    noise = Share(tf.constant(8, tf.int64), 3, (tf.constant(5, tf.int64), tf.constant(2, tf.int64)), lambda own: own)
    assert float(noise.weight(tf.constant(EVEN))) == EVEN


def test_replicas_sum_their_rows_only_for_what_is_differentiated() -> None:
    unknown = share(2, None, others=3)
    assert float(unknown.weight(tf.constant(EVEN))) == EVEN
    with tf.GradientTape():
        np.testing.assert_allclose(unknown.weight(tf.constant(EVEN)), 2 / 5)
    np.testing.assert_allclose(unknown.relative(tf.float32), 6 / 5, err_msg="known from then on")


def test_a_mean_over_something_else_counts_by_that() -> None:
    masked = share(2, 6, others=5)
    with masked.counting(tf.constant(1.0), tf.constant(EVEN)):
        np.testing.assert_allclose(masked.weight(tf.constant(EVEN)), 1 / 6)
    assert float(masked.weight(tf.constant(EVEN))) == EVEN
    with share(2, 6).counting(tf.constant(0.0), tf.constant(EVEN)) as nothing:
        assert nothing is None
    empty = share(2, 6)
    with empty.counting(tf.constant(0.0), tf.constant(EVEN)):
        assert float(empty.weight(tf.constant(EVEN))) == EVEN, "nowhere anything: as many everywhere"


def test_a_replica_without_rows_contributes_nothing_whatever_it_has() -> None:
    bad = tf.constant([np.nan, np.inf])
    rows = tf.IndexedSlices(bad, tf.constant([1, 2]))
    assert share(0, 4).only_if_rows(bad).numpy().tolist() == [0, 0]
    assert share(0, 4).only_if_rows(rows).values.numpy().tolist() == [0, 0]
    assert share(0, 4).only_if_rows(bad, tf.constant([1.0, 2.0])).numpy().tolist() == [1, 2]
    assert share(1, 4).only_if_rows(bad) is bad


class Iterator:
    """Stands for one."""


def test_the_last_batch_is_known_where_a_graph_has_one_iterator() -> None:
    last = LastBatch(2)

    def taken(*iterators: Iterator) -> Value:
        @tf.function
        def step(rows: tf.Tensor) -> tf.Tensor:
            for iterator in iterators:
                last.note(iterator, rows)
            inner = tf.function(lambda: tf.constant([0], tf.int64) if (of := last.of_graph()) is None else of)
            return inner()

        return step

    one, other = Iterator(), Iterator()
    assert taken(one, one)(tf.constant([5, 3, 2], tf.int64)).numpy().tolist() == [5, 3, 2]
    assert taken(one)(tf.constant([UNKNOWN, 9, 9], tf.int64)).numpy().tolist() == [5, 3, 2], "not of this batch"
    assert taken(one, other)(tf.constant([5, 3, 2], tf.int64)).numpy().tolist() == [0]
    assert taken()(tf.constant([5, 3, 2], tf.int64)).numpy().tolist() == [0]


def test_rows_given_to_a_replica_function_are_known_while_it_runs_and_of_the_last_one_afterwards() -> None:
    last = LastBatch(2)
    nested = tf.function(lambda: tf.stack(last.running(1)))

    @tf.function
    def step(rows: tf.Tensor) -> tf.Tensor:
        with last.giving(1, rows, rows + 4):
            return nested()

    for rows in (3, 0):
        assert step(tf.constant(rows, tf.int64)).numpy().tolist() == [rows, rows + 4]
        assert nested().numpy().tolist() == [UNKNOWN] * 2, "another strategy may run it"
        assert last.given().numpy().tolist() == [UNKNOWN, rows]
    with last.giving(1, None, None):
        assert nested().numpy().tolist() == [UNKNOWN] * 2


def test_a_nested_function_knows_only_whether_there_are_rows() -> None:
    last = LastBatch(1)
    for rows, value in ((0, 0.0), (2, np.inf)):
        with last.giving(0, tf.constant(rows, tf.int64), None), tf.GradientTape():
            nested = NestedShare(last, 0, replicas=3, step=None, around=None)
            assert float(nested.only_if_rows(tf.constant(np.inf))) == value
            with nested.counting(tf.constant(5.0), tf.constant(EVEN)):
                assert nested.weight(tf.constant(EVEN)).numpy().tobytes() == EVEN.tobytes()
            assert float(nested.relative(tf.float32, exchange=True)) == 1.0


def test_outside_of_replica_functions_there_is_no_share() -> None:
    assert current_share() is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([tf.zeros([0]), tf.zeros([4, 2])], True),
        ([np.zeros([0]), 1.0, tf.zeros([4, 2])], True),
        ([tf.zeros([0, 2]), tf.zeros([0])], False),
        ([tf.zeros([4]), tf.zeros([0])], False),
    ],
)
def test_a_first_argument_without_rows_before_others_is_logged(
    given: list[Value], said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    say_once.cache_clear()
    step = with_share(lambda *_: None, 3, LastBatch(1), lambda own: own)
    for _ in range(2):
        step(*given)
    assert [record.getMessage()[:22] for record in caplog.records] == ["tfps: the first tensor"] * said


def test_an_eager_step_without_rows_gets_the_first_row_of_the_last_one_that_had_any() -> None:
    step = with_share(lambda batch: batch, 2, LastBatch(1), lambda own: own)
    given = with_share(lambda batch: float(batch[0, 0]), 2, last := LastBatch(1), lambda own: own)
    assert given(tf.zeros([0, 1])) == 0.0, "zeros before there was one"
    assert given(tf.constant([[7.0], [8.0]])) == 7.0
    assert given(tf.zeros([0, 1])) == 7.0
    assert last.given().numpy().tolist() == [0]
    assert step(tf.zeros([0, 1])).shape == [0, 1], "it is cut off"


def test_rows_that_the_graph_knows_are_a_constant_whatever_has_them() -> None:
    for value in (tf.zeros([3, 2]), tf.RaggedTensor.from_uniform_row_length(tf.zeros([12]), 4)):
        function = tf.function(lambda given: rows_of(given), input_signature=[tf.type_spec_from_value(value)])
        (found,) = function.get_concrete_function().outputs
        assert tf.get_static_value(found) == 3
