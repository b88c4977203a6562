"""Transfers: what becomes of the messages of one send in one graph, from the TensorFlow queue to what a reply does."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfps.errors import TfpsError, to_text
from tfps.exchange.interface import BucketSpec
from tfps.graph.ops import Gate, answer

UNDECLARED = -1  # in place of a bucket's id
_NO_BYTES = np.empty(0, np.uint8)


class Transfer:
    """What becomes of the messages of one send in one graph; one round is under way at a time.

    `exchanges`: whether its messages lead to an exchange.

    Args:
        bucket: id that the exchange gave.
        spec: what the bucket is.
        messages: messages per round, one per local replica; one of them carries the data.
    """

    exchanges = True

    def __init__(self, bucket: int, spec: BucketSpec, messages: int = 1) -> None:
        self.id = -1
        self.bucket, self.spec, self.messages = bucket, spec, messages
        self.round = 0  # of the bucket, that comes back; apply thread only
        self._arrived = 0  # this and the next two: pump thread only
        self._ticket = 0
        self._carried: tuple[tf.Tensor, tf.Tensor] | None = None
        self.times: list[tf.Tensor] = []  # of the messages of the round, the first replica's in front

    def collect(
        self, ticket: tf.Tensor, data: tf.Tensor, indices: tf.Tensor, times: tf.Tensor
    ) -> tuple[int, tf.Tensor, tf.Tensor] | None:
        """What to push once all messages of the round are here, else None. Called by the pump thread.

        With several local replicas one message carries the sum over them, the others only say that their replica has
        closed its gates: the update may not start before. The first replica's has the ticket, the others have 0.
        """
        first = int(ticket)
        self._ticket = first or self._ticket
        if not self._arrived:
            self.times = []
        self.times.insert(0 if first else len(self.times), times)
        if self._carried is None or data.shape[0] or indices.shape[0]:
            self._carried = data, indices
        self._arrived += 1
        if self._arrived < self.messages:
            return None
        carried, self._carried, self._arrived = self._carried, None, 0
        return self._ticket, *carried

    def finish(self, ticket: tf.Tensor, data: tf.Tensor, indices: tf.Tensor) -> None:
        """Uses the reduced bytes (flat uint8). Called by the apply thread."""
        raise TypeError(f"{type(self).__name__} must say what becomes of a reply")

    def fail(self, error: TfpsError) -> None:
        """Wakes whoever waits for this round. Called by the apply thread."""
        raise TypeError(f"{type(self).__name__} must say what becomes of a failure")


class Group:
    """Transfers that one graph sends together, all with one ticket."""

    def __init__(self) -> None:
        self.transfers: weakref.WeakSet[DeferredUpdate] = weakref.WeakSet()


class Rounds:
    """Finds steps that an error has stopped between two sends. Pump thread only.

    Gates order the sends of one bucket: once a later step sends a bucket, an earlier step that has sent others of its
    group but not this one never will, and the ranks' rounds would no longer be of the same step.
    """

    def __init__(self) -> None:
        self._missing: dict[int, set[DeferredUpdate]] = {}  # by ticket: what of the group has not been sent yet

    def skipped(self, ticket: int, transfer: DeferredUpdate) -> bool:
        """Notes that `transfer` is sent; whether an earlier step has skipped its bucket."""
        for earlier, missing in self._missing.items():
            if earlier == ticket:
                break
            if any(each.bucket == transfer.bucket for each in missing):
                return True
        if ticket not in self._missing:
            self._missing[ticket] = set(transfer.group.transfers)
        missing = self._missing[ticket]
        missing.discard(transfer)
        if not missing:
            del self._missing[ticket]
        return False


class DeferredUpdate(Transfer):
    """Applies the update of a bucket's variables, which opens their gates."""

    def __init__(self, bucket: int, spec: BucketSpec, messages: int, group: Group) -> None:
        super().__init__(bucket, spec, messages)
        self.group = group
        group.transfers.add(self)
        self.ready_s = 0.0  # when the last gradient came
        self.kept: tuple[str, ...] = ()  # names of what the update reads as of the send
        self.read = -1  # the variable whose read is noted (see timestamps.py)
        self.whole = False  # whether its messages say when the forward pass was
        self.functions: list[Callable[..., Any]] = []  # one per local replica
        self.invariants: Any = None  # who compares digests of the update, see invariants.py
        self.leads = False  # whether each digest is compared
        self.labels: tuple[tuple[str, ...], tuple[bool | None, ...]] = (), ()  # of the values in a digest
        self.gates: list[Gate] = []

    def finish(self, ticket: tf.Tensor, data: tf.Tensor, indices: tf.Tensor) -> None:
        if self.invariants is None:
            for function in self.functions:
                function(data, indices)
            return
        weigh = self.invariants.weigh(self)
        self.invariants.note(self, [function(data, indices, weigh) for function in self.functions])

    def fail(self, error: TfpsError) -> None:
        for gate in self.gates:
            gate.open(to_text(error))


class Pull(Transfer):
    """Hands the reduced bytes back to the graph that waits for them.

    Its bucket is declared before the graph runs for the first time, if its result is used (see pulls.py).
    """

    def __init__(self, spec: BucketSpec) -> None:
        super().__init__(UNDECLARED, spec)
        # Queues in which the graph waits, for each message the one that came with it; replies come in this order.
        self.waiting: deque[tf.Tensor] = deque()
        self.declare: Callable[[], None] = lambda: None  # for a graph whose first run was not seen

    def collect(
        self, ticket: tf.Tensor, data: tf.Tensor, indices: tf.Tensor, times: tf.Tensor
    ) -> tuple[int, tf.Tensor, tf.Tensor] | None:
        if self.bucket == UNDECLARED:
            self.declare()
        return super().collect(ticket, data, indices, times)

    def finish(self, ticket: tf.Tensor, data: tf.Tensor, indices: tf.Tensor) -> None:
        answer(self.waiting.popleft(), ["", ticket, data, indices])

    def fail(self, error: TfpsError) -> None:
        answer(self.waiting.popleft(), [to_text(error), np.int64(0), _NO_BYTES, _NO_BYTES])
