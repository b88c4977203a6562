"""Child processes that benchmarks talk with, line by line."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import IO, cast

END_S = 20.0
_SWITCHES = re.compile(r"^voluntary_ctxt_switches:\s+(\d+)", re.MULTILINE)
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


def memory_bytes(pid: int) -> int:
    """What a process has in memory (PSS: pages that it shares are divided by who shares them); 0 once it has ended."""
    try:
        text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))


class Peak:
    """Of what `read` returns, every `period_s` on a thread of its own; at least once."""

    def __init__(self, read: Callable[[], int], period_s: float) -> None:
        self.value = 0
        self._read, self._period_s = read, period_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak", daemon=True)

    def __enter__(self) -> Peak:  # noqa: PYI034 (typing.Self is not in Python 3.10)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.value = max(self.value, self._read())
            if self._ended.wait(self._period_s):
                return


def switches(pid: int) -> dict[int, int]:
    """How often each thread of a process has given up its processor to wait so far, by the thread's id."""
    found = {}
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found[int(task.name)] = switches_in((task / "status").read_text())
    return found


def switches_in(status: str) -> int:
    """Of the text of a thread's `status` in /proc."""
    if (match := _SWITCHES.search(status)) is None:
        raise ValueError(f"a thread's status must have voluntary_ctxt_switches, got {status!r}")
    return int(match[1])


def switches_between(before: Mapping[int, int], after: Mapping[int, int]) -> int:
    """Of all threads that are there in the end; those of a thread that has ended meanwhile are not known."""
    return sum(count - before.get(thread, 0) for thread, count in after.items())
