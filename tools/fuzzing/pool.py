"""Warm processes that run one generated program after the other."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import linecache
import multiprocessing
import os
import pathlib
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import MappingProxyType
from typing import cast

from tfps.types import Argument, Value
from tools.children import cpu_s

DEVICES = 4  # logical CPUs of each process: for the replicas of MirroredStrategy, too
IDLE_S, BUSY_S = 90.0, 2.0  # processes hang if all that have not answered took no more processor time meanwhile
TIMEOUT_S = 900.0  # of a case, however busy
AGREED = 4  # batches that workers may have agreed on when one leaves
CASES = 150  # after which processes are renewed: TensorFlow keeps graphs


@dataclass(frozen=True)
class Task:
    """A program for one process.

    Args:
        program: its text.
        function: the one that makes its strategy: "strategy" or "reference".
        folder: for its files.
        environment: what is added to the process' environment meanwhile.
    """

    program: str
    function: str
    folder: str
    environment: Mapping[str, str]
    departure: Departure | None = None


@dataclass(frozen=True)
class Departure:
    """A worker leaves between two batches of `fit`, and comes back (Config.min_workers).

    Args:
        batches: after so many of them, of all calls.
        leaves: whether this task is the one that leaves; the others wait at a later batch until it may join again.
        over: a file, which is there once the worker that has come back has ended.
    """

    batches: int
    leaves: bool
    over: str


@dataclass(frozen=True)
class Outcome:
    """What a program has found, or the error that it ended with (its last line first)."""

    found: Mapping[str, Value] | None
    error: str = ""


LEFT = Outcome(None, "has left")


def _serve(connection: Connection, log: str) -> None:
    """One process of the pool."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.register(signal.SIGUSR1, sys.stderr)  # where it hangs
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
    connection.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            connection.send(_run(connection.recv()))


