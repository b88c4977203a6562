"""A worker's part in captures: rank 0 starts, stops and collects them; other ranks follow the pservers."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence

from tfps.errors import TfpsError, UnsupportedError
from tfps.exchange.interface import BucketSpec
from tfps.protos import tfps_pb2 as pb
from tfps.trace.assembly import Recorded, assemble
from tfps.trace.capture import Capture, CapturedBucket, Process, Setting
from tfps.trace.recorder import Recorder
from tfps.wire.control import ClockOffset, compare_clocks, record_messages
from tfps.wire.frames import Header
from tfps.worker.bucket import PushedBucket
from tfps.worker.client import PserverClient

logger = logging.getLogger("tfps")

COLLECT_TIMEOUT_S = 30.0
RUNNING = "a capture is being recorded already: end it (stop_trace) before the next begins"
NOT_RUNNING = "no capture is being recorded: begin one (start_trace, on rank 0)"


def named(buckets: Sequence[CapturedBucket], specs: Sequence[BucketSpec]) -> list[CapturedBucket]:
    """Returns all buckets of a capture: those described, then the others as declared."""
    others = specs[len(buckets) :]
    return [*buckets, *(CapturedBucket(one.name, one.names, one.priority, one.nbytes) for one in others)]


class Switch:
    """Switches recording of this process on and off. Thread-safe."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._lock = threading.Lock()  # guards _on
        self._on = False

    def on(self) -> bool:
        """Starts recording; returns False if already on."""
        with self._lock:
            if self._on:
                return False
            self._on = True
            self._recorder.start()
            return True

    def off(self) -> bool:
        """Stops recording; returns False if already off."""
        with self._lock:
            if not self._on:
                return False
            self._on = False
            self._recorder.stop()
            return True


class WorkerCaptures:
    """The `Captures` of a job with pservers; see Records in protos/tfps.proto. Once the worker has joined.

    Args:
        buckets: all declared ones, by number; grows over time.
        settings: returns what a capture tells of the worker's settings.
    """

    def __init__(
        self,
        recorder: Recorder,
        client: PserverClient,
        buckets: Sequence[PushedBucket],
        settings: Callable[[], Mapping[str, Setting]],
    ) -> None:
        self._recorder, self._client, self._buckets, self._settings = recorder, client, buckets, settings
        self._rank = client.membership.rank
        self._switch = Switch(recorder)
        self._lock = threading.Lock()  # guards all below
        self._number = 0  # of the latest capture
        self._uploading: threading.Thread | None = None

    # Rank 0

    def start(self) -> None:
        """See `Captures.start`."""
        self._check_rank()
        if not self._switch.on():
            raise TfpsError(RUNNING)
        self._number += 1
        try:
            self._client.trace(self._number, True)
        except TfpsError:
            self._switch.off()
            raise

    def stop(
        self, buckets: Sequence[CapturedBucket], name: str, steps: Sequence[int], settings: Mapping[str, Setting]
    ) -> Capture:
        """See `Captures.stop`."""
        self._check_rank()
        if not self._switch.off():
            raise TfpsError(NOT_RUNNING)
        self._client.trace(self._number, False)
        clocks = [compare_clocks(pserver, self._recorder.clock) for pserver in self._client.pservers]
        parts = self._client.collect(self._number, COLLECT_TIMEOUT_S)
        self._warn(parts)
        known = named(buckets, [bucket.spec for bucket in list(self._buckets)])
        return assemble(self._recorded(parts, clocks), known, name, steps, {**self._settings(), **settings})

    def _check_rank(self) -> None:
        if self._rank != 0:
            raise UnsupportedError(
                f"captures are begun and ended by rank 0, for all workers; this is rank {self._rank}"
            )

    def _warn(self, parts: Sequence[pb.Records]) -> None:
        """Logs what is missing."""
        there = {part.number for part in parts if part.last and not part.pserver}
        if missing := [f"rank {rank}" for rank in self._client.membership.view.ranks[1:] if rank not in there]:
            logger.warning(
                "tfps: the capture lacks the records of %s: they did not come within %.0f s, or the worker has left",
                ", ".join(missing),
                COLLECT_TIMEOUT_S,
            )
        full = sorted({f"{'pserver' if part.pserver else 'worker'} {part.number}" for part in parts if part.full})
        if self._recorder.full:
            full.insert(0, "worker 0")
        if full:
            logger.warning("tfps: the capture lacks the first records of %s: there were too many", ", ".join(full))

    def _recorded(self, parts: Sequence[pb.Records], clocks: Sequence[ClockOffset]) -> list[Recorded]:
        """Returns each process's records, workers first."""
        found = [Recorded(Process("worker", 0, socket.gethostname()), self._recorder.records())]
        for rank in self._client.membership.view.ranks[1:]:
            own = [part for part in parts if not part.pserver and part.number == rank]
            first = own[0] if own else pb.Records()
            process = Process("worker", rank, first.host, first.clock_offset_ns, first.clock_error_ns)
            found.append(Recorded(process, b"".join(part.records for part in own)))
        for number, (pserver, clock) in enumerate(zip(self._client.pservers, clocks, strict=True)):
            process = Process("pserver", number, pserver.address, clock.offset_ns, clock.error_ns)
            records = b"".join(part.records for part in parts if part.pserver and part.number == number)
            found.append(Recorded(process, records))
        return found

    # The other ranks

    def take(self, header: Header) -> None:
        """Handles a TRACE frame of any pserver; repeated ones have no effect. Called by the receiver threads."""
        if self._rank == 0:
            return
        with self._lock:
            if header.index and header.step > self._number:
                self._number = header.step
                self._switch.off()
                self._switch.on()
            elif not header.index and header.step == self._number and self._switch.off():
                self._uploading = threading.Thread(target=self._upload, name="tfps-upload", daemon=True)
                self._uploading.start()

    def _upload(self) -> None:
        """Sends the records to the first pserver."""
        number, parts = self._number, record_messages(self._recorder, number=self._rank, host=socket.gethostname())
        try:
            clock = compare_clocks(self._client.pservers[0], self._recorder.clock)
            for part in parts:
                part.clock_offset_ns, part.clock_error_ns = -clock.offset_ns, clock.error_ns
                self._client.upload(number, part, COLLECT_TIMEOUT_S)
        except TfpsError as error:  # rank 0 logs what it lacks; a failed job is reported elsewhere
            logger.info("tfps: rank %d could not upload its records: %s", self._rank, error)

    def close(self, failed: bool) -> None:
        """Stops recording; uploads this rank's records if the job has not `failed`."""
        if self._switch.off() and self._rank != 0 and not failed:
            self._upload()
        with self._lock:
            uploading = self._uploading
        if uploading is not None and not failed:
            uploading.join(COLLECT_TIMEOUT_S)
