"""Captures of training: started and stopped on rank 0, written for TensorBoard, Perfetto and `tfps_trace`.

TensorBoard's Profile tab reads the XSpace files in a run's folder and shows each plane as a process. Only planes with
device names get timelines, hence `/device:CUSTOM:worker0`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tfps import __version__
from tfps.config import TraceRequest
from tfps.errors import ConfigError, TfpsError
from tfps.graph.ops import has_clock
from tfps.runtime.first_runs import KnownParts
from tfps.runtime.runtime import Runtime
from tfps.trace.capture import NONE, Capture, Process, Setting, by_lane, rows
from tfps.trace.capture_file import chrome_path, write_chrome
from tfps.types import Structure

FILE = "tfps.xplane.pb"
logger = logging.getLogger("tfps")
_PS_PER_NS = 1000
_NUMBERS = ("step", "bucket", "slice", "priority", "nbytes", "rank", "pserver")


def profile_path(log_dir: str | Path, run: str) -> Path:
    """Returns the run's file for the Profile tab: `<log_dir>/plugins/profile/<run>/tfps.xplane.pb`."""
    return Path(log_dir) / "plugins" / "profile" / run / FILE


def overlapping_profiles(log_dir: str | Path, since_s: float) -> list[Path]:
    """Returns profiles written by TensorFlow in `log_dir` or a subfolder since `since_s` (wall clock)."""
    folder = Path(log_dir)
    found = [*folder.glob("plugins/profile/*/*.xplane.pb"), *folder.glob("*/plugins/profile/*/*.xplane.pb")]
    return sorted(file for file in found if file.name != FILE and file.stat().st_mtime >= since_s)


def write_xplane(
    capture: Capture, path: str | Path, profiles: Sequence[Path] = (), wall_offset_ns: int | None = None
) -> None:
    """Writes one file: all of TensorFlow's `profiles`, then a plane per process, whose lines are rows of lanes.

    Profiles count from their start in wall clock time; they are moved to the capture's clock if `wall_offset_ns`, the
    difference, is known.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    space = xplane_pb2.XSpace()
    for file in profiles:
        try:
            part = xplane_pb2.XSpace.FromString(file.read_bytes())
        except DecodeError as error:
            raise TfpsError(f"'{file}' must be an XSpace of TensorFlow's profiler: {error}") from error
        began_ns = _began_ns(part)
        if wall_offset_ns is not None and began_ns:
            for line in (line for plane in part.planes for line in plane.lines):
                line.timestamp_ns += began_ns - wall_offset_ns
        space.MergeFrom(part)
    lanes = by_lane(capture.spans)
    for number, process in enumerate(capture.processes):
        own = {lane: members for (where, lane), members in lanes.items() if where == number}
        _add_process(space, capture, process, own)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(space.SerializeToString())
    partial.replace(path)


def _began_ns(space: xplane_pb2.XSpace) -> int:
    """Returns the profile's start in wall clock time, 0 if it has none."""
    for plane in space.planes:
        for stat in plane.stats:
            if plane.stat_metadata[stat.metadata_id].name == "profile_start_time":
                return int(stat.uint64_value or stat.int64_value)
    return 0


