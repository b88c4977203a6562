"""Variables that pservers update: where their values and slots are, and what goes there with a push.

Before a push, what its bucket lacks is written there: by rank 0. The others tell with their scalars whether their
program has assigned the same. docs/design.md ("Update on the server") says more.

Tested in tests/policies/test_remote_bucket.py.
"""

from __future__ import annotations

import abc
import itertools
import math
import struct
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfps.errors import UnsupportedError
from tfps.exchange.interface import BucketSpec, Exchange
from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.runtime.transfers import DeferredUpdate, Group, Pushed
from tfps.types import Array, Function, Json, Value, Variable

_NO_BYTES = np.empty(0, np.uint8)
_WHICH = struct.Struct("<II")
RULES = itertools.count(1)  # numbers of rules
_ASSIGNED = 2**32  # in a mark: it is not 0, whatever the checksum


class Ahead(NamedTuple):
    """The pservers' own value of a variable where workers have another."""

    exact: NDArray[np.float32]  # flat
    shadow: int  # checksum of the workers' value that belongs to it


class RemoteParameter:
    """Where the current value of a variable is."""

    __slots__ = ("ahead", "begin", "holder", "restored", "slots", "synchronized")

    def __init__(self) -> None:
        # The bucket whose pservers have it; None: only the workers do, as after an assignment.
        self.holder: int | None = None
        self.begin = 0  # its first byte there
        self.ahead = False  # whether the pservers there may have another value than the workers
        self.synchronized = False  # whether all ranks have had its latest value since the last push; for mode "async"
        self.restored: Ahead | None = None  # from a checkpoint, for the next push
        self.slots: list[RemoteSlot] = []  # that optimizers have there for it

    def exact(self, exchange: Exchange, shadow: Array) -> Array | None:
        """The pservers' own value, flat uint8, if workers may have another one: `shadow`, the same way."""
        if self.restored is not None and self.restored.shadow == zlib.crc32(shadow.data):
            return self.restored.exact.view(np.uint8)
        if self.holder is None or not self.ahead:
            return None
        return exchange.state.read(self.holder, 0, self.begin, len(shadow))

    def read_ahead(self, exchange: Exchange, component: Variable) -> Ahead | None:
        """The pservers' own value for a checkpoint; None if they have that of the `component`, which is current."""
        shadow = value_of(component)
        exact = self.exact(exchange, shadow)
        return None if exact is None else Ahead(exact.view(np.float32), zlib.crc32(shadow.data))

    def place(self, arrays: dict[str, Array], name: str) -> Json:
        """Where the value is, for a worker that joins; what no pserver has goes to `arrays` by `name`."""
        if self.restored is not None:
            arrays[name] = self.restored.exact
        mark = None if self.restored is None else self.restored.shadow
        return [self.holder, self.begin, self.ahead, self.synchronized, mark]

    def move(self, place: Json, arrays: Mapping[str, Array], name: str) -> None:
        """Knows what another worker, or this one before, has said with `place`."""
        self.holder, self.begin, self.ahead, self.synchronized, mark = place
        self.restored = None if mark is None else Ahead(arrays[name], mark)


