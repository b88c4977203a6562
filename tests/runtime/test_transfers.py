"""When a transfer's round is complete, and how a skipped one is found."""

from __future__ import annotations

import itertools

import pytest
import tensorflow as tf

from tfps.exchange.interface import BucketSpec
from tfps.runtime.stopped_steps import Rounds
from tfps.runtime.transfers import DeferredUpdate, Group, Transfer


def test_a_round_with_several_replicas_starts_when_all_have_closed_their_gates() -> None:
    transfer = Transfer(0, BucketSpec(("b",), "sum", 4, "float32", 0), messages=3)
    data, empty = tf.constant([1, 2, 3, 4], tf.uint8), tf.constant([], tf.uint8)
    none, times = tf.constant(0, tf.int64), tf.constant([], tf.float64)
    for graph_run in (7, 8):
        assert transfer.collect(none, empty, empty, times) is None
        assert transfer.collect(tf.constant(graph_run, tf.int64), data, empty, times) is None
        collected = transfer.collect(none, empty, empty, times)
        assert collected is not None
        assert collected[:2] == (graph_run, data)


def group_of(*buckets: int) -> list[DeferredUpdate]:
    group = Group()
    return [DeferredUpdate(b, BucketSpec((f"b{b}",), "sum", 4, "float32", b), 1, group) for b in buckets]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_skipped_send_is_found_when_its_bucket_comes_next_in_whatever_order(order: tuple[int, ...]) -> None:
    transfers, rounds = group_of(0, 1, 2), Rounds()
    assert not any(rounds.skipped(1, transfers[index]) for index in order)
    assert not rounds.skipped(2, transfers[order[0]])
    assert not rounds.skipped(2, transfers[order[1]])
    assert not rounds.skipped(3, transfers[order[0]])
    assert not rounds.skipped(3, transfers[order[1]])
    assert rounds.skipped(3, transfers[order[2]])


def test_a_skipped_send_is_found_by_another_graph_that_sends_the_same_bucket() -> None:
    first, second = group_of(0, 1), group_of(1, 2)
    rounds = Rounds()
    assert not rounds.skipped(1, first[0])
    assert not rounds.skipped(2, second[1])
    assert rounds.skipped(2, second[0])


def test_steps_whose_sends_overlap_are_no_skipped_sends() -> None:
    transfers, rounds = group_of(0, 1), Rounds()
    assert not rounds.skipped(1, transfers[0])
    assert not rounds.skipped(2, transfers[0])  # an independent tower of the next loop iteration
    assert not rounds.skipped(1, transfers[1])
    assert not rounds.skipped(2, transfers[1])