def _add_process(space: xplane_pb2.XSpace, capture: Capture, process: Process, lanes: dict[str, list[int]]) -> None:
    free = max((plane.id for plane in space.planes), default=0) + 1
    plane = space.planes.add(id=free, name=f"/device:CUSTOM:{process.role}{process.number}")
    origin = capture.spans[0].begin_ns if capture.spans else 0
    titles: dict[str, int] = {}
    stats: dict[str, int] = {}

    def add_stat(of: Structure, name: str, value: int | str) -> None:
        number = _numbered(stats, plane.stat_metadata, name)
        of.stats.add(metadata_id=number, **{"str_value" if isinstance(value, str) else "int64_value": value})

    for name, members in lanes.items():
        spans = [capture.spans[member] for member in members]
        placed = rows((span.begin_ns, max(span.end_ns, span.begin_ns + 1)) for span in spans)
        lines = []
        for row in range(max(placed) + 1):
            shown = name if row == 0 else f"{name} ({row + 1})"
            lines.append(plane.lines.add(id=len(plane.lines) + 1, name=shown, timestamp_ns=origin))
        for span, row in zip(spans, placed, strict=True):
            title = capture.title(span)
            event = lines[row].events.add(
                metadata_id=_numbered(titles, plane.event_metadata, title),
                offset_ps=(span.begin_ns - origin) * _PS_PER_NS,
                duration_ps=span.duration_ns * _PS_PER_NS,
            )
            for field in _NUMBERS:
                if (value := getattr(span, field)) != NONE:
                    add_stat(event, field, value)
    add_stat(plane, "host", process.host)
    add_stat(plane, "clock_error_ns", process.clock_error_ns)


def _numbered(known: dict[str, int], table: Structure, name: str) -> int:
    """Returns the number of a name in a plane's name table; adds it if new."""
    if name not in known:
        known[name] = number = len(table) + 1
        table[number].id, table[number].name = number, name
    return known[name]


_SETTLE_S = 10.0  # for the updates of the last step
_END_S = 60.0  # for a capture that is written when the strategy is closed


class TraceRun:
    """A capture being recorded for `tensorboard --logdir`, by default under the time as its name. Rank 0 only.

    `of_fit`: started by a callback, which is not told if an exception ends `fit`.
    """

    def __init__(self, runtime: Runtime, log_dir: str | Path, name: str | None = None, *, of_fit: bool = False) -> None:
        if name is not None and not re.fullmatch(r"[^/\\\0.][^/\\\0]*", name):
            raise ConfigError(f"name of a trace must be a file name, because the run gets it, got {name!r}")
        if not has_clock():
            logger.warning(
                "tfps: tf.config.experimental.enable_op_determinism() leaves a step's graph no clock: this capture has "
                "messages and updates, but no steps and no waits"
            )
        self._runtime, self._log_dir = runtime, Path(log_dir)
        self._name = name or time.strftime("%Y-%m-%d_%H-%M-%S")
        runtime.exchange.captures.start()
        runtime.abandon_capture = self.abandon if of_fit else None
        self._begin_ns = runtime.spans.now()
        self._begin_s = time.time()
        self._capture: Capture | None = None

    def stop(self, choose: Callable[[Sequence[int]], Sequence[int]] = lambda steps: steps, settle: bool = True) -> None:
        """Stops recording and writes the steps that `choose` takes; with `settle` once their updates have ended."""
        self._runtime.abandon_capture = None
        if settle:  # only while nothing is being sent
            self._runtime.settle(_SETTLE_S)
        exchange, workers = self._runtime.exchange, len(self._runtime.exchange.view.ranks)
        steps = [number for number, begin_ns in list(self._runtime.spans.steps) if begin_ns >= self._begin_ns]
        settings: dict[str, Setting] = {"workers": workers, "tfps": __version__, "tensorflow": tf.__version__}
        run, chosen = self._free_name(), sorted(set(choose(steps)))
        try:
            capture = exchange.captures.stop(self._runtime.declared.known(), run, chosen, settings)
        except TfpsError as error:
            if exchange.failure is not None:
                raise
            # Training goes on, as when a pserver was lost meanwhile.
            logger.warning("tfps: the capture '%s' is lost: %s", run, error)
            return
        parts = self._runtime.shared(KnownParts, KnownParts).captured()
        self._capture = capture = dataclasses.replace(capture, parts=parts)
        path = chrome_path(self._log_dir, run)
        write_chrome(capture, path)
        error_ns = max(process.clock_error_ns for process in capture.processes)
        listed = f"step {capture.steps[0]}" if capture.steps else "no training step"
        if len(capture.steps) > 1:
            listed = f"{len(capture.steps)} steps, {capture.steps[0]} to {capture.steps[-1]}"
        logger.info(
            'tfps: recorded %s: %d spans of %s%s, in %s; `tensorboard --logdir %s` shows it in the tab "Parameter '
            'servers", `tfps_trace` in the terminal, https://ui.perfetto.dev as well',
            listed,
            len(capture.spans),
            " and ".join(
                f"{len(own)} {own[0].role}{'s' * (len(own) > 1)}" for own in (capture.workers, capture.pservers) if own
            ),
            f", clocks aligned to {error_ns / 1e6:.2g} ms" if len(capture.processes) > 1 else "",
            path,
            self._log_dir,
        )

    def abandon(self) -> None:
        """Stops recording without writing anything."""
        self._runtime.abandon_capture = None
        with contextlib.suppress(TfpsError):
            self._runtime.exchange.captures.stop([], self._name, [], {})

    def write_profile(self) -> None:
        """Writes the file for the Profile tab, merged with TensorFlow's profiles of the same time and directory."""
        if self._capture is not None:
            profiles = overlapping_profiles(self._log_dir, self._begin_s)
            path = profile_path(self._log_dir, self._capture.name)
            write_xplane(self._capture, path, profiles, self._runtime.spans.wall_offset_ns())

    def _free_name(self) -> str:
        """Returns the run's name, numbered if it exists: TensorBoard would keep showing the earlier run."""
        run, number = self._name, 1
        while chrome_path(self._log_dir, run).exists() or profile_path(self._log_dir, run).exists():
            number += 1
            run = f"{self._name}-{number}"
        return run


