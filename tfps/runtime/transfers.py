"""Transfers: handle the messages of one send op, from the TensorFlow queue to the effect of the reply."""

from __future__ import annotations

import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfps.errors import TfpsError, to_text
from tfps.exchange.interface import BucketSpec
from tfps.graph.ops import Gate, answer, tensor_of
from tfps.types import Function

UNDECLARED = -1  # in place of a bucket's id
_NO_BYTES = np.empty(0, np.uint8)

#: The least gradient for a part of an update: a part is a call, and writes row by row.
PART_BYTES = 8 * 2**20
_WORTH = 3.0  # parts take up to so many times as long as the whole update, which must pass while slices come back


@dataclass(eq=False)
class UpdatedRows:
    """How many rows of a variable one round has updated so far. Apply threads only, one at a time."""

    count: int = 0
    began_s: float = 0.0  # when the first slices had come back


class Transfer:
    """Handles the messages of one send in one graph, one round at a time.

    `exchanges`: whether its messages lead to an exchange.

    Args:
        bucket: its id in the exchange.
        spec: of the bucket.
        messages: messages per round, one per local replica; one of them carries the data.
    """

    exchanges = True
    numbers = b""  # of the round that is being pushed, for a bucket with an update; pump thread only

    def __init__(self, bucket: int, spec: BucketSpec, messages: int = 1) -> None:
        self.id = -1
        self.bucket, self.spec, self.messages = bucket, spec, messages
        self.round = 0  # the bucket's round that has come back; apply threads only, one at a time
        self._arrived = 0  # this and the next two: pump thread only
        self._graph_run = 0
        self._carried: tuple[tf.Tensor, tf.Tensor] | None = None
        self.updated = UpdatedRows()  # in the round that has come back; apply threads only
        self.times: list[tf.Tensor] = []  # of the round's messages, the first replica's first

    def collect(
        self, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor, times: tf.Tensor
    ) -> tuple[int, tf.Tensor, tf.Tensor] | None:
        """Returns what to push once all messages of the round are here, else None. Called by the pump thread.

        With several local replicas one message carries their sum; the others only confirm that their replica has closed
        its gates, before which the update may not start. The first replica's message has the graph run, the others 0.
        """
        first = int(graph_run)
        self._graph_run = first or self._graph_run
        if not self._arrived:
            self.times = []
        self.times.insert(0 if first else len(self.times), times)
        if self._carried is None or data.shape[0] or indices.shape[0]:
            self._carried = data, indices
        self._arrived += 1
        if self._arrived < self.messages:
            return None
        carried, self._carried, self._arrived = self._carried, None, 0
        return self._graph_run, *carried

    @property
    def takes_parts(self) -> bool:
        """Whether it can use the first reduced bytes before the others have come."""
        return False

    def take_part(self, updated: UpdatedRows, buffer: NDArray[np.uint8], nbytes: int) -> bool:
        """Uses the first `nbytes` of the reduced bytes in `buffer`, or not; returns whether it did.

        Called by an apply thread, before `finish`. A call may be late: then the round's `updated` says that nothing is
        left to do.
        """
        return False

    def finish(self, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor) -> None:
        """Uses the reduced bytes (flat uint8). Called by an apply thread."""
        raise TypeError(f"{type(self).__name__} must say what becomes of a reply")

    def fail(self, error: TfpsError) -> None:
        """Passes `error` to everything that waits for this round. Called by an apply thread."""
        raise TypeError(f"{type(self).__name__} must say what becomes of a failure")


class Comparison(Protocol):
    """Compares the digests of updates with those of other ranks; see invariants.py."""

    def weigh(self, transfer: DeferredUpdate) -> tf.Tensor:
        """Whether the current round takes the checksum."""

    def note(self, transfer: DeferredUpdate, digests: Sequence[tf.Tensor]) -> None:
        """Takes the digests that an update returned, one per local replica."""


class Group:
    """Transfers that one graph sends together, with the same number of its run."""

    def __init__(self) -> None:
        self.transfers: weakref.WeakSet[DeferredUpdate] = weakref.WeakSet()


class Rounds:
    """Detects steps that an error stopped between two sends. Pump thread only.

    Gates order the sends of one bucket: once a later step sends a bucket, an earlier step that has sent only others of
    its group never will, and rounds would no longer belong to the same step on all ranks.
    """

    def __init__(self) -> None:
        self._missing: dict[int, set[DeferredUpdate]] = {}  # by graph run: the group's unsent transfers

    def skipped(self, graph_run: int, transfer: DeferredUpdate) -> bool:
        """Notes that `transfer` is sent; returns whether an earlier step has skipped its bucket."""
        for earlier, missing in self._missing.items():
            if earlier == graph_run:
                break
            if any(each.bucket == transfer.bucket for each in missing):
                return True
        if graph_run not in self._missing:
            self._missing[graph_run] = set(transfer.group.transfers)
        missing = self._missing[graph_run]
        missing.discard(transfer)
        if not missing:
            del self._missing[graph_run]
        return False


