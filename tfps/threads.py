"""Daemon threads, and a flag that signal handlers may set."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

_T = TypeVar("_T")
_LOOK_S = 1.0  # how long a signal may go unnoticed that came to another thread
BEAT_S = 1.0
_END_S = 5.0  # for a sheltered call that was told to stop


class Flag:
    """Like `threading.Event`, but a signal handler may set it.

    Setting an Event while `wait` holds its lock on the same thread would deadlock.
    """

    def __init__(self) -> None:
        self._tokens = queue.SimpleQueue[None]()  # its `put` is reentrant

    def set(self) -> None:
        self._tokens.put(None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it is set or `timeout_s` is over; returns whether it is set."""
        end_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = max(end_s - time.monotonic(), 0.0)
            with contextlib.suppress(queue.Empty):
                # The system may hand a signal to any thread: Python runs its handler here, and not before this returns.
                self._tokens.get(timeout=min(left_s, _LOOK_S))
                self.set()  # it stays set
                return True
            if left_s <= _LOOK_S:
                return False


def sheltered(call: Callable[[threading.Event], _T], wait: Callable[[threading.Event], object]) -> _T:
    """Runs `call` on a separate thread, where Ctrl-C cannot interrupt it; returns or raises what it does.

    Args:
        call: gets an event that is set when Ctrl-C (or any exception) ends the wait: then it should return soon.
        wait: waits until an event is set.
    """
    done, stop = threading.Event(), threading.Event()
    pool = DaemonPool(1, "tfps-sheltered")
    try:
        future = pool.submit(call, stop)
        future.add_done_callback(lambda _: done.set())
        pool.shutdown(wait=False)
        wait(done)
    except BaseException:
        stop.set()
        done.wait(_END_S)  # so the program's next action finds it done or not begun; a second Ctrl-C ends this wait
        raise
    return future.result()


def finalize(call: Callable[[], object]) -> None:
    """Runs what finalizes an object and may wait: on the main thread at once, else on a thread of its own.

    The garbage collector runs on any thread: one that holds a lock, or delivers the reply that `call` waits for.
    """
    if threading.current_thread() is threading.main_thread():
        call()
    else:
        threading.Thread(target=call, name="tfps-finalize").start()


class Heartbeat:
    """A daemon thread that calls `beat` every second until that returns False or `stop` is called.

    `beat` is told whether it is late, as after SIGSTOP or on a suspended host: then others only seem to be silent.
    """

    def __init__(self, name: str, beat: Callable[[bool], bool]) -> None:
        self._beat, self._stopped = beat, threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        before_s = time.monotonic()
        while not self._stopped.wait(BEAT_S):
            now_s = time.monotonic()
            if not self._beat(now_s - before_s > 2 * BEAT_S):
                return
            before_s = now_s


class DaemonPool(Executor):
    """Like `ThreadPoolExecutor`, but with up to `limit` daemon threads.

    Python joins the threads of a ThreadPoolExecutor at exit, before anything can stop them: a thread waiting for a
    peer would keep the process alive forever.
    """

    def __init__(self, limit: int, name: str) -> None:
        self.limit, self._name = limit, name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()  # guards the next two
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, fn: Callable[..., _T], /, *args: object, **kwargs: object) -> Future[_T]:
        """Schedules `fn` on one of the threads."""
        future: Future[_T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._closed:
                raise RuntimeError("the pool was shut down")
            self._work.put(call)
            if not self._idle.acquire(blocking=False) and len(self._threads) < self.limit:
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads of the system: one of these takes it once it is free
                    if not self._threads:
                        raise
                else:
                    self._threads.append(thread)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accepts no more calls; threads end once submitted calls are done."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        self._work.put(None)
        for thread in threads if wait else ():
            thread.join()

    def _run(self) -> None:
        while (call := self._work.get()) is not None:
            call()
            del call  # frees what it holds before the next one
            self._idle.release()
        self._work.put(None)  # for the next thread
