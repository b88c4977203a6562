"""A pserver as a process whose log, threads, descriptors and memory are watched; good workers that train on it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import jobs
import numpy as np
from guarded import serving
from jobs import Cluster

from tfps.config import Config
from tfps.exchange.interface import BucketSpec
from tfps.worker.worker import Worker

MIB = 2**20
WRONG = re.compile(r"Traceback|its log says where|tfps: failed|Exception (?:calling|iterating)|Warning:|Segmentation")


class Use(NamedTuple):
    """What a process takes."""

    threads: int
    descriptors: int
    resident: int  # bytes


def use_of(process: int | str) -> Use:
    """Of a process, by its id or "self"."""
    folder, numbers = Path(f"/proc/{process}"), dict[str, int]()
    for line in (folder / "status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("Threads", "RssAnon"):
            numbers[name] = int(rest.split()[0])
    return Use(numbers["Threads"], sum(1 for _ in (folder / "fd").iterdir()), 1024 * numbers["RssAnon"])


@dataclass
class Watched:
    """A running pserver."""

    address: str
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)  # of its log

    def use(self) -> Use:
        return use_of(self.process.pid)

    def check(self) -> None:
        """Raises AssertionError if it has ended, or logged what nobody expects."""
        assert self.process.poll() is None, f"the pserver has ended with {self.process.returncode}: {self.lines[-20:]}"
        found = [line for line in list(self.lines) if WRONG.search(line)]
        assert not found, "".join(self.lines[-60:])

    def comes_back_to(self, before: Use, threads: int, descriptors: int, resident: int) -> Use:
        """Waits until it takes no more than that above `before`: what has ended may take a moment to go."""
        now = self.use()

        def back() -> bool:
            nonlocal now
            now = self.use()
            more = (each - then for each, then in zip(now, before, strict=True))
            return all(each <= most for each, most in zip(more, (threads, descriptors, resident), strict=True))

        with contextlib.suppress(TimeoutError):
            jobs.poll(back)
        more = [each - then for each, then in zip(now, before, strict=True)]
        assert back(), f"more than before, {before}: {more}, allowed {[threads, descriptors, resident]}"
        return now


@contextlib.contextmanager
def watching(*options: str) -> Iterator[Watched]:
    with serving(*options) as (address, process):
        watched = Watched(address, process)
        assert process.stderr is not None
        reader = threading.Thread(target=lambda log: watched.lines.extend(log), args=(process.stderr,), daemon=True)
        reader.start()
        try:
            yield watched
        finally:
            process.kill()
            reader.join()  # before its end of the pipe is closed


SUMS = [BucketSpec(("a",), "sum", 40_000, "float32", 1), BucketSpec(("b",), "sum", 400, "int64", 0)]
GOOD = Config(slice_bytes=4096, connect_timeout_s=jobs.DEADLINE_S, step_timeout_s=jobs.DEADLINE_S)
FAR = Config(**{**GOOD.__dict__, "shared_memory": False})


class Training:
    """Good workers, each on a thread, which train until told to stop, and check each sum to the last bit."""

    def __init__(self, cluster: Cluster, address: str, workers: int) -> None:
        self._workers = workers
        self.steps = 0  # that rank 0 has taken
        self._stop = threading.Event()
        self._cluster, self._address = cluster, address
        self._errors: list[BaseException] = []
        members = jobs.together(*(functools.partial(self._join, rank) for rank in range(workers)))
        jobs.declare(members, *SUMS)
        self._threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in members]
        for thread in self._threads:
            thread.start()

    def _join(self, rank: int) -> Worker:
        return self._cluster.worker([self._address], rank, config=FAR if rank % 2 else GOOD)

    def _run(self, worker: Worker) -> None:
        try:
            for step in itertools.count():
                stopping = self._stop.is_set()
                numbers = np.full(10_000, step % 1000 + worker.rank, np.float32)
                # The last number counts the ranks that want to stop, so that all stop at the same step.
                counts = np.full(50, step, np.int64)
                counts[-1] = stopping
                pushed = [jobs.push(worker, 0, numbers), jobs.push(worker, 1, counts)]
                expected = self._workers * (step % 1000) + sum(range(self._workers))
                assert (jobs.summed(pushed[0].wait()) == expected).all(), f"step {step} has a wrong sum"
                total = jobs.summed(pushed[1].wait(), "int64")
                assert (total[:-1] == self._workers * step).all(), f"step {step} has a wrong sum"
                if worker.rank == 0:
                    self.steps = step + 1
                if total[-1]:
                    break
            worker.close()
        except BaseException as error:
            self._errors.append(error)

    def stop(self) -> int:
        """Ends the job; returns how many steps it took. Raises what a worker raised."""
        self._stop.set()
        for thread in self._threads:
            thread.join(jobs.DEADLINE_S)
        assert not any(thread.is_alive() for thread in self._threads), "a good worker is not served"
        if self._errors:
            raise self._errors[0]
        return self.steps

    def reaches(self, steps: int) -> None:
        """Waits until it has taken so many, for as long as it takes any."""
        while self.steps < steps:
            then = self.steps
            jobs.poll(lambda: self.steps > then or bool(self._errors))  # noqa: B023 (called at once)
            if self._errors:
                raise self._errors[0]

    def goes_on(self) -> None:
        """Waits for steps that begin and end from now on."""
        self.reaches(self.steps + 3)