class RemoteSlot:
    """A slot of one variable, `name` in messages, that lives on pservers; at first all its items are `initial`.

    `wait` returns when the variable is current, after updates under way.
    """

    def __init__(
        self, name: str, exchange: Exchange, wait: Callable[[], object], shape: Sequence[int], initial: float
    ) -> None:
        self.name, self.shape, self.initial = name, tuple(shape), initial
        # Where it is: a bucket, the number of the slot there, and its first byte; None: nowhere yet.
        self.home: tuple[int, int, int] | None = None
        self.pending: NDArray[np.float32] | None = None  # was assigned and has not been written yet
        # Whether ranks compare what is written; not at first, nor what all of them take from rank 0.
        self.compared = False
        self._exchange, self._wait = exchange, wait

    def read(self) -> NDArray[np.float32]:
        """The current value, collected from the pservers; other ranks need not take part."""
        self._wait()
        return self.collect().view(np.float32).reshape(self.shape) if self.pending is None else self.pending.copy()

    def assign(self, value: Array) -> None:
        """Takes a value, which goes to the pservers with the next push; every rank must assign the same."""
        self._wait()
        self.pending = np.array(value, np.float32).reshape(self.shape)

    def from_first_rank(self) -> None:
        """Rank 0's value counts for all ranks, whatever others have assigned."""
        self.compared = False
        if not is_first(self._exchange):
            self.pending = None

    def offered(self) -> NDArray[np.float32]:
        """What was assigned and not written yet, flat; empty if nothing was."""
        return np.zeros(0, np.float32) if self.pending is None else self.pending.reshape(-1)

    def take(self, value: NDArray[np.float32]) -> None:
        """Takes what rank 0 has `offered`."""
        self.pending = value.reshape(self.shape).copy() if value.size else None

    def place(self, arrays: dict[str, Array], name: str) -> Json:
        """As `RemoteParameter.place`."""
        if self.pending is not None:
            arrays[name] = self.pending
        return [self.home, self.pending is not None, self.compared]

    def move(self, place: Json, arrays: Mapping[str, Array], name: str) -> None:
        """As `RemoteParameter.move`."""
        home, assigned, self.compared = place
        self.home, self.pending = home and tuple(home), arrays[name] if assigned else None

    def collect(self) -> Array:
        """What the pservers have, flat uint8."""
        items = math.prod(self.shape)
        if self.home is None:
            return np.full(items, self.initial, np.float32).view(np.uint8)
        return self._exchange.state.read(*self.home, 4 * items)


class RemoteRule(abc.ABC):
    """How pservers update the variables of one optimizer. An `update` of a variable with it must be deferred."""

    number: int  # differs from those of all other rules of this process
    bucket: Function  # makes its buckets: `RemoteBucket`

    @abc.abstractmethod
    def spec(self, variables: Sequence[Variable]) -> UpdateSpec:
        """Of a bucket of these variables, with the optimizer's settings of now."""

    @abc.abstractmethod
    def slots(self, variable: Variable) -> Sequence[RemoteSlot]:
        """The slots of `variable`, in the order of the spec."""

    def replied(self, bucket: int) -> None:  # noqa: B027  # most rules need nothing
        """Called before the reply to a push of `bucket` is assigned."""

    def __call__(self, variable: Variable, *_: Value) -> None:
        raise UnsupportedError(f"variable {variable.name!r} is updated by pservers, not by this worker")


@dataclass(eq=False)
class RemotePiece:
    """One variable in a bucket."""

    parameter: RemoteParameter
    component: Variable  # the first local replica's
    slots: Sequence[RemoteSlot]
    begin: int  # its first byte in the bucket


def pieces_of(variables: Sequence[Variable], rule: RemoteRule) -> list[RemotePiece]:
    pieces, begin = [], 0
    for variable in variables:
        pieces.append(RemotePiece(variable.remote, variable._values[0], rule.slots(variable), begin))
        begin += 4 * int(variable.shape.num_elements())
    return pieces


def is_first(exchange: Exchange) -> bool:
    """Whether this worker is the first of those that take part: it writes what all have assigned."""
    return exchange.view.ranks[0] == exchange.rank and not exchange.joining.pending


def value_of(component: Variable) -> Array:
    """The current value of a component, flat uint8, maybe without a copy."""
    return np.ascontiguousarray(component.numpy()).reshape(-1).view(np.uint8)


