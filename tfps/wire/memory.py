"""Memory for slices: malloc tuning, and arrays that TensorFlow takes over without a copy."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib

import numpy as np
from numpy.typing import NDArray

_RESIDENT = ("RssAnon", "RssFile")  # without RssShmem, workers' memory mapped by a pserver
ALIGNMENT = 64  # bytes; TensorFlow copies buffers aligned to less

# glibc's malloc.h. Larger mmap thresholds are refused.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_SETTINGS = ((_M_MMAP_THRESHOLD, 32 * 2**20), (_M_TRIM_THRESHOLD, 512 * 2**20), (_M_TOP_PAD, 16 * 2**20))


def tune_malloc(*, one_arena: bool = False) -> bool:
    """Makes glibc's malloc keep freed memory for the next slice instead of giving it back to the kernel.

    By default every message above 128 KiB is mapped, faulted in page by page and unmapped again, which halves the
    throughput of 1 MiB slices. Process-wide; may be called again. False without glibc: nothing changes.

    Args:
        one_arena: for a dedicated process, such as a pserver: threads share free memory. Slices are allocated on one
            thread and freed on another, so each thread's arena would keep its peak.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    settings = (*_SETTINGS, (_M_ARENA_MAX, 1)) if one_arena else _SETTINGS
    results = [mallopt(parameter, value) for parameter, value in settings]
    return all(result == 1 for result in results)


def aligned_empty(nbytes: int) -> NDArray[np.uint8]:
    """A new uninitialized uint8 array of `nbytes`, writable and 64-byte aligned."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def machine_bytes() -> int:
    """Memory that this process may use: the machine's, or its container's if that is less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            found.append(int(pathlib.Path(path).read_text()))
    return min(found)


def resident_bytes() -> int:
    """This process's resident memory, without shared memory; 0 if the kernel does not report it."""
    try:
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if name in _RESIDENT}
    return sum(kib.values()) * 1024
