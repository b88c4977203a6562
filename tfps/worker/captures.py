"""A worker's part in captures: rank 0 starts, stops and collects them; other ranks follow the pservers."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tfps.errors import TfpsError, UnsupportedError
from tfps.exchange.interface import BucketSpec
from tfps.membership.view import View
from tfps.protos import tfps_pb2 as pb
from tfps.trace.assembly import Recorded, assemble
from tfps.trace.capture import NONE, Capture, CapturedBucket, CapturedView, Process, Setting, Span, lane_of
from tfps.trace.recorder import Recorder
from tfps.wire.control import compare_clocks, record_messages
from tfps.wire.frames import Header
from tfps.worker.client import PserverClient
from tfps.worker.losses import Losses

logger = logging.getLogger("tfps")

COLLECT_TIMEOUT_S = 30.0


class ProcessCaptures:
    """The `Captures` of this process alone; `check` may raise before one begins."""

    def __init__(
        self, recorder: Recorder, specs: Callable[[], Sequence[BucketSpec]], check: Callable[[], object]
    ) -> None:
        self._recorder, self._specs, self._check = recorder, specs, check
        self._switching = threading.Lock()  # guards _on
        self._on = False

    def start(self) -> None:
        self._check()
        if not self._switch(True):
            raise TfpsError("a capture is being recorded already: end it (stop_trace) before the next begins")

    def stop(
        self, buckets: Sequence[CapturedBucket], name: str, steps: Sequence[int], settings: Mapping[str, Setting]
    ) -> Capture:
        if not self._switch(False):
            raise TfpsError("no capture is being recorded: begin one (start_trace, on rank 0)")
        recorded, others = self._collect(), self._specs()[len(buckets) :]
        known = [*buckets, *(CapturedBucket(one.name, one.names, one.priority, one.nbytes) for one in others)]
        views, changes = self._views()
        return assemble(recorded, known, name, steps, settings, views, changes)

    def close(self, failed: bool = False) -> None:
        """Stops recording."""
        self._switch(False)

    def _collect(self) -> list[Recorded]:
        """Each process's records, workers first."""
        return [Recorded(Process("worker", 0, socket.gethostname()), self._recorder.records())]

    def _views(self) -> tuple[list[CapturedView], list[Span]]:
        """The view at the start, the others, and when each of these began. A job without pservers has none."""
        return [], []

    def _switch(self, on: bool) -> bool:
        """Switches recording of this process on or off; False if it was so already."""
        with self._switching:
            changes, self._on = self._on != on, on
            if changes:
                (self._recorder.start if on else self._recorder.stop)()
            return changes


@dataclass(frozen=True, slots=True)
class _Change:
    """Of the view while a capture is recorded."""

    at_ns: int
    view: View
    reason: str
    rank: int  # that was lost or joined; NONE: several
    losses: int  # how many had been found before; NONE: nobody was lost


