"""Threads that run updates and answer pulls as replies come, most urgent first."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections.abc import Callable

from tfps.errors import TfpsError


class UpdateExecutor:
    """Runs calls, most urgent first. One that is more urgent than all that run gets a thread at once, others wait.

    So calls of equal priority never run at the same time, and usually one thread is enough. If the system starts no
    more threads, a call waits for those that run. `around` runs the loop of each thread, in the calls' context.
    """

    def __init__(self, around: Callable[[Callable[[], None]], None]) -> None:
        self._around = around
        self._changed = threading.Condition()  # guards all below
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []  # a heap
        self._arrivals = itertools.count()
        self._running: list[int] = []  # priorities
        self._threads: list[threading.Thread] = []
        self._idle = 0  # threads that wait or have just been started
        self._closed = False
        try:
            with self._changed:
                self._start()
        except RuntimeError as error:
            raise TfpsError(
                f"tfps needs a thread that runs updates, and the system starts none: {error}. Let this user or "
                "container have more threads (ulimit -u, the container's limit of pids)"
            ) from error

    def add(self, priority: int, call: Callable[[], None]) -> None:
        """Runs `call`, which must not raise, on one of the threads; a smaller `priority` is more urgent."""
        with self._changed:
            heapq.heappush(self._waiting, (priority, next(self._arrivals), call))
            may_start = self._may_start()
            if may_start and self._idle:
                self._changed.notify()
            elif may_start:
                with contextlib.suppress(RuntimeError):  # no more threads: one of those that run takes it next
                    self._start()

    def close(self) -> None:
        """Waits until all calls have ended, then ends the threads. Nothing may be added any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _start(self) -> None:
        thread = threading.Thread(target=self._around, args=(self._run,), name="tfps-apply", daemon=True)
        thread.start()
        self._threads.append(thread)
        self._idle += 1

    def _may_start(self) -> bool:
        """Whether the most urgent call that waits is more urgent than all that run."""
        return bool(self._waiting) and (not self._running or self._waiting[0][0] < min(self._running))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._may_start() or (self._closed and not self._waiting))
                self._idle -= 1
                if not self._waiting:
                    return
                priority, _, call = heapq.heappop(self._waiting)
                self._running.append(priority)
            call()
            del call  # frees its buffers while this thread waits
            with self._changed:
                self._running.remove(priority)
                self._idle += 1
                if self._closed:  # else no other may start a call that this thread does not take next
                    self._changed.notify_all()
