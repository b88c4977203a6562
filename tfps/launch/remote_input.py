"""Standard inputs of processes on other hosts: what to run, then signs of life, and their end."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import IO

BEAT_S = 10.0  # between signs of life


class RemoteInput:
    """The pipe to the standard input of one process. For any thread.

    Args:
        name: of the process.
    """

    def __init__(self, name: str, pipe: IO[bytes]) -> None:
        self._name, self._pipe = name, pipe
        self._lock = threading.Lock()  # guards that _pipe is open: its number may soon be another file's
        os.set_blocking(pipe.fileno(), False)

    def send(self, line: bytes) -> None:
        """Says what to run.

        Raises:
            OSError: it does not fit into a pipe at once.
        """
        try:
            sent = os.write(self._pipe.fileno(), line)
        except BrokenPipeError:
            return  # the process has ended already, and its output says why
        if sent < len(line):
            raise OSError(f"{self._name}: arguments and variables of {len(line)} bytes are too long to send")

    def beat(self) -> None:
        """Says that the launcher lives."""
        with self._lock:
            if not self._pipe.closed:
                with contextlib.suppress(OSError):  # the pipe is full, or its reader gone
                    os.write(self._pipe.fileno(), b"\n")

    def close(self) -> None:
        """Asks for the end."""
        with self._lock:
            self._pipe.close()


class Beats:
    """Thread "tfps-launch-beats" sends signs of life, also while nobody reads the launcher's output (Ctrl-S)."""

    def __init__(self) -> None:
        self._inputs: list[RemoteInput] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, remote_input: RemoteInput) -> None:
        self._inputs.append(remote_input)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tfps-launch-beats", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(BEAT_S):
            for remote_input in list(self._inputs):
                remote_input.beat()
