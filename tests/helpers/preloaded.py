"""Runs scripts in processes that have imported TensorFlow and Keras already.

The import takes 7 s of processor time, more than most scripts of tests: one process imports, and forks for each script.
The script is `__main__` of its process and ends as under a Python of its own: uncaught errors, exit handlers, signals.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

START_S = 120.0
FIRST_FREE = 3  # file descriptor after those of stdin, stdout and stderr
LARGEST = 2**17  # bytes of a request, most of them environment


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
    out, theirs = os.pipe()
    status, reports = socket.socketpair()
    request = json.dumps([str(script), list(arguments), dict(environment)]).encode()
    socket.send_fds(_preloaded(number), [request], [theirs, reports.fileno()])
    os.close(theirs)
    reports.close()
    return Process(os.fdopen(out), os.fdopen(status.detach()))


@functools.cache
def _preloaded(number: int) -> socket.socket:
    """Starts process `number`; what it takes requests from."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        # Threads would not survive the fork; OpenBLAS starts some when NumPy is imported.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": str(number), "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    atexit.register(process.wait, START_S)
    atexit.register(ours.close)
    return ours


def _serve(requests: socket.socket) -> str | None:
    """Forks for each request. Returns the script's path in the new process, None here at the end."""
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, LARGEST, 2)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not message:
            return None
        if os.fork():
            for each in descriptors:
                os.close(each)
            continue
        requests.close()
        out, reports = descriptors
        if child := os.fork():  # this process only waits, to say how the script has ended
            os.close(out)
            os.write(reports, b"%d\n" % child)
            ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            assert ended is not None  # only WNOHANG gives None
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            os.write(reports, b"%d\n" % code)
            os.read(reports, 1)  # until nobody can send it a signal any more
            os.waitpid(child, 0)
            os._exit(0)
        os.close(reports)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.close(out)
        script, arguments, environment = json.loads(message)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[:] = [script, *arguments]
        sys.path[:1] = [str(Path(script).parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
        return str(script)


if __name__ == "__main__":
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    _script = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _script:
        __file__ = _script
        exec(compile(Path(_script).read_text(encoding="utf-8"), _script, "exec", dont_inherit=True))
