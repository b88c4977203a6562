"""Launchers with small scripts as processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import psutil
import pytest

NEEDS_POSIX = pytest.mark.skipif(sys.platform == "win32", reason="tfps_launch needs Linux or macOS")
ROOT = Path(__file__).resolve().parent.parent.parent
END_S = 60.0  # for a launcher to end
DEAF = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready")
while True:
    signal.pause()
"""
WriteScript = Callable[[str], Path]  # the fixture write_script


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tfps.launch", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **more}


def launch(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs a launcher to its end; `more`: variables of its environment."""
    return subprocess.run(
        command(*arguments), env=environment(**more), capture_output=True, text=True, timeout=END_S, check=False
    )


class Running:
    """A launcher whose script prints "ready" and then waits."""

    def __init__(self, *arguments: object) -> None:
        self.popen = subprocess.Popen(
            command(*arguments), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.processes: list[psutil.Process] = []  # those that it started, and what they have started

    def wait_ready(self, workers: int) -> None:
        ready = 0
        while ready < workers:
            line = self.output.readline()
            assert line, f"ended too early: {self.popen.stderr and self.popen.stderr.read()}"
            ready += line.rstrip().endswith("] ready")
        self.processes = psutil.Process(self.popen.pid).children(recursive=True)

    @property
    def output(self) -> IO[str]:
        assert self.popen.stdout is not None
        return self.popen.stdout

    def finish(self) -> tuple[int, str]:
        _, errors = self.popen.communicate(timeout=END_S)
        return self.popen.returncode, errors

    def survivors(self) -> list[psutil.Process]:
        _, alive = psutil.wait_procs(self.processes, timeout=10)
        # Whoever has become an orphan may be dead and only not collected.
        return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