def _run(task: Task) -> Outcome:
    import keras

    saved = dict(os.environ)
    os.environ.update(task.environment)
    keras.backend.clear_session()
    strategy: Argument = None
    with_departure = contextlib.ExitStack()
    try:
        namespace: dict[str, Argument] = {"__name__": "generated"}
        # AutoGraph wants the source of functions: without, a loop over a dataset inside one would never end.
        path = pathlib.Path(task.folder) / f".program{os.getpid()}.py"
        path.write_text(task.program, encoding="utf-8")
        linecache.checkcache()
        exec(compile(task.program, str(path), "exec"), namespace)
        strategy = namespace[task.function]()
        if task.departure is not None:
            with_departure.callback(_depart(task.departure, strategy))
        return Outcome(dict(namespace["main"](strategy, task.folder)))
    except BaseException as error:  # KeyboardInterrupt too: programs raise it
        return Outcome(None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    finally:
        with_departure.close()
        if hasattr(strategy, "close"):
            with contextlib.suppress(Exception):
                strategy.close()
        os.environ.clear()
        os.environ.update(saved)


def _depart(departure: Departure, strategy: Argument) -> Callable[[], None]:
    """Does in this process what `departure` says; returns what undoes that."""
    import keras

    kind, count = keras.callbacks.CallbackList, itertools.count(1)
    begin, end = kind.on_train_batch_begin, kind.on_train_batch_end
    waits_at, leaves = departure.batches + AGREED, departure.leaves

    def on_begin(callbacks: Argument, *args: object, **options: object) -> None:
        number = next(count)
        callbacks.tfps_fuzzing = number
        if number == waits_at and not departure.leaves:
            extended, deadline_s = strategy.extended, time.monotonic() + TIMEOUT_S / 4
            while time.monotonic() < deadline_s and not pathlib.Path(departure.over).exists():
                if extended.exchange.joining.joiners(extended.training.training):
                    break
                time.sleep(0.05)
        begin(callbacks, *args, **options)

    def on_end(callbacks: Argument, *args: object, **options: object) -> None:
        end(callbacks, *args, **options)
        nonlocal leaves
        if leaves and callbacks.tfps_fuzzing >= departure.batches:  # Ctrl-C may have come at that one
            leaves = False  # a second signal would end it at once, within a step that may follow
            os.kill(os.getpid(), signal.SIGTERM)

    def undo() -> None:
        kind.on_train_batch_begin, kind.on_train_batch_end = begin, end

    kind.on_train_batch_begin, kind.on_train_batch_end = on_begin, on_end
    return undo


@dataclass(frozen=True)
class _Child:
    """One process of the pool and the connection to it."""

    process: SpawnProcess
    connection: Connection

    @property
    def pid(self) -> int:
        return cast(int, self.process.pid)


class Pool:
    """Processes 0 to `count` - 1, started when they are needed first. Used by one thread."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._folder = tempfile.TemporaryDirectory(prefix="tfps-fuzzing-")
        self._children: dict[int, _Child] = {}
        self._cases = 0

    def __enter__(self) -> Pool:  # noqa: PYI034  # typing.Self is younger than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self._end(range(self.count))
        self._folder.cleanup()

    def log(self, process: int) -> str:
        """The end of what a process has printed."""
        with contextlib.suppress(OSError):
            return self._log(process).read_text(errors="replace")[-12000:]
        return ""

    def run(self, tasks: Mapping[int, Task], again: Mapping[int, int] = MappingProxyType({})) -> dict[int, Outcome]:
        """Runs each task on the process with its number, all at the same time.

        But those in `again` begin when the process that it names has died, which may be. They have no Outcome if not.

        A process that died or hangs has an Outcome with an error. The next case finds a new process in place of each
        that had an error: once one of TensorFlow's collectives is aborted, it refuses all others of that process.
        """
        if self._cases >= CASES:
            self._end(range(self.count))
            self._cases = 0
        self._start(number for number in range(self.count) if number not in self._children)
        self._cases += 1
        for number in tasks.keys() - again.keys():
            self._children[number].connection.send(tasks[number])
        outcomes: dict[int, Outcome] = self._answers(tasks.keys() - again.keys(), tasks, again)
        late = tasks.keys() - outcomes.keys() - {number for number in again if outcomes.get(again[number]) is not LEFT}
        if late:
            alive = [number for number in late if self._children[number].process.is_alive()]
            for number in alive:
                os.kill(self._children[number].pid, signal.SIGUSR1)
            time.sleep(1.0)  # until they have said where they are
            for number in late:
                how = "hangs" if number in alive else "died"
                outcomes[number] = Outcome(None, f"{how}: no answer\n{self.log(number)}")
        # No public function makes operations what they were before.
        changed = {number for number, task in tasks.items() if "enable_op_determinism()" in task.program}
        self._end(number for number, outcome in outcomes.items() if outcome.found is None or number in changed)
        return outcomes

    def _answers(
        self,
        numbers: Iterable[int],
        tasks: Mapping[int, Task] = MappingProxyType({}),
        again: Mapping[int, int] = MappingProxyType({}),
    ) -> dict[int, Outcome]:
        """What the processes answer, by their numbers: until all have, one has died, or all others just wait.

        Machines are busy: a process that hangs is told from one that is slow by the processor time that it takes.
        """
        waiting: dict[Connection, int] = {self._children[number].connection: number for number in numbers}
        answers: dict[int, Outcome] = {}
        used, since, deadline = 0.0, time.monotonic(), time.monotonic() + TIMEOUT_S
        while waiting and time.monotonic() < deadline:
            ready = cast("list[Connection]", wait(list(waiting), 5.0))
            for connection in ready:
                number = waiting.pop(connection)
                try:
                    answers[number] = connection.recv()
                except (EOFError, OSError):
                    follows = [each for each, before in again.items() if before == number]
                    if not follows:
                        return answers
                    answers[number] = LEFT
                    for each in follows:
                        self._children[each].connection.send(tasks[each])
                        waiting[self._children[each].connection] = each
                if number in again and (departure := tasks[number].departure) is not None:
                    pathlib.Path(departure.over).touch()
                used, since = 0.0, time.monotonic()
            now = sum(_cpu_s(self._children[number].pid) for number in waiting.values())
            if now - used > BUSY_S:
                used, since = now, time.monotonic()
            if time.monotonic() - since > IDLE_S:
                return answers
        return answers

    def _log(self, process: int) -> pathlib.Path:
        return pathlib.Path(self._folder.name) / f"log.{process}"

    def _start(self, numbers: Iterable[int]) -> None:
        context = multiprocessing.get_context("spawn")
        started = list(numbers)
        for number in started:
            ours, theirs = context.Pipe()
            self._log(number).unlink(missing_ok=True)
            process = context.Process(target=_serve, args=(theirs, str(self._log(number))), daemon=True)
            process.start()
            theirs.close()
            self._children[number] = _Child(process, ours)
        for number in set(started) - self._answers(started).keys():
            raise RuntimeError(f"process {number} of the pool did not start: {self.log(number)}")

    def _end(self, numbers: Iterable[int]) -> None:
        """Kills these processes."""
        for child in [self._children.pop(number) for number in numbers if number in self._children]:
            child.process.kill()
            child.process.join()
            child.connection.close()


def _cpu_s(pid: int) -> float:
    try:
        return cpu_s(pid)
    except OSError:
        return 0.0
