"""glibc's malloc: tuned for slices, which are large and come again and again.

Tested in tests/wire/test_memory.py.
"""

from __future__ import annotations

import contextlib
import ctypes

# glibc's malloc.h. Larger mmap thresholds are refused.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_SETTINGS = ((_M_MMAP_THRESHOLD, 32 * 2**20), (_M_TRIM_THRESHOLD, 512 * 2**20), (_M_TOP_PAD, 16 * 2**20))


def tune_malloc(*, one_arena: bool = False) -> bool:
    """Makes glibc's malloc keep freed memory for the next slice; process-wide. False without glibc.

    By default every message above 128 KiB is mapped, faulted in page by page and unmapped again, which halves the
    throughput of 1 MiB slices. `one_arena` is for a dedicated process: slices are allocated on one thread and freed on
    another, so each thread's arena would keep its peak.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    settings = (*_SETTINGS, (_M_ARENA_MAX, 1)) if one_arena else _SETTINGS
    return {mallopt(parameter, value) for parameter, value in settings} == {1}


def trim_malloc() -> None:
    """Gives the system what glibc's malloc keeps free, which takes some ms; without glibc does nothing.

    For when memory of other sizes is needed, or none for a while.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
