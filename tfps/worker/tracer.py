"""A worker's part in captures: rank 0 starts, stops and collects them; other ranks follow the pservers."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from tfps.errors import TfpsError, UnsupportedError
from tfps.protos import tfps_pb2 as pb
from tfps.trace.capture import Capture, CapturedBucket, Process, Setting
from tfps.trace.recorder import Recorder
from tfps.wire.clocks import compare
from tfps.wire.control import Pserver, record_messages
from tfps.wire.frames import Header
from tfps.worker.assembly import Recorded, assemble
from tfps.worker.membership import Membership

logger = logging.getLogger("tfps")

COLLECT_TIMEOUT_S = 30.0
_CALL_TIMEOUT_S = 10.0


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


class Tracer:
    """Handles captures for a worker of a job with pservers; see Records in protos/tfps.proto."""

    def __init__(self, recorder: Recorder, pservers: Sequence[Pserver], membership: Membership) -> None:
        self._membership, self._rank = membership, membership.rank
        self._switch = Switch(recorder)
        self._recorder, self._pservers = recorder, pservers
        self._lock = threading.Lock()  # guards all below
        self._number = 0  # of the latest capture
        self._uploading: threading.Thread | None = None

    # Rank 0

    def start(self) -> None:
        """See `Exchange.start_trace`."""
        self._check_rank()
        if not self._switch.on():
            raise TfpsError(RUNNING)
        self._number += 1
        try:
            for pserver in self._pservers:
                self._trace(pserver, True)
        except TfpsError:
            self._switch.off()
            raise

    def stop(
        self, buckets: Sequence[CapturedBucket], name: str, steps: Sequence[int], settings: Mapping[str, Setting]
    ) -> Capture:
        """See `Exchange.stop_trace`; `buckets` must be complete."""
        self._check_rank()
        if not self._switch.off():
            raise TfpsError(NOT_RUNNING)
        deadline_s = time.monotonic() + COLLECT_TIMEOUT_S
        for pserver in self._pservers:
            self._trace(pserver, False)
        clocks = [compare(pserver, self._recorder.clock)[:2] for pserver in self._pservers]
        parts = [part for pserver in self._pservers for part in self._collect(pserver, deadline_s)]
        self._warn(parts)
        return assemble(self._recorded(parts, clocks), buckets, name, steps, settings)

    def _check_rank(self) -> None:
        if self._rank != 0:
            raise UnsupportedError(
                f"captures are begun and ended by rank 0, for all workers; this is rank {self._rank}"
            )

    def _trace(self, pserver: Pserver, on: bool) -> None:
        request = pb.TraceRequest(incarnation=self._membership.incarnation, rank=self._rank, number=self._number, on=on)
        pserver.call("Trace", request, _CALL_TIMEOUT_S)

    def _collect(self, pserver: Pserver, deadline_s: float) -> list[pb.Records]:
        found: list[pb.Records] = []
        while True:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            request = pb.CollectRequest(
                incarnation=self._membership.incarnation, rank=self._rank, number=self._number, timeout_s=left_s
            )
            reply = pserver.call("Collect", request, left_s + _CALL_TIMEOUT_S)
            if not reply.HasField("records"):
                return found
            found.append(reply.records)

    def _warn(self, parts: Sequence[pb.Records]) -> None:
        """Logs what is missing."""
        there = {part.number for part in parts if part.last and not part.pserver}
        if missing := [f"rank {rank}" for rank in range(1, self._membership.workers) if rank not in there]:
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

    def _recorded(self, parts: Sequence[pb.Records], clocks: Sequence[tuple[int, int]]) -> list[Recorded]:
        """Returns each process's records, workers first."""
        found = [Recorded(Process("worker", 0, socket.gethostname()), self._recorder.records())]
        for rank in range(1, self._membership.workers):
            own = [part for part in parts if not part.pserver and part.number == rank]
            about = (own[0].host, own[0].clock_offset_ns, own[0].clock_error_ns) if own else ("", 0, 0)
            found.append(Recorded(Process("worker", rank, *about), b"".join(part.records for part in own)))
        for number, (pserver, clock) in enumerate(zip(self._pservers, clocks, strict=True)):
            records = b"".join(part.records for part in parts if part.pserver and part.number == number)
            found.append(Recorded(Process("pserver", number, pserver.address, *clock), records))
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
            offset_ns, error_ns = compare(self._pservers[0], self._recorder.clock)[:2]
            for part in parts:
                part.clock_offset_ns, part.clock_error_ns = -offset_ns, error_ns
                request = pb.UploadRequest(
                    incarnation=self._membership.incarnation, rank=self._rank, number=number, records=part
                )
                self._pservers[0].call("Upload", request, COLLECT_TIMEOUT_S)
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


RUNNING = "a capture is being recorded already: end it (stop_trace) before the next begins"
NOT_RUNNING = "no capture is being recorded: begin one (start_trace, on rank 0)"
