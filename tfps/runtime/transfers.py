"""Transfers: handle the messages of one send op, from the TensorFlow queue to the effect of the reply."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from tfps.errors import TfpsError, to_text
from tfps.exchange.interface import BucketSpec
from tfps.graph.ops import Gate, answer
from tfps.types import Function

UNDECLARED = -1  # in place of a bucket's id
Pushed = tuple[int, tf.Tensor, tf.Tensor]  # graph run, data and indices of a round
_NO_BYTES = np.empty(0, np.uint8)


class Transfer:
    """Handles the messages of one send in one graph: per round `messages`, one for each local replica."""

    exchanges = True  # whether its messages lead to an exchange
    step_scalars = b""  # of the round that is being pushed, for a bucket with an update; pump thread only

    def __init__(self, bucket: int, spec: BucketSpec, messages: int = 1) -> None:
        self.id = -1
        self.bucket, self.spec, self.messages = bucket, spec, messages
        self.round = 0  # the bucket's round that has come back; by who calls `finish`, one at a time
        self._arrived = 0  # this and the next two: pump thread only
        self._graph_run = 0
        self._carried: tuple[tf.Tensor, tf.Tensor] | None = None
        self.times: list[tf.Tensor] = []  # of the round's messages, the first replica's first

    def collect(self, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor, times: tf.Tensor, /) -> Pushed | None:
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

    def finish(self, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor) -> None:
        """Uses the reduced bytes (flat uint8). Called by the update executor, or in one process by the pump thread."""
        raise NotImplementedError

    def fail(self, error: TfpsError) -> None:
        """Passes `error` to whatever waits for this round, if anything does. Called by the update executor."""


class Comparison(Protocol):
    """Compares the digests of updates with those of other ranks; see invariants.py."""

    def weigh(self, transfer: DeferredUpdate) -> tf.Tensor:
        """Whether the current round takes the checksum."""

    def note(self, transfer: DeferredUpdate, digests: Sequence[tf.Tensor]) -> None:
        """Takes the digests that an update returned, one per local replica."""


class Group(weakref.WeakSet["DeferredUpdate"]):
    """Transfers that one graph sends together, with the same number of its run."""


class DeferredUpdate(Transfer):
    """Applies the update of a bucket's variables, which opens their gates."""

    def __init__(self, bucket: int, spec: BucketSpec, messages: int, group: Group) -> None:
        super().__init__(bucket, spec, messages)
        self.group = group
        group.add(self)
        self.kept: tuple[str, ...] = ()  # names of values that the update reads as of the send
        self.read = -1  # the variable whose read has a timestamp (see timestamps.py)
        self.reports_step = False  # whether its messages include the times of the forward pass
        self.functions: list[Function] = []  # one per local replica
        self.invariants: Comparison | None = None
        self.leads = False  # whether each digest is compared
        self.labels: tuple[tuple[str, ...], tuple[bool | None, ...]] = (), ()  # of the values in a digest
        self.gates: list[Gate] = []

    def finish(self, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor) -> None:
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
    """Returns the reduced bytes to the graph that waits for them; declared before its first run if it uses them."""

    def __init__(self, spec: BucketSpec) -> None:
        super().__init__(UNDECLARED, spec)
        # For each message, the queue at which the graph waits; replies come in this order.
        self.waiting: deque[tf.Tensor] = deque()
        self.declare: Callable[[], None] = lambda: None  # for a graph whose first run was not noticed

    def collect(self, *message: tf.Tensor) -> Pushed | None:
        if self.bucket == UNDECLARED:
            self.declare()
        return super().collect(*message)

    def finish(self, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor) -> None:
        answer(self.waiting.popleft(), ["", graph_run, data, indices])

    def fail(self, error: TfpsError) -> None:
        answer(self.waiting.popleft(), [to_text(error), np.int64(0), _NO_BYTES, _NO_BYTES])
