"""Child processes that benchmarks talk with, line by line."""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import IO, cast

END_S = 20.0
Start = Callable[..., "subprocess.Popen[str]"]  # as subprocess.Popen; `Host.popen` starts on another host


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """The process, which is ended with the context. Its stdin and stdout are pipes."""
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=END_S)


def python(
    arguments: Sequence[str],
    variables: Mapping[str, str] = MappingProxyType({}),
    popen: Start = subprocess.Popen,
    stderr: int | None = None,
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Starts this Python with `arguments`, as of this copy of tfps and its tools; see `ended`.

    Args:
        variables: added to the environment.
        popen: what starts it.
    """
    root = pathlib.Path(__file__).resolve().parents[1]
    process = popen(
        [sys.executable, "-u", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root), **variables},
    )
    return ended(process)


def tell(process: subprocess.Popen[str], line: str) -> None:
    """Writes one line to its stdin."""
    stdin = cast("IO[str]", process.stdin)
    stdin.write(f"{line}\n")
    stdin.flush()


def answer(process: subprocess.Popen[str], timeout_s: float) -> str:
    """The next line of its stdout.

    Raises:
        RuntimeError: it has ended, or does not answer in time.
    """
    stdout = cast("IO[str]", process.stdout)
    if not select.select([stdout], [], [], timeout_s)[0]:
        raise RuntimeError(f"{process.args!r} must answer within {timeout_s:.0f} s")
    line = stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended with {process.wait(END_S)}")
    return line


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
