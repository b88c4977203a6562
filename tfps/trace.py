"""Records what happens to slices, for tests and for people who ask why a step is slow."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened: `kind`, `time_ns` (monotonic clock, nanoseconds) and free fields."""

    kind: str
    time_ns: int
    fields: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(f"event {self.kind!r} has no field {name!r}, only {sorted(self.fields)}") from None


class Recorder:
    """A ring buffer of events in the order in which they were recorded, whatever thread recorded them.

    Off until `start` is called; callers check `enabled` first, so that a recorder that is off costs one attribute read.
    """

    def __init__(self, capacity: int = 100_000) -> None:
        self.enabled = False
        self._events: deque[Event] = deque(maxlen=capacity)
        self._lock = threading.Lock()  # guards the order of _events

    def start(self) -> None:
        """Forgets earlier events and starts recording."""
        with self._lock:
            self._events.clear()
            self.enabled = True

    def stop(self) -> list[Event]:
        """Stops recording and returns the events."""
        with self._lock:
            self.enabled = False
            return list(self._events)

    def record(self, kind: str, **fields: Any) -> None:
        """Adds an event; callable from any thread."""
        with self._lock:
            if self.enabled:
                self._events.append(Event(kind, time.monotonic_ns(), fields))

    def events(self) -> list[Event]:
        """The events so far, oldest first."""
        with self._lock:
            return list(self._events)
