"""This host: open files, memory, memory to share."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tfps.config import Config
from tfps.doctor.report import Check
from tfps.wire.memory import machine_bytes
from tfps.wire.shared_memory import Arena

_FILES, _FILES_PER_PEER = 128, 4  # that a process opens by itself, and for each worker or pserver
_USUAL_FILES = 1024
_LOW_BYTES = 2**30
GIB = 2**30
_CGROUP = Path("/sys/fs/cgroup")
# Of version 2 and of version 1: limit, what is used, statistics, and which of these are pages that the system can drop.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def open_files(peers: int, limit: int | None = None) -> Check:
    """Whether a process may open enough files.

    Args:
        peers: pservers and workers that it talks to.
        limit: None: this process's.
    """
    if limit is None:
        limit = _limit()
    if limit is None:
        return Check("open files", "skipped", "this system has no such limit")
    least = _FILES + _FILES_PER_PEER * peers
    values = {"limit": limit, "least": least}
    if limit < least:
        enough = max(_USUAL_FILES, 1 << (least - 1).bit_length())
        advice = f"a process may open {limit} files and needs {least} for {peers} peers: ulimit -n {enough}"
        return Check("open files", "failed", f"{limit}, needs {least}", advice, "low", values)
    if limit < _USUAL_FILES:
        advice = f"a process may open {limit} files only, which data pipelines often exceed: ulimit -n {_USUAL_FILES}"
        return Check("open files", "warning", f"{limit}", advice, "low", values)
    return Check("open files", "ok", f"{limit}", values=values)


def memory() -> Check:
    """How much this host, or its container, has and has left."""
    total, left = machine_bytes(), available_bytes()
    values = {"total_bytes": total, "available_bytes": left}
    if left is None:
        return Check("memory", "ok", f"{total / GIB:.1f} GiB", values=values)
    text = f"{left / GIB:.1f} of {total / GIB:.1f} GiB free"
    if left < _LOW_BYTES:
        advice = f"only {left / GIB:.1f} GiB of memory is free; TensorFlow alone takes about half a GiB: end other work"
        return Check("memory", "warning", text, advice, "low", values)
    return Check("memory", "ok", text, values=values)


def shared_memory(config: Config) -> Check:
    """Whether this host has memory to share with pservers on it."""
    if not config.shared_memory:
        return Check("shared memory", "skipped", "turned off: TFPS_SHARED_MEMORY=0", values={"usable": False})
    try:
        arena = Arena()
        region = arena.allocate(1)
        arena.close()
    except OSError as error:
        region, why = None, str(error)
    else:
        why = "the system gives none"
    if region is not None:
        return Check("shared memory", "ok", "this host has it", values={"usable": True})
    advice = f"slices to pservers on this host go through sockets, at about twice the CPU: no memory to share ({why})"
    return Check("shared memory", "warning", "not here", advice, "none", {"usable": False})


def available_bytes() -> int | None:
    """What is left of the machine's memory, or of its container's if that is less; None if the system does not tell."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        found.append(int(text.partition("MemAvailable:")[2].split()[0]) * 1024)
    if (left := container_available_bytes(_CGROUP)) is not None:
        found.append(left)
    return min(found, default=None)


def container_available_bytes(cgroup: Path) -> int | None:
    """What is left below the limit of a container; None: it has none. Cached files count as free, as for a kubelet."""
    for limit, used, statistics, droppable in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            most, taken = (int((cgroup / file).read_text(encoding="utf-8")) for file in (limit, used))
            return max(most - max(taken - _statistic(cgroup / statistics, droppable), 0), 0)
    return None


def _statistic(file: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0


def _limit() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft
