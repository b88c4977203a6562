"""What all ranks do together outside of the exchange of gradients: sum, gather, broadcast.

A collective is an object with a name. Its first call declares it, unless `declare` or `later` has: ranks whose
declarations differ get an error. Every rank must make the same calls in the same order. A sum of a number is a barrier,
too: it comes when all ranks have given theirs. Numbers that ranks draw without waiting for each other come from a
counter on a pserver, `exchange.peers.fetch_add`.

Tested in tests/collectives/test_collectives.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tfps.exchange.interface import BucketKind, BucketSpec, OnReply, Payload
from tfps.runtime.runtime import Runtime
from tfps.types import Array

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
    """Gives every rank the bytes of all."""

    def __call__(self, own: Payload, tick: Tick | None = None) -> list[bytes]:
        """Returns the bytes of all ranks, in their order; `tick`: see `Runtime.exchange_now`.

        Raises:
            TfpsError: another rank did not call it in time, or the exchange failed.
        """
        return [bytes(part) for part in self._runtime.exchange_now(self.declare(), own, tick).parts or []]

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
        payload = None if own is None else np.ascontiguousarray(own, self.dtype)
        found = self._runtime.exchange_now(self.declare(), payload, tick).sum
        return np.asarray(found).view(self.dtype).reshape(self._shape)


class Broadcast(AllGather):
    """Gives every rank the bytes of rank 0, however many these are."""

    def __call__(self, own: Payload, tick: Tick | None = None) -> list[bytes]:
        """Returns rank 0's bytes, in a list; what other ranks give is left out."""
        return super().__call__(own if self._runtime.exchange.rank == 0 else b"", tick)[:1]


class FixedBroadcast(AllReduce):
    """Gives every rank an array of bytes of rank 0, whose size all know."""

    def __init__(self, runtime: Runtime, name: str, nbytes: int, **options: Hashable | Sequence[str]) -> None:
        super().__init__(runtime, name, [nbytes], np.uint8, **options)

    def __call__(self, own: NDArray[np.uint8] | None, tick: Tick | None = None) -> Array:
        """Returns rank 0's bytes; the others give None."""
        return super().__call__(own if self._runtime.exchange.rank == 0 else None, tick)
