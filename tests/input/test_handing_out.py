"""Batches that are handed out: each worker reads all, uses what it draws, and asks no further than one batch ahead."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections import Counter
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jobs
import pytest
import tensorflow as tf

import tfps
from tfps.errors import TfpsError, UnsupportedError
from tfps.input.datasets import Stream, read_groups
from tfps.input.iterators import StagedIterator, StagedIteratorSpec
from tfps.input.staging import Feed, Group, Stage


class Workers:
    """Draws numbers as pservers give them: each rank's first is its own."""

    def __init__(self, workers: int) -> None:
        self.workers, self._begun = workers, set[tuple[str, int]]()
        self._next: Counter[str] = Counter()

    def draw(self, rank: int, counter: str) -> int:
        if (counter, rank) not in self._begun:
            self._begun.add((counter, rank))
            return rank
        self._next[counter] += 1
        return self.workers + self._next[counter] - 1


def groups(count: int) -> Iterator[Group]:
    return read_groups([tf.data.Dataset.range(count)], 1, tf.TensorSpec([], tf.int64), True)


def values(chosen: Iterator[Group]) -> Iterator[int]:
    for (value,) in chosen:
        yield int(value)


def in_turn(streams: list[Stream], steps: int | None, name: str, turns: str) -> list[list[int]]:
    """What each worker gets of an epoch if workers ask in this order, until all have found its end."""
    epochs = [values(stream.epoch(name, steps)) for stream in streams]
    found: list[list[int]] = [[] for _ in streams]
    for turn in turns + "".join(str(rank) for rank in range(len(streams))) * 50:
        if (value := next(epochs[int(turn)], None)) is not None:
            found[int(turn)].append(value)
    return found


def streams(workers: int, count: int) -> list[Stream]:
    numbers = Workers(workers)
    return [Stream(functools.partial(groups, count), functools.partial(numbers.draw, rank)) for rank in range(workers)]


def test_every_group_is_used_once_by_whoever_asks() -> None:
    assert in_turn(streams(3, 10), None, "a", "0000111") == [[0, 3, 4, 5, 8], [1, 6, 7, 9], [2]]


def test_limited_epochs_go_on_where_the_last_one_ended_and_begin_anew_at_the_end_of_the_data() -> None:
    both = streams(2, 8)
    got = [sorted(itertools.chain(*in_turn(both, 4, str(epoch), "0001"))) for epoch in range(5)]
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2 + [[0, 1, 2, 3]]


def test_data_that_ends_within_a_limited_epoch_ends_that_and_begins_anew_in_the_next() -> None:
    both = streams(2, 5)
    got = [sorted(itertools.chain(*in_turn(both, 4, str(epoch), "1011"))) for epoch in range(4)]
    assert got == [[0, 1, 2, 3], [4], [0, 1, 2, 3], [4]]


def test_an_empty_dataset_ends_every_epoch_at_once() -> None:
    both = streams(2, 0)
    assert in_turn(both, 4, "a", "") == in_turn(both, 4, "b", "") == [[], []]


def test_a_counter_that_begins_anew_within_an_epoch_is_an_error_by_name() -> None:
    drawn = iter([1, 3, 1])
    epoch = values(Stream(functools.partial(groups, 9), lambda counter: next(drawn)).epoch("a", None))
    assert [next(epoch), next(epoch)] == [1, 3]
    with pytest.raises(UnsupportedError, match="has forgotten this one: got batch 1 after batch 3"):
        next(epoch)


@pytest.mark.parametrize(("pads", "last"), [(True, [4, None]), (False, None)])
def test_groups_have_a_batch_for_each_replica(pads: bool, last: list[int | None] | None) -> None:
    dataset = tf.data.Dataset.from_tensor_slices([[0], [1], [2], [3], [4]])
    made = [
        [int(batch[0]) if batch.shape[0] else None for batch in group]
        for group in read_groups([dataset], 2, tf.TensorSpec([None], tf.int32), pads)
    ]
    assert made == [[0, 1], [2, 3]] + ([last] if last else [])


class Handed:
    """An iterator over numbers that are handed out, and how many of them have been asked for."""

    def __init__(self, strategy: tfps.Strategy, count: int, error: Exception | None = None) -> None:
        staging, spec = strategy.extended.staging, tf.TensorSpec([], tf.int64)
        self.asked = asked = list[int]()

        def chosen() -> Iterator[Group]:
            for number in range(count):
                asked.append(number)
                yield [tf.constant(number, tf.int64)]
            if error is not None:
                raise error

        stage = Stage(staging, spec, on_devices=False)
        self.feed = Feed(staging, stage, chosen(), None, False, hands_out=True)
        of = StagedIteratorSpec(staging.number, spec, False, hands_out=True)
        number = tf.constant(self.feed.number, tf.int64)
        self.iterator = StagedIterator(of, self.feed.tokens.queue_ref, number, self.feed)


def asked_for(handed: Handed, count: int) -> bool:
    return len(handed.asked) >= count


@pytest.fixture
def strategy() -> Iterator[tfps.Strategy]:
    strategy = tfps.Strategy()
    yield strategy
    strategy.close()


@tf.function
def taken(iterator: StagedIterator) -> tf.Tensor:
    return iterator.get_next()


@pytest.mark.parametrize("eager", [True, False])
def test_a_batch_is_asked_for_once_the_one_before_has_been_taken(strategy: tfps.Strategy, eager: bool) -> None:
    handed = Handed(strategy, 5)
    for number in range(5):
        assert int(next(handed.iterator) if eager else taken(handed.iterator)) == number
        jobs.poll(functools.partial(asked_for, handed, min(number + 2, 5)))
        assert len(handed.asked) == min(number + 2, 5)
    for _ in range(3):  # the end cannot get lost
        with pytest.raises((StopIteration, tf.errors.OutOfRangeError)):
            next(handed.iterator) if eager else taken(handed.iterator)


def test_a_step_that_failed_while_it_waited_takes_nothing_from_those_after_it(strategy: tfps.Strategy) -> None:
    handed = Handed(strategy, 4)
    assert int(taken(handed.iterator)) == 0
    handed.feed.tokens.dequeue()  # what comes before a token, which that step had taken
    assert [int(taken(handed.iterator)) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(tf.errors.OutOfRangeError):
        taken(handed.iterator)


def test_an_error_of_the_exchange_keeps_its_class_and_nothing_is_left_of_a_dropped_iterator(
    strategy: tfps.Strategy,
) -> None:
    handed = Handed(strategy, 1, TfpsError("the pserver is gone"))
    assert int(next(handed.iterator)) == 0
    with pytest.raises(TfpsError, match="the pserver is gone"):
        next(handed.iterator)
    dropped = Handed(strategy, 3)
    assert int(next(dropped.iterator)) == 0
    name = f"tfps-stage-{dropped.feed.number}"
    jobs.poll(functools.partial(asked_for, dropped, 2))
    del handed, dropped
    jobs.poll(lambda: not any(thread.name == name for thread in threading.enumerate()))
    jobs.poll(lambda: strategy.extended.staging.staged() == 0)
