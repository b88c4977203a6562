"""A job of two pservers and some workers on this machine, to which a benchmark does what happens to jobs."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tools import children

LAYERS, BATCH = 4, 12  # of what jobs train (training.py): layers, rows of all workers together
ANSWER_S = 600.0
TICK = threading.Event()  # never set: it waits
TIME = struct.Struct("<IId")
_WORKER = pathlib.Path(__file__).with_name("worker.py")


class Step(NamedTuple):
    """A step that a worker has taken, and when it ended (time.monotonic)."""

    epoch: int
    batch: int
    end_s: float


def until(done: Callable[[], bool]) -> None:
    """Waits for something that processes do.

    Raises:
        RuntimeError: it does not happen within ANSWER_S.
    """
    end_s = time.monotonic() + ANSWER_S
    while not done():
        if time.monotonic() > end_s:
            raise RuntimeError("what the benchmark waits for did not happen")
        TICK.wait(0.01)


class Job:
    """Two pservers, and workers that run tools/recovery/worker.py.

    Args:
        work: what workers do: arguments of worker.py.
        more: environment variables of workers.
    """

    def __init__(self, stack: contextlib.ExitStack, workers: int, work: Sequence[str], **more: str) -> None:
        self._stack, self._work, self._more, self._workers = stack, work, more, workers
        self.pservers = [self._new_pserver() for _ in range(2)]
        self._addresses = [self._address(each) for each in self.pservers]
        self.folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.workers = [self._new(rank) for rank in range(workers)]

    def _new_pserver(self, *more: str) -> subprocess.Popen[str]:
        serve = ["-m", "tfps.pserver.cli", "--port=0", f"--workers={self._workers}", "--quiet", *more]
        return self._stack.enter_context(killed(children.python(serve, stderr=subprocess.DEVNULL)))

    def _address(self, pserver: subprocess.Popen[str]) -> str:
        return children.answer(pserver, ANSWER_S).split()[3]

    def _new(self, rank: int) -> subprocess.Popen[str]:
        environment = {
            "TFPS_PSERVERS": ",".join(self._addresses),
            "TFPS_RANK": str(rank),
            "TFPS_WORKERS": str(self._workers),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            **self._more,
        }
        work = [str(_WORKER), *self._work, str(self.folder)]
        return self._stack.enter_context(killed(children.python(work, environment, stderr=subprocess.DEVNULL)))

    def start_again(self, rank: int) -> None:
        """Another process of a rank whose last one has ended."""
        self.workers[rank] = self._new(rank)

    def add(self) -> None:
        """One more worker, where there may be more than at the start (`TFPS_MAX_WORKERS`)."""
        self.workers.append(self._new(len(self.workers)))

    def end(self, process: subprocess.Popen[str], how: int = signal.SIGKILL) -> float:
        """Sends a signal; returns when."""
        process.send_signal(how)
        if how == signal.SIGKILL:
            process.wait(ANSWER_S)
        return time.monotonic()

    def join(self) -> float:
        """Lets another pserver take part; returns when it begins to."""
        alive = next(at for at, each in zip(self._addresses, self.pservers, strict=True) if each.poll() is None)
        self.pservers.append(self._new_pserver(f"--join={alive}"))
        self._addresses.append(self._address(self.pservers[-1]))
        return time.monotonic()

    def steps(self, rank: int) -> list[Step]:
        """All that the processes of a rank have taken."""
        return read_steps(self.folder / f"{rank}.times")


def read_steps(path: pathlib.Path) -> list[Step]:
    """What a worker has written; none if it has not begun."""
    with contextlib.suppress(FileNotFoundError):
        data = path.read_bytes()
        return [Step(*each) for each in TIME.iter_unpack(data[: len(data) // TIME.size * TIME.size])]
    return []


@contextlib.contextmanager
def killed(context: contextlib.AbstractContextManager[subprocess.Popen[str]]) -> Iterator[subprocess.Popen[str]]:
    """A process that may be stopped, and need not end by itself."""
    with context as process:
        try:
            yield process
        finally:
            process.kill()
