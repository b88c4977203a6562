"""What ranks compare while they train: checksums of weights, and rows of digests in whatever order they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jobs
import numpy as np
import pytest
import tensorflow as tf

from tfps.errors import MismatchError, TfpsError
from tfps.exchange.interface import BucketSpec, Exchange
from tfps.runtime.runtime import Runtime
from tfps.runtime.transfers import DeferredUpdate, Group
from tfps.trace.recorder import Recorder
from tfps.types import Argument, Array
from tfps.updates import invariants
from tfps.updates.invariants import KEPT, Invariants, checksum

DTYPES = [tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64, tf.uint8]
SIZES = [2, 1023, 1024, 1025, 4099]


def values(size: int, dtype: tf.DType) -> Array:
    return np.random.default_rng(0).integers(1, 100, size).astype(dtype.as_numpy_dtype)


def of(*arrays: Argument) -> int:
    return int(checksum([tf.constant(each) for each in arrays]))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("size", SIZES)
def test_a_checksum_changes_with_one_item_and_with_two_that_change_places(size: int, dtype: tf.DType) -> None:
    before = values(size, dtype)
    for place in (0, size // 2, size - 1):
        changed = before.copy()
        changed[place] += 1
        assert of(changed) != of(before)
    before[0], before[-1] = 1, 2
    exchanged = before.copy()
    exchanged[0], exchanged[-1] = 2, 1
    assert of(exchanged) != of(before)
    assert of(before.copy()) == of(before)


def test_a_checksum_sees_signs_rows_and_zeros() -> None:
    table = np.random.default_rng(0).normal(size=(256, 512)).astype("float32")
    powers = np.exp2(np.random.default_rng(0).integers(0, 8, (1024, 1024))).astype("float32")  # bits that are high only
    assert of(-table) != of(table)
    assert of(table[::-1]) != of(table)
    assert of(table.T.reshape(table.shape)) != of(table)
    assert of(np.zeros(4, "float32")) != of(-np.zeros(4, "float32"))
    for axis in (0, 1):
        assert of(np.roll(powers, 256, axis)) != of(powers)
    assert of(table, powers) != of(powers, table)


def test_a_checksum_of_several_tensors_of_different_dtypes_and_sizes_covers_all() -> None:
    parts = [values(3, tf.float32), values(1500, tf.float16), values(0, tf.float32), values(1, tf.float64)]
    for index in (0, 1, 3):
        changed = [each.copy() for each in parts]
        changed[index][-1] += 1
        assert of(*changed) != of(*parts)


def test_a_large_tensor_is_summed_piece_by_piece() -> None:
    large = np.zeros(2 * invariants._CHUNK + 5, "float32")
    moved = large.copy()
    large[3], moved[invariants._CHUNK + 3] = 1, 1
    assert of(large) != of(moved)


class Rank:
    """One of two ranks whose updates are what a test says."""

    def __init__(self, worker: Exchange, every: int) -> None:
        self.runtime = Runtime(worker, Recorder(), jobs.DEADLINE_S)
        made = Invariants.of(self.runtime, every)
        assert made is not None
        self.invariants = made
        self.failed = jobs.Failed(worker)

    def declare(self) -> None:
        specs = [(names, BucketSpec(names, "sum", 4, "float32", 0)) for names in (tuple("abcde"), ("f",))]
        ids = self.runtime.buckets(specs)
        self.updates = [DeferredUpdate(id_, spec, 1, Group()) for id_, (_, spec) in zip(ids, specs, strict=True)]
        for update in self.updates:
            update.leads, update.labels = True, (("learning_rate", "iterations"), (True, False))

    def step(self, bucket: int, round_: int, weights: int, rate: float = 0.1, iterations: int = 1) -> None:
        """What the update of `bucket` has returned."""
        update = self.updates[bucket]
        update.round = round_
        numbers = [np.float64(rate).view(np.int64), iterations, *[0] * (KEPT - 2)]
        self.invariants.note(update, [tf.constant([weights, *numbers], tf.int64)])


@pytest.fixture
def two() -> Iterator[Callable[[int], list[Rank]]]:
    """Makes two ranks in this process that compare `every` so many steps."""
    with jobs.Cluster() as cluster:
        addresses = cluster.pservers(1, 2)
        made: list[Rank] = []

        def make(every: int) -> list[Rank]:
            workers = jobs.together(*(lambda rank=rank: cluster.worker(addresses, rank) for rank in range(2)))
            made.extend(Rank(worker, every) for worker in workers)
            jobs.together(*(rank.declare for rank in made))
            return made

        yield make
        jobs.attempt(*(rank.runtime.close for rank in made))


def test_rows_are_matched_whatever_order_the_ranks_come_to_their_updates_in(
    two: Callable[[int], list[Rank]],
) -> None:
    first, second = two(2)
    for step in range(6):
        first.step(0, step, weights=step)
        first.step(1, step, weights=-step)
    for bucket in (1, 0):
        for step in range(6):
            second.step(bucket, step, weights=-step if bucket else step)
    for rank in (first, second):
        assert rank.runtime.settle(jobs.DEADLINE_S)
        assert rank.runtime.exchange.failure is None
        assert not rank.invariants._awaited


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"rate": 0.2}, "at step 3 of a, b, c and 2 more learning_rate is 0.1 on rank 0 and 0.2 on rank 1"),
        ({"iterations": 7}, "at step 3 of a, b, c and 2 more iterations is 1 on rank 0 and 7 on rank 1"),
        ({"weights": 255}, "the weights after the update have checksum 0{15}9 on rank 0 and 0{14}ff on rank 1"),
        ({"weights": 255, "rate": 0.2}, "learning_rate is 0.1 on rank 0"),
    ],
)
def test_the_first_difference_is_named_on_all_ranks(
    two: Callable[[int], list[Rank]], theirs: dict[str, Argument], message: str
) -> None:
    ranks = two(2)
    for rank, changes in zip(ranks, ({}, theirs), strict=True):
        for step in range(4):
            rank.step(0, step, **{"weights": 9, **(changes if step >= 2 else {})})
    for rank in ranks:
        error = rank.failed.wait()
        assert isinstance(error, MismatchError)
        with pytest.raises(TfpsError, match=message):
            raise error


def test_ranks_that_compare_at_different_intervals_are_refused_by_the_first_declaration() -> None:
    with jobs.Cluster() as cluster:
        addresses = cluster.pservers(1, 2)
        workers = jobs.together(*(lambda rank=rank: cluster.worker(addresses, rank) for rank in range(2)))
        ranks = [Rank(worker, every) for worker, every in zip(workers, (2, 3), strict=True)]
        for error in jobs.attempt(*(rank.declare for rank in ranks)):
            assert isinstance(error, MismatchError)
            assert "checks every" in str(error)
        jobs.attempt(*(rank.runtime.close for rank in ranks))


@pytest.mark.parametrize(("bucket", "every"), [(0, 1), (3, 2), (5, 7)])
def test_each_bucket_is_weighed_once_in_so_many_rounds(bucket: int, every: int) -> None:
    with jobs.Cluster() as cluster:
        addresses = cluster.pservers(1, 2)
        workers = jobs.together(*(lambda rank=rank: cluster.worker(addresses, rank) for rank in range(2)))
        rank = Rank(workers[0], every)
        update = DeferredUpdate(bucket, BucketSpec(("b",), "sum", 4, "float32", 0), 1, Group())
        due = []
        for update.round in range(3 * every):
            due.append(bool(rank.invariants.weigh(update)))
        assert sum(due) == 3
        assert due[:every] * 3 == due
        jobs.attempt(*(each.close for each in workers))
        rank.runtime.close()
