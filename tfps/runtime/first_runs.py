"""When parts of a function ran for the first time with some sizes, which is when XLA compiled them; and telling others.

Tested in tests/runtime/test_first_runs.py and tests/strategy/test_xla.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import tensorflow as tf

from tfps.errors import TfpsError
from tfps.exchange.interface import BucketSpec
from tfps.runtime.transfers import UNDECLARED, Transfer
from tfps.trace.capture import CapturedPart
from tfps.trace.step_times import Interval, total, union
from tfps.types import Variable

_NOTHING = BucketSpec(("first runs",), "gather", 0, "uint8", 0)
SHORT_S = 1.0  # what takes less is not told: others say after 5 s for whom they wait
Sizes = tuple[int, ...]


class Compiling:
    """Tells pservers while this worker compiles something for long, so that those who wait for it can say so.

    `tell` is called with what is the case now, on a thread of its own, as it may block.
    """

    def __init__(self, tell: Callable[[bool], object], limit_s: float) -> None:
        self._tell, self._limit_s = tell, limit_s
        self._changed = threading.Condition()  # guards both
        self._runs: set[int] = set()  # under way
        self._thread: threading.Thread | None = None

    def began(self, run: int) -> None:
        with self._changed:
            self._runs.add(run)
            if self._thread is None:
                self._thread = threading.Thread(target=self._say, name="tfps-compiling", daemon=True)
                self._thread.start()

    def ended(self, run: int) -> None:
        with self._changed:
            self._runs.discard(run)
            self._changed.notify_all()

    def _say(self) -> None:
        with self._changed:
            over = self._changed.wait_for(lambda: not self._runs, SHORT_S)
            if over:
                self._thread = None
                return
        with contextlib.suppress(TfpsError):  # the job has ended
            self._tell(True)
        with self._changed:
            # A run that failed does not end; nobody waits for longer than the limit.
            self._changed.wait_for(lambda: not self._runs, self._limit_s)
            self._runs.clear()
            self._thread = None
        with contextlib.suppress(TfpsError):
            self._tell(False)


class FirstRuns(Transfer):
    """The messages of one graph about such runs; see graph/first_runs.py."""

    exchanges = False

    def __init__(
        self,
        compiling: Compiling,
        on_new: Callable[[], object],
        record: Callable[[Sequence[tuple[float, float]]], object] = lambda times: None,  # of each recorded run, seconds
    ) -> None:
        super().__init__(UNDECLARED, _NOTHING)
        self._compiling, self._on_new, self._record = compiling, on_new, record
        self.sizes: list[Sizes] = []  # that have come, in this order
        # Of the first run with each size that has ended, of each part, from when it had what it needs to its end: ns of
        # the wall clock.
        self.runs: list[Sequence[Interval]] = []
        self._under_way: set[int] = set()  # numbers of runs with new sizes
        self.last: Variable | None = None  # sizes of the last run: the graph's, which lives as long as this

    @property
    def seconds(self) -> float:
        """How long parts ran for the first time, together; several at a time count once."""
        return sum(total(union(run)) for run in list(self.runs)) / 1e9

    def seconds_of(self, part: int) -> float:
        """How long one part did."""
        return sum(end - begin for begin, end in (run[part] for run in list(self.runs))) / 1e9

    def collect(self, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor, times: tf.Tensor, /) -> None:
        run, noted = int(graph_run), times.numpy()
        if not noted.size:
            sizes = tuple(data.numpy().view(np.int64).tolist())
            if sizes not in self.sizes:  # others are known: they only differ from the last run's, or are recorded
                self.sizes.append(sizes)
                self._under_way.add(run)
                self._compiling.began(run)
                self._on_new()
            return
        self._record(noted.reshape(-1, 2).tolist())
        if run in self._under_way:
            self._under_way.remove(run)
            self._compiling.ended(run)
            pairs = np.rint(noted.reshape(-1, 2) * 1e9).astype(np.int64).tolist()
            self.runs.append([(begin, max(begin, end)) for begin, end in pairs])


class KnownParts:
    """The parts of functions that train, for captures. Ranks run one program, so they number them alike."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[int, FirstRuns, Sequence[CapturedPart]]] = {}  # with its first number
        self._count = 0

    def add(self, function: str, runs: FirstRuns, parts: Sequence[CapturedPart]) -> int:
        """Returns the number of the first one; a function that is traced again keeps its numbers."""
        key = function, len(parts)
        first = self._known[key][0] if key in self._known else self._count
        self._count = max(self._count, first + len(parts))
        self._known[key] = first, runs, parts
        return first

    def captured(self) -> tuple[CapturedPart, ...]:
        """All of them by number, with how long they took to compile so far."""
        return tuple(
            replace(part, compile_s=runs.seconds_of(place))
            for _, runs, parts in list(self._known.values())
            for place, part in enumerate(parts)
        )
