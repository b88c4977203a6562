"""The buckets that one strategy's connection has declared, by key.

Tested in tests/runtime/test_interrupts.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence

from tfps.exchange.interface import BucketSpec, Exchange
from tfps.runtime.interrupts import wait
from tfps.threads import sheltered
from tfps.trace.capture import CapturedBucket

Key = str | tuple[Hashable, ...]  # names one bucket of this process


class DeclaredBuckets:
    """Declares each key once. Thread-safe."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._declaring = threading.Lock()  # guards writes to all below
        self._ids: dict[Key, int] = {}
        self._declared: dict[int, tuple[Key, BucketSpec]] = {}  # by id
        self._later: list[tuple[Key, BucketSpec]] = []  # to declare with the next new ones
        self.before: Callable[[BucketSpec], None] | None = None  # called before new ones are, but for those of updates

    def ids(self, wanted: Sequence[tuple[Key, BucketSpec]], details: Sequence[str] = ()) -> list[int]:
        """Returns the ids of `wanted`, pairs of a key and the spec to declare if the key is new.

        May be interrupted (Ctrl-C) on any rank and called again: either all ranks have declared the new keys, and the
        next call knows them, or none has.

        Raises:
            MismatchError: the ranks disagree.
            WaitTimeoutError: a rank did not declare in time.
        """
        new = [spec for key, spec in wanted if key not in self._ids]
        if new:
            for spec in new:
                if spec.occasional and self.before is not None:
                    self.before(spec)
            sheltered(lambda stop: self._declare(wanted, details, stop), wait)
        return [self._ids[key] for key, _ in wanted]

    def _declare(self, wanted: Sequence[tuple[Key, BucketSpec]], details: Sequence[str], stop: threading.Event) -> None:
        with self._declaring:
            # Wanted keys may be among the later ones.
            new = {key: spec for key, spec in dict([*self._later, *wanted]).items() if key not in self._ids}
            if not any(key in new for key, _ in wanted):
                return  # declared by an interrupted call that has only just ended
            ids = self._exchange.declare(list(new.values()), details, stop)
            self._declared.update(zip(ids, new.items(), strict=True))
            self._ids.update(zip(new, ids, strict=True))
            self._later.clear()

    def later(self, key: Key, spec: BucketSpec) -> None:
        """Declares a bucket together with the next new ones, so it costs no extra wait."""
        with self._declaring:
            self._later.append((key, spec))

    def has(self, key: Key) -> bool:
        """Whether `key` has been declared."""
        return key in self._ids

    def spec(self, bucket: int) -> BucketSpec:
        """Returns the declared spec."""
        return self._declared[bucket][1]

    def known(self) -> list[CapturedBucket]:
        """Returns all buckets by id, as a capture describes them."""
        declared, found = dict(self._declared), []
        for bucket in range(len(declared)):
            key, spec = declared[bucket]
            variables = spec.names if key[0] == "update" else ()
            found.append(CapturedBucket(spec.name, variables, spec.priority, spec.nbytes))
        return found
