"""Captures of training: started and stopped on rank 0, written for TensorBoard, Perfetto and `tfps_trace`."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tensorflow as tf

from tfps import __version__
from tfps.config import TraceRequest
from tfps.errors import ConfigError, TfpsError
from tfps.runtime.runtime import Runtime
from tfps.runtime.xplane import overlapping_profiles, profile_path, write_xplane
from tfps.trace.capture import Capture, Process, Setting
from tfps.trace.capture_file import chrome_path, write_chrome

logger = logging.getLogger("tfps")
_SETTLE_S = 10.0  # for the updates of the last step
_END_S = 60.0  # for a capture that is written when the strategy is closed


class TraceRun:
    """A capture being recorded. Rank 0 only.

    Args:
        log_dir: the directory for `tensorboard --logdir`.
        name: of the run; None for the current time.
        of_fit: started by a callback, which is not told if an exception ends `fit`.
    """

    def __init__(self, runtime: Runtime, log_dir: str | Path, name: str | None = None, *, of_fit: bool = False) -> None:
        if name is not None and not re.fullmatch(r"[^/\\\0.][^/\\\0]*", name):
            raise ConfigError(f"name of a trace must be a file name, because the run gets it, got {name!r}")
        self._runtime, self.of_fit = runtime, of_fit
        self._log_dir = Path(log_dir)
        self._name = name or time.strftime("%Y-%m-%d_%H-%M-%S")
        runtime.exchange.captures.start()
        runtime.capturing = self
        self._begin_ns = runtime.spans.now()
        self._begin_s = time.time()
        self._capture: Capture | None = None

    def stop(self, choose: Callable[[Sequence[int]], Sequence[int]] = lambda steps: steps, settle: bool = True) -> None:
        """Stops recording and writes the capture, once the last step's updates are done.

        Args:
            choose: returns the requested steps among the recorded ones.
            settle: wait for pending updates; only while nothing is being sent.
        """
        self._runtime.capturing = None
        if settle:
            self._runtime.settle(_SETTLE_S)
        spans, exchange = self._runtime.spans, self._runtime.exchange
        steps = [number for number, begin_ns in list(spans.steps) if begin_ns >= self._begin_ns]
        settings: dict[str, Setting] = {
            "workers": exchange.view.workers,
            "tfps": __version__,
            "tensorflow": tf.__version__,
        }
        run = self._free_name()
        chosen = sorted(set(choose(steps)))
        self._capture = exchange.captures.stop(self._runtime.declared.known(), run, chosen, settings)
        path = chrome_path(self._log_dir, run)
        write_chrome(self._capture, path)
        self._say(path)

    def abandon(self) -> None:
        """Stops recording without writing anything."""
        self._runtime.capturing = None
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

    def _say(self, path: Path) -> None:
        capture = self._capture
        if capture is None:
            return
        error_ns = max(process.clock_error_ns for process in capture.processes)
        clocks = f", clocks aligned to {error_ns / 1e6:.2g} ms" if len(capture.processes) > 1 else ""
        logger.info(
            'tfps: recorded %s: %d spans of %s%s, in %s; `tensorboard --logdir %s` shows it in the tab "Parameter '
            'servers", `tfps_trace` in the terminal, https://ui.perfetto.dev as well',
            _listed(capture.steps),
            len(capture.spans),
            " and ".join(_counted(own) for own in (capture.workers, capture.pservers) if own),
            clocks,
            path,
            self._log_dir,
        )


def _counted(processes: Sequence[Process]) -> str:
    return f"{len(processes)} {processes[0].role}{'s' if len(processes) > 1 else ''}"


def _listed(steps: Sequence[int]) -> str:
    if not steps:
        return "no training step"
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"


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
        runtime.before_close(self._close)
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