_requests: set[TraceRequest] = set()  # taken by a strategy of this process


def record_unattended(runtime: Runtime, request: TraceRequest | None) -> None:
    """Records the capture that `TFPS_TRACE` requests, for this process's first strategy. Does nothing but on rank 0."""
    if request is None or request in _requests:
        return
    _requests.add(request)
    if runtime.exchange.rank == 0:
        _Unattended(runtime, request)


class _Unattended:
    """Records some training steps of an unmodified program; a thread, "tfps-trace", writes the capture."""

    def __init__(self, runtime: Runtime, request: TraceRequest) -> None:
        self._runtime, self._request = runtime, request
        self._run: TraceRun | None = None
        self._end = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._finish, name="tfps-trace", daemon=True)
        runtime.before_close.append(self._close)
        self._heard(0)
        runtime.spans.on_step = self._heard
        self._thread.start()

    def _heard(self, sent: int) -> None:
        """Handles `sent` steps sent. The next step may be computed already, and the one after it begun.

        That one waits for sends of this, the pump thread: so the third one is recorded from its beginning.
        """
        if self._run is None and sent >= self._request.first - 2:
            try:
                self._run = TraceRun(self._runtime, self._request.log_dir)
            except TfpsError as error:
                self._runtime.spans.on_step = None
                self._warn(error)
        # Updates run one after the other: those of the last requested step are recorded once one of the next begins,
        # and the step just sent has waited for that one.
        if sent >= self._request.last + 3:
            self._runtime.spans.on_step = None
            self._end.set()

    def _close(self) -> None:
        self._closing = True
        self._end.set()
        self._thread.join(_END_S)

    def _finish(self) -> None:
        self._end.wait()
        if self._closing:
            self._runtime.settle(_SETTLE_S)
        there, first = self._runtime.spans.counted, self._request.first
        if self._run is None or there <= first:
            if self._run is not None:
                self._run.abandon()
            logger.warning("tfps: TFPS_TRACE asks for the steps from %d on, but there were only %d", first, there)
            return
        requested = range(first, self._request.last + 1)
        try:
            self._run.stop(lambda steps: [step for step in steps if step in requested], settle=False)
            self._run.write_profile()
        except (TfpsError, OSError) as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        logger.warning("tfps: TFPS_TRACE has recorded nothing: %s", error)
