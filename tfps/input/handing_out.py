"""Batches that are handed out in mode "async": each is used once, by the worker that is free.

Every worker reads the whole stream of batches, and takes those whose number it draws from a counter on a pserver.

Tested in tests/input/test_handing_out.py and tests/integration/test_async.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.graph.ops import HOST
from tfps.graph.tf_private import dummy_batch
from tfps.types import Structure

Group = list[Structure]  # one batch per local replica
_MISSING = object()


class Groups:
    """Groups of batches, one per local replica, in order; begins to read at once.

    Args:
        datasets: one that all replicas read in turn, or one per replica.
        element_spec: of one replica's batch.
        pads: replicas without data at the end get an empty batch; otherwise the last, partial group is dropped.
    """

    def __init__(self, datasets: Sequence[tf.data.Dataset], replicas: int, element_spec: Structure, pads: bool) -> None:
        self._replicas, self._element_spec, self._pads = replicas, element_spec, pads
        with tf.device(HOST):  # now, as without staging: even an unused iterator advances reshuffling
            self._sources = [iter(dataset) for dataset in datasets]

    def __iter__(self) -> Iterator[Group]:
        return self

    def __next__(self) -> Group:
        sources = self._sources
        group = [next(sources[replica % len(sources)], _MISSING) for replica in range(self._replicas)]
        missing = sum(batch is _MISSING for batch in group)
        if missing == self._replicas or (missing and not self._pads):
            raise StopIteration
        if missing:
            with tf.device(HOST):
                group = [dummy_batch(self._element_spec) if each is _MISSING else each for each in group]
        return group


class Stream:
    """A dataset from which groups are handed out, epoch by epoch.

    Args:
        open_groups: reads the dataset from its begin.
        draw: draws a number from a counter, see `Peers.fetch_add`.
    """

    def __init__(self, open_groups: Callable[[], Iterator[Group]], draw: Callable[[str], int]) -> None:
        self._open, self._draw = open_groups, draw
        self._groups = open_groups()
        self._position = 0  # of the group that is read next
        self._begin = self._steps = 0  # of the epoch: its first position, and how many groups it has if that is limited

    def epoch(self, counter: str, steps: int | None) -> Iterator[Group]:
        """The groups of the next epoch that this worker uses; the last epoch's must have ended.

        Args:
            counter: the same on all ranks, another one for each epoch.
            steps: groups of the epoch, for all workers together; None: all that are left.

        Raises:
            UnsupportedError: the counter has begun anew, as pservers keep only so many; when a group is taken.
        """
        self._begin += self._steps
        self._steps = steps or 0
        return self._chosen(counter, steps)

    def _chosen(self, counter: str, steps: int | None) -> Iterator[Group]:
        last = -1
        while True:
            number = self._draw(counter)
            if number <= last:
                raise UnsupportedError(
                    "a loop over a distributed dataset with mode='async' must draw a batch at least once while 1024 "
                    f"others begin; the pserver has forgotten this one: got batch {number} after batch {last}"
                )
            last = number
            if steps is not None and number >= steps:
                return
            if (group := self._at(number)) is None:
                return
            yield group
            del group

    def _at(self, number: int) -> Group | None:
        """Group `number` of the epoch; None if the data ends before."""
        while True:
            while self._position <= self._begin + number:
                group = next(self._groups, None)
                if group is None:
                    break
                self._position += 1
            else:
                return group
            if not 0 < self._position <= self._begin:
                return None
            # It has ended with the last epoch, on all ranks: this one reads it anew.
            self._begin = self._position = 0
            self._groups = self._open()
