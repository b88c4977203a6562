"""The buckets that one strategy's connection has declared, by what they are for.

Tested in tests/runtime/test_interrupts.py.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from tfps.exchange.interface import BucketSpec, Exchange
from tfps.runtime.interrupts import wait
from tfps.threads import sheltered
from tfps.trace.capture import CapturedBucket


class DeclaredBuckets:
    """Declares each key once. Any thread."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._declaring = threading.Lock()  # guards writing to all below
        self._ids: dict[Any, int] = {}
        self._declared: dict[int, tuple[Any, BucketSpec]] = {}  # by id
        self._later: list[tuple[Any, BucketSpec]] = []  # to declare with the next ones

    def ids(self, wanted: Sequence[tuple[Any, BucketSpec]], details: Sequence[str] = ()) -> list[int]:
        """The ids of `wanted`, pairs of a key and what to declare where the key is new.

        It may be interrupted (Ctrl-C) and called again, on any of the ranks: either all of them have declared what is
        new, and it is known the next time, or none has.

        Raises:
            MismatchError: the ranks do not agree.
            WaitTimeoutError: a rank did not come.
        """
        if any(key not in self._ids for key, _ in wanted):
            sheltered(lambda stop: self._declare(wanted, details, stop), wait)
        return [self._ids[key] for key, _ in wanted]

    def _declare(self, wanted: Sequence[tuple[Any, BucketSpec]], details: Sequence[str], stop: threading.Event) -> None:
        with self._declaring:
            # What is declared later may be among what is wanted now.
            new = {key: spec for key, spec in dict([*self._later, *wanted]).items() if key not in self._ids}
            if not any(key in new for key, _ in wanted):
                return  # by a call that was interrupted and has ended only now
            ids = self._exchange.declare(list(new.values()), details, stop)
            self._declared.update(zip(ids, new.items(), strict=True))
            self._ids.update(zip(new, ids, strict=True))
            self._later.clear()

    def later(self, key: Any, spec: BucketSpec) -> None:
        """Declares a bucket together with the next new ones, so that it costs no wait of its own."""
        with self._declaring:
            self._later.append((key, spec))

    def spec(self, bucket: int) -> BucketSpec:
        """As declared."""
        return self._declared[bucket][1]

    def known(self) -> list[CapturedBucket]:
        """All of them by id, as a capture names them."""
        declared, found = dict(self._declared), []
        for bucket in range(len(declared)):
            key, spec = declared[bucket]
            variables = spec.names if key[0] == "update" else ()
            found.append(CapturedBucket(spec.name, variables, spec.priority, spec.nbytes))
        return found
