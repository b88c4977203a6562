"""Counts of a pserver: numbers that ranks draw, and errors.

Tested in tests/pserver/test_job.py and tests/pserver/test_metrics.py.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tfps.errors import ProtocolError
from tfps.membership.view import View
from tfps.protos import tfps_pb2 as pb

_MAX_COUNTERS = 1024  # of which those drawn from last are kept; a loop over a dataset takes one
_MAX_NAME = 256


@dataclass
class _Counter:
    firsts: dict[int, int]  # of ranks that have no number yet
    following: int
    told: dict[int, list[int]] = field(default_factory=dict)  # by rank, the last numbers that it has drawn elsewhere
    lost: list[int] = field(default_factory=list)  # that nobody has drawn who is there, ascending


class Counters:
    """Numbers that ranks draw, each once: each rank's first is its place in the view, then they count up from there."""

    def __init__(self, view: Callable[[], View]) -> None:
        self._view, self._lock = view, threading.Lock()
        self._counters: dict[str, _Counter] = {}  # by name, in the order of last use

    def fetch_add(self, name: str, rank: int) -> int:
        with self._lock:
            counter = self._of(name, rank)
            if counter.told:
                self._find_lost(counter)
            if counter.lost:
                return counter.lost.pop(0)
            number = counter.firsts.pop(rank, counter.following)
            counter.following += number == counter.following
            return number

    def follow(self, name: str, rank: int, count: int) -> None:
        """Goes on behind number `count` - 1, which `rank` has drawn on a pserver that is lost, its first one before.

        Each rank tells its last numbers before any draws again: another one, which the pserver had given to a rank
        that did not get it, is drawn next.
        """
        with self._lock:
            counter = self._of(name, rank)
            counter.firsts.pop(rank, None)
            counter.following = max(counter.following, count)
            counter.told.setdefault(rank, []).append(count - 1)

    def _find_lost(self, counter: _Counter) -> None:
        view, told = self._view(), counter.told
        known = {*counter.firsts.values(), *(number for numbers in told.values() for number in numbers)}
        begin, counter.told = max(map(min, told.values())), {}  # some rank does not tell what it has drawn before
        if len(view.ranks) == view.workers:  # else a lost worker may have it
            counter.lost = [number for number in range(begin, counter.following) if number not in known]

    def _of(self, name: str, rank: int) -> _Counter:
        """A counter, which becomes the one that was used last."""
        view = self._view()
        if rank not in view.ranks or len(name) > _MAX_NAME:
            raise ProtocolError(
                f"a number must be drawn by one of the {len(view.ranks)} ranks, from a counter whose name has at "
                f"most {_MAX_NAME} characters, got rank {rank} and {len(name)} characters"
            )
        new = _Counter({r: place for place, r in enumerate(view.ranks)}, len(view.ranks))
        found = self._counters.pop(name, new)
        if len(self._counters) == _MAX_COUNTERS:
            del self._counters[next(iter(self._counters))]
        self._counters[name] = found
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
