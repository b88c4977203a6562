"""Memory for slices: malloc that keeps it, and arrays that TensorFlow can take over without a copy."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64  # bytes; what TensorFlow asks of a buffer that it does not copy

# glibc's malloc.h. Larger mmap thresholds are refused.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = ((_M_MMAP_THRESHOLD, 32 * 2**20), (_M_TRIM_THRESHOLD, 512 * 2**20), (_M_TOP_PAD, 16 * 2**20))


def tune_malloc() -> bool:
    """Makes glibc's malloc keep freed memory for the next slice instead of giving it back to the kernel.

    By default every message above 128 KiB is mapped, faulted in page by page and unmapped again, which halves the
    throughput of 1 MiB slices. Process-wide; may be called again. False where there is no glibc: then nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    results = [mallopt(parameter, value) for parameter, value in _SETTINGS]
    return all(result == 1 for result in results)


def aligned_empty(nbytes: int) -> NDArray[np.uint8]:
    """A new uninitialised uint8 array of `nbytes`, writable and 64-byte aligned."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]