@dataclass(eq=False)
class Parts:
    """How to update one variable in parts; with functions of gradient bytes and their rows.

    Args:
        rows: of the variable.
        row_bytes: of a row of the gradient.
        at_once: a part begins at a multiple of this many rows.
        functions: one per local replica.
        endings: what follows the last part, one per local replica; each returns what the whole update returns.
    """

    rows: int
    row_bytes: int
    at_once: int
    functions: list[Function] = field(default_factory=list)
    endings: list[Function] = field(default_factory=list)

    def update(self, done: UpdatedRows, data: Callable[[int, int], tf.Tensor], until: int) -> None:
        """Updates the rows from `done` to `until`; `data` returns a range of the gradient's bytes."""
        if until <= done.count:  # a late call: the rest came first
            return
        gradient = data(done.count * self.row_bytes, until * self.row_bytes)
        begin, end = tf.constant(done.count), tf.constant(until)
        for function in self.functions:
            function(gradient, begin, end)
        done.count = until


class DeferredUpdate(Transfer):
    """Applies the update of a bucket's variables, which opens their gates."""

    def __init__(self, bucket: int, spec: BucketSpec, messages: int, group: Group) -> None:
        super().__init__(bucket, spec, messages)
        self.group = group
        group.transfers.add(self)
        self.kept: tuple[str, ...] = ()  # names of values that the update reads as of the send
        self.read = -1  # the variable whose read has a timestamp (see timestamps.py)
        self.whole = False  # whether its messages include the times of the forward pass
        self.functions: list[Function] = []  # one per local replica
        self.parts: Parts | None = None  # if the update can be cut
        self.spread_s = 0.0  # from the first slice of the last round to its last,
        self.whole_s = sys.float_info.max  # and how long the whole update took when it was last done
        self.invariants: Comparison | None = None
        self.leads = False  # whether each digest is compared
        self.labels: tuple[tuple[str, ...], tuple[bool | None, ...]] = (), ()  # of the values in a digest
        self.gates: list[Gate] = []

    @property
    def takes_parts(self) -> bool:
        return self.parts is not None and len(self.parts.functions) == len(self.functions)

    def take_part(self, updated: UpdatedRows, buffer: NDArray[np.uint8], nbytes: int) -> bool:
        updated.began_s = updated.began_s or time.monotonic()
        # Where all slices come back at about the same time the whole update is faster.
        if self.parts is None or self.spread_s < _WORTH * self.whole_s:
            return False
        until = nbytes // self.parts.row_bytes // self.parts.at_once * self.parts.at_once
        if (until - updated.count) * self.parts.row_bytes < PART_BYTES:
            return False
        self.parts.update(updated, lambda begin, end: tensor_of(buffer[begin:end]), until)
        return True

    def finish(self, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor) -> None:
        began_s = time.monotonic()
        if self.takes_parts and self.updated.began_s:
            self.spread_s = began_s - self.updated.began_s
        in_parts = self.updated.count > 0
        self._update(data, indices)
        if self.takes_parts and not in_parts:
            self.whole_s = time.monotonic() - began_s

    def _update(self, data: tf.Tensor, indices: tf.Tensor) -> None:
        functions, arguments = self.functions, [data, indices]
        if self.parts is not None and self.updated.count:
            self.parts.update(self.updated, lambda begin, end: data[begin:end], self.parts.rows)
            functions, arguments = self.parts.endings, []
        elif self.parts is not None:
            self.updated.count = self.parts.rows  # a late call of `take_part` has nothing to do
        if self.invariants is None:
            for function in functions:
                function(*arguments)
            return
        weigh = self.invariants.weigh(self)
        self.invariants.note(self, [function(*arguments, weigh) for function in functions])

    def fail(self, error: TfpsError) -> None:
        for gate in self.gates:
            gate.open(to_text(error))


class Pull(Transfer):
    """Returns the reduced bytes to the graph that waits for them.

    If the result is used, the bucket is declared before the graph's first run (see pulls.py).
    """

    def __init__(self, spec: BucketSpec) -> None:
        super().__init__(UNDECLARED, spec)
        # For each message, the queue at which the graph waits; replies come in this order.
        self.waiting: deque[tf.Tensor] = deque()
        self.declare: Callable[[], None] = lambda: None  # for a graph whose first run was not noticed

    def collect(
        self, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor, times: tf.Tensor
    ) -> tuple[int, tf.Tensor, tf.Tensor] | None:
        if self.bucket == UNDECLARED:
            self.declare()
        return super().collect(graph_run, data, indices, times)

    def finish(self, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor) -> None:
        answer(self.waiting.popleft(), ["", graph_run, data, indices])

    def fail(self, error: TfpsError) -> None:
        answer(self.waiting.popleft(), [to_text(error), np.int64(0), _NO_BYTES, _NO_BYTES])
