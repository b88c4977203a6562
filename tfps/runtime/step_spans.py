"""Turns the timestamps ("notes") that come with sends into a worker's spans of steps.

Notes are wall clock seconds, to the microsecond, 0 if unknown; spans use the recorder's clock.

Tested in tests/runtime/test_trace_run.py and tests/runtime/test_inner_step.py.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfps.exchange.interface import BucketSpec
from tfps.runtime.table_history import TableHistory
from tfps.runtime.transfers import UNDECLARED, DeferredUpdate, Transfer
from tfps.tables.spec import TableSpec
from tfps.trace.recorder import Recorder
from tfps.types import Structure

_WAITED_NS = 20_000  # less is scheduling delay of ops
_STEPS_OPEN = 8  # maximum number of incomplete steps
_COMPARE_NS = 1_000_000_000  # interval between comparisons of the clocks


# A bucket that an inner step may wait for; the number is the position of the variable whose read has a timestamp.
Awaited = tuple[int, BucketSpec, int]


class StepSpans:
    """Records what one worker does while the recorder is on; `sent` is called by the pump thread."""

    def __init__(self, recorder: Recorder, rank: int) -> None:
        self.recorder, self.now = recorder, recorder.clock
        self._span = functools.partial(recorder.span, rank=rank)
        self.counted = 0  # training steps sent, recorded or not; pump thread writes
        self.on_step: Callable[[int], None] | None = None  # called for each of them on the pump thread; must be short
        self.steps: deque[tuple[int, int]] = deque(maxlen=100_000)  # recorded steps: number, begin_ns
        self.reduced = False  # something was reduced outside of a graph
        self.done: dict[int, tuple[int, int]] = {}  # by bucket: step and end of its last update; by tfps-apply
        self.tables: dict[int, TableHistory] = {}  # by bucket; of all steps, recorded or not
        self._only_tables = True  # whether no other gradients have come; this and the next: pump thread only
        self._table_step = -1  # the last one with gradients of a table
        self._offset_ns = 0  # wall clock minus the recorder's
        self._compared_ns = -_COMPARE_NS
        # Of steps with some of their sends, by graph run: when gradients were ready; number, and times of the forward
        # pass, once known. Pump thread only.
        self._open: dict[int, tuple[int, list[int], list[tuple[int, int, int]]]] = {}
        self._rounds: dict[int, int] = {}  # by bucket: its last one that was sent and recorded; pump thread only
        self._until_ns = 0  # the end of the last step
        self._asked_ns = 0  # the first request for a batch outside of a graph
        self._eager_steps = 0

    def wall_offset_ns(self) -> int:
        """Returns the wall clock minus the recorder's, measured at most a second ago."""
        if self.now() - self._compared_ns >= _COMPARE_NS:
            found = []
            for _ in range(5):
                before, wall, after = self.now(), time.time_ns(), self.now()
                found.append((after - before, wall - (before + after) // 2))
            self._offset_ns, self._compared_ns = min(found)[1], self.now()
        return self._offset_ns

    def sent(
        self, transfer: DeferredUpdate, step: int, graph_run: int, nbytes: int, done: tuple[int, int] | None
    ) -> None:
        """Records a message of `transfer` in round `step` of its bucket; `done` is its `self.done` before the send."""
        self._rounds[transfer.bucket] = step
        first, *others = [each.numpy().tolist() for each in transfer.times]  # no TensorFlow ops: they cost more
        ready = self._ns(max(first[0], *(each[0] for each in others)) if others else first[0]) or self.now()
        spec = transfer.spec
        self.ready(ready, transfer.bucket, spec, step, nbytes)
        begin, forward, wanted, opened = map(self._ns, first[1:]) if len(first) > 1 else (0, 0, 0, 0)
        # Notes are ops, so they may be late, never early. The gates were open once the last update ended.
        opened = min(opened, ready, done[1]) if done is not None and done[0] == step - 1 else min(opened, ready)
        if wanted and opened - wanted > _WAITED_NS:
            self.waited(wanted, opened, transfer.bucket, spec, step - 1, transfer.read)
        if graph_run not in self._open:
            while len(self._open) >= _STEPS_OPEN:  # the step was stopped, or recording began in the middle of it
                del self._open[next(iter(self._open))]
            self._open[graph_run] = len(transfer.group), [], []
        expected, gradients, passes = self._open[graph_run]
        gradients.append(ready)
        if transfer.reports_step:
            passes.append((step, begin, forward))
        if len(gradients) == expected:
            del self._open[graph_run]
            if passes:
                self._record(graph_run, *passes[-1], min(gradients), max(gradients))

    def count(self) -> None:
        self._only_tables = False
        self._count()

    def _count(self) -> None:
        self.counted += 1
        if self.on_step is not None:
            self.on_step(self.counted)

    def inner_step(self, graph_run: int, times: Sequence[float], awaited: Sequence[Awaited]) -> None:
        """Records a step of a local mode. The end of the last exchange of a bucket opened its gate, if it did wait."""
        if not times[0]:  # a graph without clock
            return
        ready, begin, forward, *waits = map(self._ns, (times[0], *times[2:]))
        for (bucket, spec, variable), wanted, opened in zip(awaited, waits[::2], waits[1::2], strict=True):
            done, end = self.done.get(bucket, (-1, 0))
            last = self._rounds.get(bucket, done)
            # A gate opens a moment before its update has ended: of the last round that may not be known yet.
            opened = min(opened, ready, max(end, wanted)) if done == last else min(opened, ready)
            if wanted and opened - wanted > _WAITED_NS:
                self.waited(wanted, opened, bucket, spec, last, variable)
        self._record(graph_run, int(times[1]), begin, forward, ready, ready)

    def _record(self, graph_run: int, number: int, begin: int, forward: int, first: int, last: int) -> None:
        """Records the spans of a complete step, which begin no earlier than the previous step ended.

        The run of its graph is the time when that began. `first` and `last`: when gradients were ready.
        """
        asked = max(self._ns(float(np.int64(graph_run).view(np.float64))), self._until_ns)
        forward = min(forward or first, first)
        begin = max(min(begin or asked, forward), self._until_ns)
        forward, end = max(forward, begin), max(last, begin)
        if begin - asked > _WAITED_NS:
            self._span("input", asked, begin, step=number)
        self._step(number, min(self._asked(begin), asked), end)
        self._span("forward", begin, forward, step=number)
        self._span("backward", forward, end, step=number)

    def ready(self, at_ns: int, bucket: int, spec: BucketSpec, step: int, nbytes: int) -> None:
        """Records that a bucket's gradient is ready on the host."""
        self._span("ready", at_ns, at_ns, step=step, bucket=bucket, priority=spec.priority, nbytes=nbytes)

    def waited(self, begin_ns: int, end_ns: int, bucket: int, spec: BucketSpec, step: int, variable: int = -1) -> None:
        """Records a wait of the program for round `step` of a bucket."""
        self._span("gate", begin_ns, end_ns, step=step, bucket=bucket, variable=variable, priority=spec.priority)

    def parts(self, first: int, times: Sequence[tuple[float, float]]) -> None:
        """Records when parts that XLA has compiled ran, as the clock in the graph says; `first`: the number of one."""
        for number, (begin, end) in enumerate(times, first):
            self._span("part", self._ns(begin), max(self._ns(begin), self._ns(end)), slice=number)

    def updated(self, begin_ns: int, end_ns: int, transfer: Transfer, step: int) -> None:
        """Records an update, or a part of one, or the result of a pull."""
        bucket, spec = transfer.bucket, transfer.spec
        if isinstance(transfer, DeferredUpdate):
            self._span("update", begin_ns, end_ns, step=step, bucket=bucket, priority=spec.priority)
        elif transfer.times and (begin := self._ns(transfer.times[0].numpy().item(0))):
            self.waited(begin, end_ns, bucket, spec, step)

    def looked_up(
        self, begin_ns: int, bucket: int, spec: BucketSpec, step: int, rows: int, *, trains: bool = True
    ) -> None:
        """Notes that `step` of a table has so many rows now, which the program has waited for since `begin_ns`."""
        table, end_ns = self._table(bucket, spec), self.now()
        if trains:
            table.looked_up(step, rows, begin_ns, end_ns)
        nbytes = table.row_bytes * rows
        self._span("lookup", begin_ns, end_ns, step=step, bucket=bucket, priority=spec.priority, nbytes=nbytes)

    def added(self, bucket: int, spec: BucketSpec, step: int, rows: int, *, in_graph: bool = True) -> None:
        """Notes that gradients of so many rows of a table are ready on the host."""
        table, now_ns = self._table(bucket, spec), self.now()
        table.added(step, rows, now_ns)
        self.ready(now_ns, bucket, spec, step, table.row_bytes * rows)
        if in_graph and self._only_tables and step > self._table_step:
            self._step_of_tables(self._table_step)
            self._table_step = step

    def _step_of_tables(self, step: int) -> None:
        """Records a step of a model without other gradients: from its first lookup to its last gradients."""
        found = [times for table in list(self.tables.values()) if (times := table.times(step)) is not None]
        if not found:
            return
        if self.recorder.enabled:
            begin = max(min(begin for begin, _ in found), self._until_ns)
            end = max(begin, *(end for _, end in found))
            self._step(step, begin, end)
            self._span("forward", begin, end, step=step)
        self._count()

    def _table(self, bucket: int, spec: BucketSpec) -> TableHistory:
        if (found := self.tables.get(bucket)) is None:
            found = self.tables.setdefault(bucket, TableHistory(spec.name, TableSpec.parse(spec.table).dim, spec.codec))
        return found

    def input(self, begin_ns: int) -> None:
        """Records the wait for a batch that the program requested at `begin_ns`, outside of a graph."""
        if not self._asked_ns:
            self._asked_ns = begin_ns
        self._span("input", begin_ns, self.now())

    def staged(self, begin_ns: int, batches: Structure) -> None:
        """Records a copy of batches to the devices."""
        leaves = [each for each in tf.nest.flatten(batches, expand_composites=True) if tf.is_tensor(each)]
        nbytes = sum(each.dtype.size * (each.shape.num_elements() or 0) for each in leaves)
        self._span("staging", begin_ns, self.now(), nbytes=nbytes)

    @contextlib.contextmanager
    def eager_step(self) -> Iterator[None]:
        """Records a replica function run outside of a graph as one step if it reduces something."""
        begin, self.reduced = self.now(), False
        yield
        if not self.reduced or not self.recorder.enabled:
            return
        end, begin = self.now(), max(begin, self._until_ns)
        self._step(self._eager_steps, self._asked(begin), end)
        self._span("forward", begin, end, step=self._eager_steps)
        self._eager_steps += 1

    def _asked(self, begin_ns: int) -> int:
        """Returns when the program requested the step's batch, if outside of a graph; else `begin_ns`."""
        asked = self._asked_ns
        if asked > begin_ns:
            return begin_ns  # the request is for a later step: this step's messages were taken late
        self._asked_ns = 0
        known = asked > max(self._until_ns, self.recorder.started_ns)
        return asked if known else begin_ns

    def _step(self, number: int, begin_ns: int, end_ns: int) -> None:
        self._span("step", begin_ns, end_ns, step=number)
        self.steps.append((number, begin_ns))
        self._until_ns = end_ns

    def _ns(self, seconds: float) -> int:
        """Converts a note to nanoseconds of the recorder's clock; 0 stays 0."""
        return round(seconds * 1e9) - self.wall_offset_ns() if seconds else 0


_NOTHING = BucketSpec(("inner steps",), "gather", 0, "uint8", 0)


class InnerStep(Transfer):
    """A graph's messages, one per step that exchanges nothing, or only sometimes: number, times, two per `awaited`."""

    exchanges = False

    def __init__(self, spans: StepSpans) -> None:
        super().__init__(UNDECLARED, _NOTHING)
        self.awaited: list[Awaited] = []
        self._spans = spans

    def collect(self, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor, times: tf.Tensor, /) -> None:
        if self._spans.recorder.enabled:
            self._spans.inner_step(int(graph_run), times.numpy().tolist(), self.awaited)
        self._spans.count()
