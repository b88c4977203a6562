"""Runs scripts in processes that have imported TensorFlow and Keras already.

The import takes 7 s of processor time, more than most scripts of tests: one process imports, and forks for each script.
With `PRELOADED_USAGE=FILE` each script adds to FILE, in a line of JSON, the test, its arguments and its processor time.
All processes of a test run share it. The script is `__main__` of its process and ends as under a Python of its own:
uncaught errors, exit handlers, signals.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

LARGEST = 2**17  # bytes of a request, most of them environment
NAMESPACE = "PRELOADED_NAMESPACE"  # variable of a script's environment: the `ip netns` whose network it has
_CLONE_NEWNET = 0x40000000
_FOLDER, _ALIVE = "PRELOADED_FOR_TESTS", "alive"  # variable that names the folder of sockets; a file in it


class Process:
    """A script that runs, with what tests use of `subprocess.Popen`; stdout and stderr are one text."""

    def __init__(self, stdout: TextIO, status: TextIO) -> None:
        self.stdout, self._status = stdout, status  # the process' number stays its own until `status` is closed
        self.pid = int(status.readline())
        self.returncode: int | None = None
        self._read: list[str] = []
        self._reader = threading.Thread(target=self._read_all, daemon=True)

    def _read_all(self) -> None:
        with self.stdout, self._status:
            self._read.append(self.stdout.read())
            self.returncode = int(self._status.readline())

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it prints from now until it ends.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        if not self._reader.ident:
            self._reader.start()
        self._reader.join(timeout)
        if self._reader.is_alive():
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self._read[0], None

    def send_signal(self, number: int) -> None:
        """Nothing happens if it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(number: int, script: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> Process:
    """Runs `script`, forked from process `number`: those of another number hash texts in another order."""
    ready()  # both: ranks that start together join together
    out, theirs = os.pipe()
    status, reports = socket.socketpair()
    request = json.dumps([str(script), list(arguments), dict(environment)]).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as requests:
        requests.connect(str(_preloaded(number)))
        socket.send_fds(requests, [request], [theirs, reports.fileno()])
    os.close(theirs)
    reports.close()
    return Process(os.fdopen(out), os.fdopen(status.detach()))


def ready() -> None:
    """Starts the preloaded processes, which have this process' network."""
    for number in range(2):
        _preloaded(number)


def share(folder: Path) -> None:
    """Makes this process, and all that it starts, share preloaded processes, which end with it."""
    os.environ[_FOLDER] = str(folder)
    os.mkfifo(folder / _ALIVE)
    os.open(folder / _ALIVE, os.O_RDWR | os.O_CLOEXEC)  # the only end for writing, open as long as this process lives


@functools.cache
def _preloaded(number: int) -> Path:
    """Where process `number` takes requests, once it does; starts it if no other process of the test run has."""
    folder = Path(os.environ[_FOLDER])
    where = folder / str(number)
    with (folder / f"{number}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not where.exists():
            process = subprocess.Popen(
                [sys.executable, __file__, str(where)],
                # Threads would not survive the fork; OpenBLAS starts some when NumPy is imported.
                env={
                    **os.environ,
                    "OPENBLAS_NUM_THREADS": "1",
                    "PYTHONHASHSEED": str(number),
                    "TF_CPP_MIN_LOG_LEVEL": "2",
                },
                stdout=subprocess.PIPE,
                start_new_session=True,  # others use it, too, when this process is interrupted
            )
            assert process.stdout is not None
            assert process.stdout.readline(), "the preloaded process ended"
    return where


def _serve(where: Path) -> str | None:
    """Forks for each request. Returns the script's path in the new process, None once the test run has ended."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(str(where))
    listening.listen(64)
    alive = os.open(where.parent / _ALIVE, os.O_RDONLY | os.O_NONBLOCK)
    print("ready", flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    events = select.poll()
    events.register(listening, select.POLLIN)
    events.register(alive, 0)  # only that its other end is closed
    while True:
        ready = [descriptor for descriptor, _ in events.poll()]
        if listening.fileno() not in ready:
            return None
        requests, _ = listening.accept()
        message, descriptors, *_ = socket.recv_fds(requests, LARGEST, 2)
        requests.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if len(descriptors) < 2:
            continue  # who asked is gone
        if os.fork():
            for each in descriptors:
                os.close(each)
            continue
        listening.close()
        os.close(alive)
        out, reports = descriptors
        if child := os.fork():  # this process only waits, to say how the script has ended
            os.close(out)
            os.write(reports, b"%d\n" % child)
            ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            assert ended is not None  # only WNOHANG gives None
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            os.write(reports, b"%d\n" % code)
            os.read(reports, 1)  # until nobody can send it a signal any more
            _, _, used = os.wait4(child, 0)
            if usage := os.environ.get("PRELOADED_USAGE"):
                script, arguments, environment = json.loads(message)
                row = environment.get("PYTEST_CURRENT_TEST"), script, arguments, used.ru_utime + used.ru_stime
                with Path(usage).open("a") as file:
                    file.write(json.dumps(row) + "\n")
            os._exit(0)
        os.close(reports)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.close(out)
        script, arguments, environment = json.loads(message)
        os.environ.clear()
        os.environ.update(environment)
        if NAMESPACE in environment:
            _enter(environment[NAMESPACE])
        sys.argv[:] = [script, *arguments]
        sys.path[:1] = [str(Path(script).parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
        return str(script)


def _enter(namespace: str) -> None:
    """Gives this process, which has one thread, the network of a namespace of `ip netns`."""
    with Path("/var/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}", namespace)


if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).resolve().parents[2]))  # this copy of tfps
    import keras  # noqa: F401
    import tensorflow  # noqa: F401
    import training  # noqa: F401

    import tfps.strategy.strategy  # noqa: F401

    gc.freeze()  # no collection touches, and so copies, what the processes share
    _script = _serve(Path(sys.argv[1]))
    if _script:
        __file__ = _script
        exec(compile(Path(_script).read_text(encoding="utf-8"), _script, "exec", dont_inherit=True))
