"""What the netlabs of a machine share: names of their parts, owners, removal, the programs that they need."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

MAX_LABS = 256
KILL_S = 10.0  # how long the system may take to end a process that was killed
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # besides SIGINT, which Python handles
RUN = Path("/run/netlab")  # NUMBER.json of each lab: its owner. "lock" guards claims and removals, has the next number
NAMESPACES = Path("/run/netns")
CONFIGURATION = Path("/etc/netns")  # `ip netns exec X` shows the files of directory X there instead of those in /etc
_NAME = re.compile(r"netlab(\d+)-\w+")
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


class NetlabError(RuntimeError):
    """A lab cannot be made, or does not do what it should."""


def unavailable() -> str | None:
    """Why there can be no labs here and what to do, or None."""
    if not sys.platform.startswith("linux"):
        return f"netlab needs Linux, this is {sys.platform}: use a machine with Linux"
    if os.geteuid() != 0:
        return f"netlab needs root to make network namespaces, this is user {os.geteuid()}: use sudo"
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(tool, path=_PATH) is None:
            return f"netlab needs the program {tool}, which is not on PATH: install {package}"
    try:
        trial = "tc qdisc add dev lo root tbf rate 1mbit burst 10000 limit 10000"
        run("unshare", "--net", "--mount", "--uts", *trial.split())
    except NetlabError as error:
        return f"netlab needs to make namespaces and to shape in them, got {error}: in Docker, use --privileged"
    return None


def clean() -> list[str]:
    """Removes the labs whose owners have ended, with what runs in them; their names."""
    if (reason := unavailable()) is not None:
        raise NetlabError(reason)
    with signals_held(), _locked():
        return [f"netlab{number}" for number in _reclaim()]


def claim() -> int:
    """A number for a new lab, which is ours from now on."""
    with _locked() as file:
        _reclaim()
        # Not the lowest that is free: what speaks of a lab of the past should not mean another one.
        first = int(file.read() or 0)
        for offset in range(MAX_LABS):
            number = (first + offset) % MAX_LABS
            try:
                owner = (RUN / f"{number}.json").open("x")
            except FileExistsError:
                continue
            with owner:
                json.dump({"pid": os.getpid(), "started": _started(os.getpid())}, owner)
            file.truncate(0)
            file.write(str((number + 1) % MAX_LABS))
            return number
    raise NetlabError(f"there can be {MAX_LABS} labs at a time, and all have owners that run: end one")


def _reclaim() -> list[int]:
    """Removes labs without a living owner, and what is left of labs in /etc after a reboot. Under the lock."""
    names = [path.name for directory in (NAMESPACES, CONFIGURATION) for path in directory.glob("netlab*")]
    numbers = {int(match[1]) for name in names if (match := _NAME.fullmatch(name))}
    numbers |= {int(path.stem) for path in RUN.glob("*.json")}
    abandoned = [number for number in sorted(numbers) if not _has_owner(number)]
    for number in abandoned:
        remove(number)
    return abandoned


def _has_owner(number: int) -> bool:
    try:
        owner = json.loads((RUN / f"{number}.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # malformed: the owner was killed while it wrote
        return False
    return bool(_started(owner["pid"]) == owner["started"])


def _started(pid: int) -> int | None:
    """When the process started, in clock ticks, which tells it from later ones of that id; None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def remove(number: int) -> None:
    """Ends and deletes everything of a lab. Its number is free when all else is gone."""
    for namespace in sorted(path.name for path in NAMESPACES.glob(f"netlab{number}-*")):
        _kill_all(namespace)
        run("ip", "netns", "del", namespace)
    for directory in CONFIGURATION.glob(f"netlab{number}-*"):
        shutil.rmtree(directory)
    (RUN / f"{number}.json").unlink(missing_ok=True)


def _kill_all(namespace: str) -> None:
    deadline = time.monotonic() + KILL_S
    while pids := [int(pid) for pid in run("ip", "netns", "pids", namespace).split()]:
        for pid in pids:  # what they fork meanwhile is in the next list
            with contextlib.suppress(ProcessLookupError), _pidfd(pid) as fd:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                poll = select.poll()
                poll.register(fd, select.POLLIN)
                if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    raise NetlabError(
                        f"process {pid} in {namespace} must end after SIGKILL, still runs: try again later"
                    )


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked() -> Iterator[TextIO]:
    RUN.mkdir(parents=True, exist_ok=True)
    with (RUN / "lock").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Puts off signals that ask us to end: what is half removed would stay."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    old: dict[int, Callable[[int, FrameType | None], object] | int | None] = {
        number: signal.signal(number, lambda got, _: held.append(got)) for number in (signal.SIGINT, *ENDING_SIGNALS)
    }
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)


def tool(name: str) -> str:
    return shutil.which(name, path=_PATH) or name


def run(program: str, *arguments: str) -> str:
    """Its output. In a session of its own: Ctrl-C is for us to handle."""
    argv = [tool(program), *arguments]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, start_new_session=True, env={"PATH": _PATH})
    except OSError as error:
        raise NetlabError(f"cannot run {program}: {error}") from None
    if done.returncode != 0:
        raise NetlabError(
            f"`{' '.join([program, *arguments])}`: {done.stderr.strip() or f'exit code {done.returncode}'}"
        )
    return done.stdout