class WorkerCaptures(ProcessCaptures):
    """The `Captures` of a job with pservers, to use once the worker has joined; see Records in protos/tfps.proto."""

    def __init__(
        self,
        recorder: Recorder,
        client: PserverClient,
        specs: Callable[[], Sequence[BucketSpec]],
        settings: Callable[[], Mapping[str, Setting]],
        losses: Losses,
    ) -> None:
        super().__init__(recorder, specs, self._check_rank)
        self._client, self._settings, self._losses = client, settings, losses
        self._lock = threading.Lock()  # guards all below
        self._number = 0  # of the latest capture
        self._uploading: threading.Thread | None = None
        self._first: View | None = None  # when the capture began, until it is collected
        self._changes: list[_Change] = []

    @property
    def _rank(self) -> int:
        return self._client.membership.rank

    # Rank 0

    def start(self) -> None:
        super().start()
        with self._lock:
            self._first, self._changes = self._client.membership.view, []
        self._number += 1
        try:
            self._client.trace(self._number, True)
        except TfpsError:
            self._switch(False)
            raise

    def stop(
        self, buckets: Sequence[CapturedBucket], name: str, steps: Sequence[int], settings: Mapping[str, Setting]
    ) -> Capture:
        self._check_rank()
        return super().stop(buckets, name, steps, {**self._settings(), **settings})

    def _check_rank(self) -> None:
        if self._rank != 0:
            raise UnsupportedError(
                f"captures are begun and ended by rank 0, for all workers; this is rank {self._rank}"
            )

    def note(self, view: View, reason: str = "") -> None:
        """Notes that `view` is in force from now on; without a reason others have joined. Any thread."""
        with self._lock:
            if self._first is None or view.generation <= (before := self._latest(self._first)).generation:
                return
            joined = sorted(set(view.ranks).difference(before.ranks))
            who = f"rank {joined[0]} takes" if len(joined) == 1 else f"ranks {', '.join(map(str, joined))} take"
            others = list(set(view.ranks).symmetric_difference(before.ranks))
            rank = others[0] if len(others) == 1 else NONE
            losses = NONE if joined else len(self._losses.found)
            reason = reason or f"{who} part from now on"
            self._changes.append(_Change(self._recorder.clock(), view, reason, rank, losses))

    def _latest(self, first: View) -> View:
        return self._changes[-1].view if self._changes else first

    def _took_part(self) -> list[int]:
        """All ranks but 0 that have been in a view: others' spans name also those that were lost."""
        with self._lock:
            views = [self._first or self._client.membership.view, *(change.view for change in self._changes)]
        return sorted({rank for view in views for rank in view.ranks} - {0})

    def _views(self) -> tuple[list[CapturedView], list[Span]]:
        with self._lock:
            first, noted, self._first = self._first or self._client.membership.view, self._changes, None
        views, changes = [CapturedView(first.generation, first.ranks)], []
        for one in noted:
            lacking, step = None if NONE in (one.rank, one.losses) else self._losses.lacking(one.rank, one.losses), NONE
            note, slices = "", dict[str, tuple[int, ...]]()
            if lacking is not None:
                note, step = str(lacking), lacking.step
                slices = {name: tuple(each) for name, each in lacking.slices.items()}
            views.append(CapturedView(one.view.generation, one.view.ranks, one.reason, note, slices))
            changes.append(Span("change", 0, lane_of("change"), one.at_ns, one.at_ns, step, rank=one.rank))
        return views, changes

    def _collect(self) -> list[Recorded]:
        self._client.trace(self._number, False)
        clocks = [compare_clocks(pserver, self._recorder.clock) for pserver in self._client.pservers]
        parts = self._client.collect(self._number, COLLECT_TIMEOUT_S)
        ranks, found = self._took_part(), super()._collect()
        self._warn(parts, ranks)
        for rank in ranks:
            own = [part for part in parts if not part.pserver and part.number == rank]
            first = own[0] if own else pb.Records()
            process = Process("worker", rank, first.host, first.clock_offset_ns, first.clock_error_ns)
            found.append(Recorded(process, b"".join(part.records for part in own)))
        for number, (pserver, clock) in enumerate(zip(self._client.pservers, clocks, strict=True)):
            process = Process("pserver", number, pserver.address, clock.offset_ns, clock.error_ns)
            records = b"".join(part.records for part in parts if part.pserver and part.number == number)
            found.append(Recorded(process, records))
        return found

    def _warn(self, parts: Sequence[pb.Records], ranks: Sequence[int]) -> None:
        """Logs what is missing."""
        there = {part.number for part in parts if part.last and not part.pserver}
        if missing := [f"rank {rank}" for rank in ranks if rank not in there]:
            logger.warning(
                "tfps: the capture lacks the records of %s: they did not come within %.0f s, or the worker has left or "
                "come later",
                ", ".join(missing),
                COLLECT_TIMEOUT_S,
            )
        full = sorted({f"{'pserver' if part.pserver else 'worker'} {part.number}" for part in parts if part.full})
        if self._recorder.full:
            full.insert(0, "worker 0")
        if full:
            logger.warning("tfps: the capture lacks the first records of %s: there were too many", ", ".join(full))

    # The other ranks

    def take(self, header: Header) -> None:
        """Handles a TRACE frame of any pserver; repeated ones have no effect. Called by the receiver threads."""
        if self._rank == 0:
            return
        with self._lock:
            if header.index and header.step > self._number:
                self._number = header.step
                self._switch(False)
                self._switch(True)
            elif not header.index and header.step == self._number and self._switch(False):
                self._uploading = threading.Thread(target=self._upload, name="tfps-upload", daemon=True)
                self._uploading.start()

    def _upload(self) -> None:
        number, parts = self._number, record_messages(self._recorder, number=self._rank, host=socket.gethostname())
        try:
            clock = compare_clocks(self._client.pservers[0], self._recorder.clock)
            for part in parts:
                part.clock_offset_ns, part.clock_error_ns = -clock.offset_ns, clock.error_ns
                self._client.upload(number, part, COLLECT_TIMEOUT_S)
        except TfpsError as error:  # rank 0 logs what it lacks; a failed job is reported elsewhere
            logger.info("tfps: rank %d could not upload its records: %s", self._rank, error)

    def close(self, failed: bool = False) -> None:
        """Stops recording; uploads this rank's records if the job has not `failed`."""
        if self._switch(False) and self._rank != 0 and not failed:
            self._upload()
        with self._lock:
            uploading = self._uploading
        if uploading is not None and not failed:
            uploading.join(COLLECT_TIMEOUT_S)
