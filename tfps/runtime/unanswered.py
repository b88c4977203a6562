"""Pushes that have not been answered yet, and what waits for them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable


class Unanswered:
    """Pushes under way. Any thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards what follows
        self._pushes: set[int] = set()
        self._waiting: list[tuple[set[int], Callable[[], object]]] = []  # for these

    def begin(self) -> int:
        """One more; returns its number."""
        with self._lock:
            number = next(self._numbers)
            self._pushes.add(number)
            return number

    def answered(self, number: int) -> None:
        with self._lock:
            self._pushes.discard(number)
            for pushes, _ in self._waiting:
                pushes.discard(number)
            ready = [call for pushes, call in self._waiting if not pushes]
            self._waiting = [each for each in self._waiting if each[0]]
        for call in ready:
            call()

    def then(self, call: Callable[[], object]) -> None:
        """Calls `call` once all pushes that have begun are answered, on any thread; at once if they are."""
        with self._lock:
            if self._pushes:
                self._waiting.append((set(self._pushes), call))
                return
        call()
