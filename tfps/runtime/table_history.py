"""What this worker has exchanged of a table in its last steps, for `Strategy.report`.

Tested in tests/runtime/test_table_history.py.
"""

from __future__ import annotations

import statistics
import threading
from dataclasses import dataclass, field

from tfps.exchange.codecs import ITEM_BYTES, Codec, sent_bytes
from tfps.trace.step_times import Interval, Intervals, total, union

_STEPS = 17  # that are kept; reports are about one fewer, from one to the next


@dataclass(frozen=True, slots=True)
class TableRows:
    """What this worker exchanges of one table in a step: medians over the last ones.

    Attributes:
        rows: that a step asks for, each once.
        gradient_rows: with gradients.
        received_bytes: of the rows that come.
        sent_bytes: of their gradients as they are on the wire, without ids.
        wait_s: how long lookups waited for rows; those of several tables wait at the same time.
    """

    name: str
    rows: int
    gradient_rows: int
    received_bytes: int
    sent_bytes: int
    wait_s: float


@dataclass(slots=True)
class _Step:
    """What has been exchanged in one step."""

    rows: int = 0
    gradient_rows: int = 0
    added_ns: int = 0  # when its gradients were ready; 0: not yet
    waits: list[Interval] = field(default_factory=list)  # of its lookups, until they had their rows


class TableHistory:
    """The last steps of one table on this worker; any thread. Times are those of `time.monotonic_ns`."""

    def __init__(self, name: str, dim: int, codec: Codec | None) -> None:
        self.name, self.row_bytes, self._codec = name, ITEM_BYTES * dim, codec
        self._lock = threading.Lock()  # guards what is below, also each step
        self._steps: dict[int, _Step] = {}  # by number, the oldest first

    def looked_up(self, step: int, rows: int, begin_ns: int, end_ns: int) -> None:
        """A lookup of `step`, whose gradients are to come, has waited for so many rows."""
        with self._lock:
            found = self._step(step)
            found.rows += rows
            found.waits.append((begin_ns, end_ns))

    def added(self, step: int, rows: int, at_ns: int) -> None:
        """The gradients of `step` are ready."""
        with self._lock:
            found = self._step(step)
            found.gradient_rows, found.added_ns = rows, at_ns

    def _step(self, step: int) -> _Step:
        if step not in self._steps:
            while len(self._steps) >= _STEPS:
                del self._steps[next(iter(self._steps))]
            self._steps[step] = _Step()
        return self._steps[step]

    def waits(self) -> Intervals:
        """When at least one lookup waited."""
        with self._lock:
            return union(wait for step in self._steps.values() for wait in step.waits)

    def times(self, step: int) -> Interval | None:
        """From the first lookup of a step to its gradients; None: these are not known."""
        with self._lock:
            found = self._steps.get(step)
            if found is None or not found.waits or not found.added_ns:
                return None
            return min(begin_ns for begin_ns, _ in found.waits), found.added_ns

    def ends_s(self) -> list[float]:
        """When the gradients of each step were ready."""
        with self._lock:
            return sorted(step.added_ns / 1e9 for step in self._steps.values() if step.added_ns)

    def use(self) -> TableRows | None:
        """None: no step has looked up rows and added gradients."""
        with self._lock:
            steps = [
                (step.rows, step.gradient_rows, total(union(step.waits)))
                for step in self._steps.values()
                if step.added_ns and step.waits
            ]
        if not steps:
            return None
        rows, gradient_rows, wait_ns = (statistics.median(each) for each in zip(*steps, strict=True))
        received = self.row_bytes * round(rows)
        sent = sent_bytes(self._codec, self.row_bytes * round(gradient_rows))
        return TableRows(self.name, round(rows), round(gradient_rows), received, sent, wait_ns / 1e9)
