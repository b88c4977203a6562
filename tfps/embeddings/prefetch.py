"""Rows of the next batch, asked for while the step before it computes.

A batch is staged before its step runs, so its ids are known: owners send the rows that the step before does not touch
at once, and the others when it has been applied. A step whose lookups are not those that were prefetched asks by
itself, so whatever is prefetched wrongly costs time, not correctness.

Tested in tests/embeddings/test_prefetch.py.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from tfps.exchange.interface import Wait
from tfps.exchange.requests import Ids

_MOST_BATCHES = 8  # that are staged; older ones are of other loops


class Prefetcher:
    """The batches of one table that have been staged, and what was prefetched of them. Any thread.

    `prefetch` asks for rows of a step; None: it does not.
    """

    def __init__(self, prefetch: Callable[[Ids, int], Wait | None]) -> None:
        self._prefetch = prefetch
        self._lock = threading.Lock()  # guards all below
        self._batches: deque[Sequence[Ids]] = deque(maxlen=_MOST_BATCHES)  # by lookup
        self._prefetched: list[tuple[Ids, Wait]] = []
        self._step: int | None = None  # for which that was
        self._waits: int | None = None  # a step whose batch has not been staged yet

    def staged(self, batch: Sequence[Ids]) -> None:
        """A batch has been staged that has these lookups."""
        with self._lock:
            step, self._waits = self._waits, None
            if step is None:
                self._batches.append(batch)
            else:
                self._request(batch, step)

    def take(self, ids: Ids, step: int) -> Wait | None:
        """What was prefetched for a lookup of `step`, once; None if it was not."""
        with self._lock:
            for place, (own, request) in enumerate(self._prefetched if step == self._step else ()):
                if np.array_equal(own, ids):
                    del self._prefetched[place]
                    return request
        return None

    def began(self, step: int, ids: Ids | None) -> None:
        """All lookups of `step` have come, among them one of `ids` that had not been prefetched; asks for the next."""
        with self._lock:
            self._prefetched, self._step = [], None
            if ids is not None:
                own = next((each for each in self._batches if any(np.array_equal(ids, one) for one in each)), None)
                if own is None and self._batches:
                    return  # these are of other steps
                while own is not None and self._batches.popleft() is not own:
                    pass
            if self._batches:
                self._request(self._batches.popleft(), step + 1)
            else:
                self._waits = step + 1

    def clear(self) -> None:
        """Rows have been replaced: what was prefetched does not count."""
        with self._lock:
            self._batches.clear()
            self._prefetched, self._step, self._waits = [], None, None

    def _request(self, batch: Sequence[Ids], step: int) -> None:
        requests = [(ids, self._prefetch(ids, step)) for ids in batch]
        self._prefetched = [(ids, request) for ids, request in requests if request is not None]
        self._step = step
