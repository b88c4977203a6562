"""What all ranks do together outside of the exchange of gradients: sum, gather, broadcast.

A collective is an object with a name. Its first call declares it, unless `declare` or `later` has: ranks whose
declarations differ get an error. Every rank must make the same calls in the same order. A sum of a number is a barrier,
too: it comes when all ranks have given theirs. Numbers that ranks draw without waiting for each other come from a
counter on a pserver, `exchange.peers.fetch_add`.

Tested in tests/collectives/test_collectives.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tfps.errors import WorkerLostError
from tfps.exchange.interface import BucketSpec, OnReply, Payload
from tfps.exchange.kinds import BucketKind
from tfps.runtime.runtime import Runtime
from tfps.types import Array

_T = TypeVar("_T")
Tick = Callable[[float], object]  # see Runtime.exchange_now


class _Collective:
    """A bucket by itself.

    Args:
        name: for errors and captures.
        key: names it in this process; default: `name`.
        alike: the name without numbers that are counted per process; default: `name`.
        details: what else all ranks must have alike, for errors.
        priority: of its messages; 0 is the most urgent.
    """

    kind: BucketKind = "gather"

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        *,
        nbytes: int = 0,
        dtype: str = "uint8",
        key: Hashable = None,
        alike: str = "",
        details: Sequence[str] = (),
        priority: int = 0,
    ) -> None:
        self._runtime, self._details = runtime, details
        self.spec = BucketSpec((name,), self.kind, nbytes, dtype, priority, occasional=True, alike=(alike or name,))
        self._key = ("collective", name if key is None else key)

    def declare(self) -> int:
        """Declares it, and returns its bucket.

        Raises:
            MismatchError: the ranks disagree.
            WaitTimeoutError: a rank did not declare in time.
        """
        return self._runtime.buckets([(self._key, self.spec)], self._details)[0]

    def later(self) -> None:
        """Declares it together with the next new ones, so it costs no extra wait."""
        self._runtime.declare_later(self._key, self.spec)

    @property
    def declared(self) -> bool:
        """Whether it has been declared."""
        return self._runtime.declared.has(self._key)


class AllGather(_Collective):
    """Gives every rank the bytes of all that have not been lost."""

    def __call__(self, own: Payload, tick: Tick | None = None) -> dict[int, bytes]:
        """Returns the bytes of all ranks, by rank, ascending; `tick`: see `Runtime.exchange_now`.

        Raises:
            TfpsError: another rank did not call it in time, or the exchange failed.
        """
        parts = self._runtime.exchange_now(self.declare(), own, tick).parts or {}
        return {rank: bytes(part) for rank, part in parts.items()}

    def push(self, own: Payload, finish: OnReply) -> None:
        """Does not wait: the update executor will call `finish` with the reply, which has the parts of all ranks."""
        self._runtime.submit(self.declare(), own, finish)


class AllReduce(_Collective):
    """Gives every rank the sum of all ranks' arrays, of one shape and dtype."""

    kind = "sum"

    def __init__(
        self, runtime: Runtime, name: str, shape: Sequence[int], dtype: DTypeLike, **options: Hashable | Sequence[str]
    ) -> None:
        self._shape, self.dtype = tuple(shape), np.dtype(dtype)
        nbytes = math.prod(self._shape) * self.dtype.itemsize
        super().__init__(runtime, name, nbytes=nbytes, dtype=self.dtype.name, **options)  # type: ignore[arg-type]

    def __call__(self, own: Array | None, tick: Tick | None = None) -> Array:
        """Returns the sum, where None counts as zeros; `tick`: see `Runtime.exchange_now`.

        Raises:
            TfpsError: another rank did not call it in time, or the exchange failed.
        """
        return self.of_ranks(own, tick)[0]

    def of_ranks(self, own: Array | None, tick: Tick | None = None) -> tuple[Array, Collection[int]]:
        """Like a call; also returns whose arrays are in the sum. A rank that is being lost is in all of it or not."""
        payload = None if own is None else np.ascontiguousarray(own, self.dtype)
        reply = self._runtime.exchange_now(self.declare(), payload, tick)
        return np.asarray(reply.sum).view(self.dtype).reshape(self._shape), reply.ranks


def from_source(runtime: Runtime, ask: Callable[[bool], tuple[_T, Collection[int]]]) -> _T:
    """Asks for what the first rank that is there has; every rank must call it.

    `ask` exchanges once: it gets whether this rank is the source, and returns what came and from which ranks. All ranks
    see the same, so if the source has been lost they all ask again, with the next one.
    """
    for source in runtime.sources:
        found, ranks = ask(source == runtime.exchange.rank)
        if source in ranks:
            runtime.source = source
            return found
    raise WorkerLostError("every rank that was asked for its values has been lost")


class Broadcast:
    """Gives every rank the bytes of the first of `Runtime.sources`, however many these are."""

    def __init__(self, runtime: Runtime, name: str, **options: Hashable | Sequence[str]) -> None:
        self._runtime, self._parts = runtime, AllGather(runtime, name, **options)  # type: ignore[arg-type]
        self.declare = self._parts.declare

    def __call__(self, own: Callable[[], Payload]) -> bytes:
        """Returns the source's `own()`, which other ranks do not call."""

        def ask(is_source: bool) -> tuple[bytes, Collection[int]]:
            parts = self._parts(own() if is_source else b"")
            return b"".join(parts.values()), parts.keys()

        return from_source(self._runtime, ask)


class FixedBroadcast:
    """Gives every rank an array of bytes of the first of `Runtime.sources`, whose size all know."""

    def __init__(self, runtime: Runtime, name: str, nbytes: int, **options: Hashable | Sequence[str]) -> None:
        self._runtime, self._sum = runtime, AllReduce(runtime, name, [nbytes], np.uint8, **options)
        self.declare = self._sum.declare

    def __call__(self, own: Callable[[], NDArray[np.uint8]], tick: Tick | None = None) -> Array:
        """Returns the source's `own()`, which other ranks do not call."""
        return from_source(self._runtime, lambda is_source: self._sum.of_ranks(own() if is_source else None, tick))
