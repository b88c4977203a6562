"""Memory for slices."""

from __future__ import annotations

import platform

import jobs
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfps.malloc import tune_malloc
from tfps.wire.shared_memory import ALIGNMENT, aligned_empty, machine_bytes


@given(nbytes=st.integers(0, 10_000))
def test_arrays_are_aligned_and_of_the_size_asked_for(nbytes: int) -> None:
    array = aligned_empty(nbytes)
    assert array.nbytes == nbytes
    assert array.flags.writeable
    assert not nbytes or array.ctypes.data % ALIGNMENT == 0


def test_a_process_may_use_at_most_what_the_machine_has() -> None:
    assert 2**20 < machine_bytes() <= psutil.virtual_memory().total


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_malloc_accepts_the_settings_again_and_again() -> None:
    assert tune_malloc()
    assert tune_malloc()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_a_pservers_threads_share_one_arena() -> None:
    # malloc_info lists arenas as heaps; several threads allocate, which would give each its own.
    program = """
import ctypes, threading
from tfps.malloc import tune_malloc
assert tune_malloc(one_arena=True)
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
hold = threading.Barrier(4)
def allocate():
    hold.wait()
    libc.malloc(1000)
    hold.wait()
threads = [threading.Thread(target=allocate) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]
libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
out = libc.fopen(b"/dev/stdout", b"w")
libc.malloc_info(0, out)
libc.fclose(out)
"""
    with jobs.python("-c", program) as process:
        text = process.communicate(timeout=jobs.DEADLINE_S)[0]
    assert text.count("<heap nr=") == 1


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_what_has_been_freed_between_what_is_kept_goes_back_to_the_system() -> None:
    program = """
import numpy as np
from tfps.malloc import trim_malloc, tune_malloc
from tfps.wire.shared_memory import resident_bytes
assert tune_malloc()
arrays = [np.ones(2**18) for _ in range(64)]  # 2 MiB each
del arrays[::2]
before = resident_bytes()
trim_malloc()
print((before - resident_bytes()) >> 20)
"""
    with jobs.python("-c", program) as process:
        text = process.communicate(timeout=jobs.DEADLINE_S)[0]
    assert int(text) > 50
