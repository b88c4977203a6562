"""Compares what must be the same on all ranks where they meet: weights, slots, learning rates, counters, random seeds.

Tested in tests/updates/test_states.py and tests/integration/test_divergence.py.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfps.collectives import AllGather
from tfps.errors import MismatchError
from tfps.exchange.interface import Reply
from tfps.input import batch_digests
from tfps.input.staging import Staging
from tfps.keras_hooks.variables import ACCUMULATOR, fingerprint
from tfps.runtime.runtime import Runtime
from tfps.types import Array, Buffer, Variable
from tfps.updates.combined import Combiner
from tfps.updates.initial_values import InitialValues
from tfps.updates.invariants import by_value, decimal, hexadecimal
from tfps.updates.names import own_name
from tfps.updates.variables import GatedVariable

_PATIENCE_S = 5.0  # at the end: others may still do something alone


class States:
    """Compares the variables of one strategy. Used by the main thread."""

    def __init__(self, runtime: Runtime, combiner: Combiner, initial_values: InitialValues, staging: Staging) -> None:
        self._runtime, self._combiner, self._initial_values, self._staging = runtime, combiner, initial_values, staging
        self._compared = 0  # exchanges of the program until then
        self._said = AllGather(runtime, "states of the ranks")
        self._said.later()

    def compare(self, when: str) -> None:
        """Compares with all other ranks, which must call it too; `when` is for the message."""
        self._combiner.refresh()  # then moving statistics are the same, too
        self._said.declare()
        own, read = self._own(statistics=True), self._staging.take_read()
        parts = self._said(_encoded(own, read))
        self._compared = self._runtime.exchanges
        self._check(parts, own, when)

    def finish(self) -> None:
        """Compares once more before this rank leaves. Waits a moment only: whoever comes last knows what all had."""
        runtime = self._runtime
        if runtime.exchange.failure is not None or not self._said.declared or not runtime.settle(_PATIENCE_S):
            return
        if runtime.exchange.failure is not None or runtime.exchanges == self._compared:
            return
        own, replies = self._own(statistics=False), queue.SimpleQueue[Reply]()
        # Not by `AllGather.push`, for which closing would wait: the others may never say it.
        runtime.exchange.push(self._said.declare(), _encoded(own), replies.put)
        with contextlib.suppress(queue.Empty):
            reply = replies.get(timeout=_PATIENCE_S)
            if isinstance(reply.error, MismatchError):  # another rank compared first
                raise reply.error
            if reply.error is None:
                self._check(reply.parts or {}, own, "when the strategy was closed")

    def _own(self, *, statistics: bool) -> dict[int, tuple[Variable, int]]:
        """Returns this rank's variables with what stands for their value; `statistics`: with what has been combined."""
        found = {}
        with tf.init_scope():
            for number, reference in enumerate(self._initial_values.agreed):
                variable = reference()
                if not isinstance(variable, GatedVariable) or variable.dtype in (tf.string, tf.resource, tf.variant):
                    continue  # gone, or what each replica has for itself
                if (variable.local and not statistics) or ACCUMULATOR in variable.name:
                    continue
                variable.wait()
                found[number] = variable, fingerprint(variable._values[0].numpy())
        return found

    def _check(self, parts: Mapping[int, Buffer], own: dict[int, tuple[Variable, int]], when: str) -> None:
        pairs = [np.frombuffer(part, np.int64).reshape(-1, 2).T.tolist() for part in parts.values()]
        ranks = [dict(zip(numbers, values, strict=True)) for numbers, values in pairs]
        # What the ranks have read has negative numbers; others mean that they have not the same data sets.
        read = [sorted((number for number in rank if number < 0), reverse=True) for rank in ranks]
        common = [number for number in own if all(number in rank for rank in ranks)]
        different = [number for number in common if len({rank[number] for rank in ranks}) > 1]
        try:
            for number in read[0] if all(each == read[0] for each in read) else ():
                batch_digests.check(np.array([rank[number] for rank in ranks], np.int64))
            if different:
                first = min(different, key=lambda number: (own[number][0].shape.rank > 0, number))  # others follow it
                numbers = [rank[first] for rank in ranks]
                raise MismatchError(_difference(own[first][0], numbers, list(parts), len(different) - 1, when))
        except MismatchError as error:
            self._runtime.exchange.fail(error)
            raise


def _encoded(own: dict[int, tuple[Variable, int]], digests: Sequence[int] = ()) -> Array:
    pairs = [(number, value) for number, (_, value) in own.items()]
    return np.array([*pairs, *((-1 - index, digest) for index, digest in enumerate(digests))], np.int64).reshape(-1)


def _difference(variable: Variable, numbers: Sequence[int], ranks: Sequence[int], more: int, when: str) -> str:
    values, dtype = np.array(numbers, np.int64), variable.dtype
    if variable.shape.rank == 0 and (dtype.is_floating or dtype.is_integer):
        what = by_value(values.view(np.float64) if dtype.is_floating else values, decimal, ranks)
    else:
        what = by_value(values, lambda value: f"checksum {hexadecimal(value)}", ranks)
    others = f" ({more} more variables differ)" if more else ""
    return (
        f"the workers are no longer alike {when}: {own_name(variable)} is {what}{others}. What is changed between "
        "steps (callbacks, assign, set_weights, load_weights, a learning rate, drawing from a SeedGenerator) must be "
        "changed on every rank alike. Config(check_every=0) or TFPS_CHECK_EVERY=0 turns this check off"
    )
