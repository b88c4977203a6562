"""Records what happens to slices, for tests and for people who ask why a step is slow."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tfps.capture import NONE, Kind


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


class RecordedSpan(NamedTuple):
    """A `tfps.capture.Span` as the process it happened in knows it: times are of its own monotonic clock."""

    kind: Kind
    begin_ns: int
    end_ns: int
    step: int = NONE
    bucket: int = NONE
    slice: int = NONE
    variable: int = NONE
    priority: int = NONE
    nbytes: int = NONE
    rank: int = NONE
    pserver: int = NONE


class Recorder:
    """Ring buffers of events and of spans in the order in which they were recorded, whatever thread recorded them.

    Off until `start` is called; callers check `enabled` first, so that a recorder that is off costs one attribute read.
    """

    def __init__(self, capacity: int = 100_000, span_capacity: int = 1_000_000) -> None:
        self.enabled = False
        self._events: deque[Event] = deque(maxlen=capacity)
        self._spans: deque[RecordedSpan] = deque(maxlen=span_capacity)
        self._lock = threading.Lock()  # guards the order of _events

    def start(self) -> None:
        """Forgets earlier events and starts recording."""
        with self._lock:
            self._events.clear()
            self._spans.clear()
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

    def span(self, kind: Kind, begin_ns: int, end_ns: int, **fields: int) -> None:
        """Adds a span of this process, times by `time.monotonic_ns`; callable from any thread."""
        if self.enabled:
            self._spans.append(RecordedSpan(kind, begin_ns, end_ns, **fields))

    def spans(self) -> list[RecordedSpan]:
        """The spans so far, in the order in which they ended up here."""
        with self._lock:
            return list(self._spans.copy())  # at once: appending goes on without the lock

    def events(self) -> list[Event]:
        """The events so far, oldest first."""
        with self._lock:
            return list(self._events)
