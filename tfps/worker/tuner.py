"""Measures during the first steps on rank 0, then changes slice and window sizes once or twice.

Tested in tests/exchange/test_tuning.py.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence

from tfps.config import Config
from tfps.errors import TfpsError
from tfps.exchange import layout
from tfps.exchange.codecs import sent_bytes
from tfps.protos import tfps_pb2 as pb
from tfps.wire.control import Pserver
from tfps.wire.reach import round_trip_s, split
from tfps.wire.send_queue import SendQueue, Throughput
from tfps.wire.shared_memory import Sharing
from tfps.worker.bucket import PushedBucket
from tfps.worker.client import PserverClient

logger = logging.getLogger("tfps")

_PROBES = 5
_PROBE_TIMEOUT_S = 5.0
_STEPS, _BUSY_S = 2, 0.1  # minimum for a measurement
_GIVE_UP_STEPS = 50  # by then the network would have been busy if it mattered
_LEAST_SLICES = 8  # per pserver, unless they are below 1 MiB: pushes and replies overlap slice by slice
_MIN_MESSAGE_S, _MAX_MESSAGE_S = 100e-6, 2e-3  # Python and gRPC on both ends take about 0.15 ms at best
_TCP_MESSAGE_S = 100e-6  # over a data connection, both ends: docs/transport.md


class Tuner:
    """Tunes a job if any size in `config` is "auto". Not thread-safe.

    docs/design.md says what it measures. `tune` is called with slice and window bytes.
    """

    def __init__(
        self,
        config: Config,
        client: PserverClient,
        queues: Sequence[SendQueue],
        memory: Sharing,
        tune: Callable[[int, int], None],
    ) -> None:
        self._config, self._client, self._queues, self._memory, self._tune = config, client, queues, memory, tune
        self._ask = False  # whether to ask the pservers for the network's throughput
        self._most, self._delay = layout.MAX_TUNED_GRPC_BYTES, layout.GRPC_DELAY
        self.done = config.slice_bytes != "auto" and config.window_bytes != "auto"
        self._sizes: tuple[int, int] | None = None  # those of the last change
        self._round_trip_s = self._message_s = 0.0
        self._first: tuple[float, int] | None = None  # time and step count at the first look
        self._busy_then: Sequence[Throughput] = ()
        self._measured: layout.Measured | None = None  # by the first measurement
        self._steps_then = 0  # the second measurement is after this step

    def probe(self) -> None:
        """Measures round trips while nothing else is in flight. The slowest pserver counts."""
        if self.done or self._round_trip_s:
            return
        if len(self._memory.pservers) == len(self._client.pservers):
            members = itertools.chain(*self._client.members(_PROBE_TIMEOUT_S))
            self._ask = any(not member.shared_memory for member in members)
            self._most = layout.MAX_TUNED_GRPC_BYTES if self._ask else layout.MAX_TUNED_BYTES  # others may use gRPC
        self._round_trip_s = max(min(_call_s(p) for _ in range(_PROBES)) for p in self._client.pservers)
        far = self._far()
        if far and all(queue.on_connection for queue in far):
            self._message_s, self._most, self._delay = _TCP_MESSAGE_S, layout.MAX_TUNED_BYTES, layout.DELAY
            return
        addresses = [split(pserver.address) for pserver in self._client.pservers]
        network_s = max(round_trip_s(*each, _PROBE_TIMEOUT_S, _PROBES) or 0.0 for each in addresses)
        self._message_s = message_s(self._round_trip_s, network_s)

    def look(self, buckets: Sequence[PushedBucket]) -> None:
        """Tunes if enough has been measured. Buckets declared later (of a second model) get the sizes found before."""
        if self.done:
            if self._sizes is not None and any(map(_is_late, buckets)):
                self._tune(*self._sizes)
            return
        # Only gradients: announcements of batches and the like run ahead, with separate rounds.
        leader = max((b for b in buckets if layout.tunable(b.spec)), key=lambda bucket: bucket.steps, default=None)
        if leader is None:
            return
        with leader.lock:
            steps, now_s = leader.steps, leader.started_s
        if not self._round_trip_s or steps <= self._steps_then:
            return
        busy = self._busy()
        if self._first is None:
            self._first = now_s, steps
            if self._measured is not None:
                self._busy_then = busy
        if steps < self._first[1] + _STEPS:
            return
        if self._sizes is None and not self._ask and not self._far():  # nothing travels: wakes count, four a slice
            self._set(layout.MAX_TUNED_GRPC_BYTES, 2 * layout.MAX_TUNED_GRPC_BYTES)
            self._first, self._busy_then, self._steps_then = None, busy, steps + 3
            return
        then = self._busy_then or [Throughput()] * len(busy)
        busy = [Throughput(b.nbytes - a.nbytes, b.seconds - a.seconds) for a, b in zip(then, busy, strict=True)]
        if max(one.seconds for one in busy) < _BUSY_S:
            if steps >= self._first[1] + _GIVE_UP_STEPS:
                self.done = True  # the network keeps up: sizes stay as they are
            return
        step_s = (now_s - self._first[0]) / (steps - self._first[1])
        measured = measure(busy, self._round_trip_s, self._message_s, step_s)
        if self._measured is None:
            sizes = layout.choose(measured, most_slice_bytes=self._most, delay=self._delay)
            slice_bytes = self._change(measured, *sizes, ratio(buckets))
            self.done = self._config.slice_bytes != "auto" or slice_bytes <= self._config.first_slice_bytes
            # The change is two steps ahead for a rank at this step, and other ranks may be one further.
            self._measured, self._first, self._steps_then = measured, None, steps + 3
            return
        if layout.limited_by_handling(self._measured, measured):
            nbytes = sum(bucket.spec.nbytes for bucket in buckets if layout.tunable(bucket.spec))
            share = nbytes // _LEAST_SLICES // len(self._client.pservers)
            most = min(self._most, max(share, layout.MAX_TUNED_GRPC_BYTES))
            # Compressed slices were small at first, so the rate says little of processors: it is that of the link now.
            smaller = ratio(buckets)
            least = layout.MIN_TUNED_BYTES if smaller > 1 else most
            self._change(measured, *layout.choose(measured, least, most, self._delay), smaller)
        self.done = True

    def _busy(self) -> list[Throughput]:
        if self._ask:
            found = []
            for members in self._client.members(_PROBE_TIMEOUT_S):
                far = [Throughput(m.busy_bytes, m.busy_s) for m in members if not m.shared_memory]
                found.append(max(far, key=lambda one: one.seconds, default=Throughput()))
            return found
        return [queue.throughput for queue in self._far() or self._queues]

    def _far(self) -> list[SendQueue]:
        """The queues of the pservers that do not use shared memory."""
        return [queue for index, queue in enumerate(self._queues) if index not in self._memory.pservers]

    def _change(self, measured: layout.Measured, slice_bytes: int, window_bytes: int, ratio: float) -> int:
        """Changes sizes that are "auto"; returns the new slice size, `ratio` times that on the wire."""
        slice_bytes = min(int(slice_bytes * ratio) // 4096 * 4096, max(self._most, slice_bytes))
        slice_bytes, window_bytes = self._set(slice_bytes, window_bytes)
        logger.info(
            "tfps: tuned: slices of %.0f KiB, windows of %.0f KiB (%.3g MB/s, round trip %.2f ms, %.2f ms per message)",
            slice_bytes / 1024,
            window_bytes / 1024,
            measured.bytes_per_s / 1e6,
            measured.round_trip_s * 1e3,
            measured.message_s * 1e3,
        )
        return slice_bytes

    def _set(self, slice_bytes: int, window_bytes: int) -> tuple[int, int]:
        """Changes sizes that are "auto"; returns all."""
        fixed = self._config
        slice_bytes = slice_bytes if fixed.slice_bytes == "auto" else fixed.slice_bytes
        window_bytes = window_bytes if fixed.window_bytes == "auto" else fixed.window_bytes
        self._sizes = slice_bytes, window_bytes
        self._tune(slice_bytes, window_bytes)
        return self._sizes


def ratio(buckets: Sequence[PushedBucket]) -> float:
    """How many times as large gradients are as what is sent of them."""
    specs = [bucket.spec for bucket in buckets if layout.tunable(bucket.spec)]
    sent = sum(sent_bytes(spec.codec, spec.nbytes) for spec in specs)
    return sum(spec.nbytes for spec in specs) / sent if sent else 1.0


def _is_late(bucket: PushedBucket) -> bool:
    """Whether a bucket is in use and has never been cut anew."""
    if not layout.tunable(bucket.spec):
        return False
    with bucket.lock:
        return bucket.steps > _STEPS and bucket.cutting.step == 0 and not bucket.next


def measure(busy: Sequence[Throughput], round_trip_s: float, message_s: float, step_s: float) -> layout.Measured:
    """Combines all streams: they are busy at about the same time, the longest of them throughout."""
    bytes_per_s = sum(one.nbytes for one in busy) / max(one.seconds for one in busy)
    return layout.Measured(bytes_per_s, round_trip_s, message_s, step_s, len(busy))


def message_s(round_trip_s: float, network_s: float) -> float:
    """The cost of a message over gRPC: half of a call's round trip without the network's part."""
    return min(max((round_trip_s - network_s) / 2, _MIN_MESSAGE_S), _MAX_MESSAGE_S)


def _call_s(pserver: Pserver) -> float:
    began_s = time.monotonic()
    with contextlib.suppress(TfpsError):
        pserver.call("Status", pb.StatusRequest(), _PROBE_TIMEOUT_S)
    return time.monotonic() - began_s