def bring(
    exchange: Exchange,
    bucket: int,
    pieces: Sequence[RemotePiece],
    scalars: Sequence[float],
    *,
    ahead: bool = False,  # whether changes come back, so that pservers may be ahead of workers
    apart: bool,  # whether ranks step by themselves (mode "async")
) -> bytes:
    """Writes what `bucket` lacks, right before a push of it; returns the push's scalars."""
    first, mark = is_first(exchange), 0
    writes: list[tuple[int, int, Array]] = []
    for index, piece in enumerate(pieces):
        parameter = piece.parameter
        if apart and parameter.holder not in (None, bucket) and not parameter.synchronized:
            raise UnsupportedError(
                f"variable {piece.component.name!r} comes in another bucket than in the last step, as in a function "
                "that trains other variables; with mode='async' call strategy.synchronize() on every rank in between, "
                "or use mode='sync'"
            )
        if parameter.holder != bucket or parameter.restored is not None:
            values = value_of(piece.component)
            exact = parameter.exact(exchange, values) if first else None
            writes.append((0, piece.begin, values if exact is None else exact))
            if exact is not None and ahead:
                writes.append((len(piece.slots) + 1, piece.begin, values))
            if parameter.holder is None:
                mark = _marked(mark, index, 0, values)
            elif parameter.holder != bucket:
                # Mode "async": a bucket that had others, or none, takes no gradient before all ranks bring these.
                mark |= _ASSIGNED
        for number, slot in enumerate(piece.slots, 1):
            if slot.pending is not None:
                values = slot.pending.reshape(-1).view(np.uint8)
                writes.append((number, piece.begin, values))
                if slot.compared:
                    mark = _marked(mark, index, number, values)
            elif first and slot.home not in (None, (bucket, number, piece.begin)):
                writes.append((number, piece.begin, slot.collect()))
    if first:
        _write(exchange, bucket, writes)
    for piece in pieces:  # not earlier: after an interruption the next step brings all of it again
        parameter = piece.parameter
        parameter.holder, parameter.begin, parameter.ahead, parameter.restored = bucket, piece.begin, ahead, None
        parameter.synchronized = False
        for number, slot in enumerate(piece.slots, 1):
            slot.home, slot.pending, slot.compared = (bucket, number, piece.begin), None, True
    return StepScalars(mark, tuple(scalars), wrote=first and bool(mark)).pack()


def _marked(mark: int, index: int, number: int, values: Array) -> int:
    return _ASSIGNED | zlib.crc32(values.data, zlib.crc32(_WHICH.pack(index, number), mark & (_ASSIGNED - 1)))


def _write(exchange: Exchange, bucket: int, writes: list[tuple[int, int, Array]]) -> None:
    """Writes parts of arrays, (number, begin, values); neighbors together."""
    runs: list[tuple[int, int, list[Array]]] = []
    end = -1, -1
    for number, begin, values in sorted(writes, key=lambda write: write[:2]):
        if (number, begin) != end:
            runs.append((number, begin, []))
        runs[-1][2].append(values)
        end = number, begin + len(values)
    for number, begin, parts in runs:
        exchange.state.write(bucket, number, begin, parts[0] if len(parts) == 1 else np.concatenate(parts))


class RemoteUpdate(DeferredUpdate):
    """Takes the new parameters of a bucket from its pservers, or their change. The messages' indices are step scalars.

    `brings` is `bring` with all but the scalars; `replied`: see `RemoteRule`.
    """

    def __init__(
        self,
        bucket: int,
        spec: BucketSpec,
        messages: int,
        group: Group,
        brings: Callable[[Sequence[float]], bytes],
        replied: weakref.WeakMethod[Callable[[int], None]],
    ) -> None:
        super().__init__(bucket, spec, messages, group)
        self._brings, self._replied = brings, replied

    def collect(self, *message: tf.Tensor) -> Pushed | None:
        if (collected := super().collect(*message)) is None:
            return None
        number, data, indices = collected
        self.step_scalars = self._brings(np.frombuffer(memoryview(indices), np.float64).tolist())
        return number, data, _NO_BYTES

    def finish(self, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor) -> None:
        if (replied := self._replied()) is not None:
            replied(self.bucket)
        super().finish(graph_run, data, indices)
