"""Counts of a pserver: numbers that ranks draw, and errors.

Tested in tests/pserver/test_job.py and tests/pserver/test_metrics.py.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from tfps.errors import ProtocolError
from tfps.membership.view import View
from tfps.protos import tfps_pb2 as pb

_MAX_COUNTERS = 1024  # of which those drawn from last are kept; a loop over a dataset takes one
_MAX_NAME = 256


class Counters:
    """Numbers that ranks draw, each once: each rank's first is its place in the view, then they count up from there."""

    def __init__(self, view: Callable[[], View]) -> None:
        self._view, self._lock = view, threading.Lock()
        # By name, in the order of last use: the ranks that have no first yet and those, the next number.
        self._drawn: dict[str, tuple[dict[int, int], int]] = {}

    def fetch_add(self, name: str, rank: int) -> int:
        with self._lock:
            firsts, following = self._of(name, rank)
            number = firsts.pop(rank, following)
            self._drawn[name] = firsts, following + (number == following)
            return number

    def follow(self, name: str, rank: int, count: int) -> None:
        """Goes on after `count` numbers, which `rank` knows to be drawn, its first one among them."""
        with self._lock:
            firsts, following = self._of(name, rank)
            firsts.pop(rank, None)
            self._drawn[name] = firsts, max(following, count)

    def _of(self, name: str, rank: int) -> tuple[dict[int, int], int]:
        """Takes out a counter, which the caller puts back as the one that was used last."""
        view = self._view()
        if rank not in view.ranks or len(name) > _MAX_NAME:
            raise ProtocolError(
                f"a number must be drawn by one of the {len(view.ranks)} ranks, from a counter whose name has at "
                f"most {_MAX_NAME} characters, got rank {rank} and {len(name)} characters"
            )
        new = {r: place for place, r in enumerate(view.ranks)}, len(view.ranks)
        found = self._drawn.pop(name, new)
        if len(self._drawn) == _MAX_COUNTERS:
            del self._drawn[next(iter(self._drawn))]
        return found


class ErrorCounts:
    """Counts errors by place and class; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _counts
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, where: str, error: Exception) -> None:
        with self._lock:
            self._counts[where, type(error).__name__] += 1

    def all(self) -> list[pb.ErrorCount]:
        with self._lock:
            counts = sorted(self._counts.items())
        return [pb.ErrorCount(where=where, error=error, count=count) for (where, error), count in counts]
