"""Memory for slices."""

from __future__ import annotations

import platform

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfps.memory import ALIGNMENT, aligned_empty, tune_malloc


@given(nbytes=st.integers(0, 10_000))
def test_arrays_are_aligned_and_of_the_size_asked_for(nbytes: int) -> None:
    array = aligned_empty(nbytes)
    assert array.nbytes == nbytes
    assert array.flags.writeable
    assert not nbytes or array.ctypes.data % ALIGNMENT == 0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_malloc_accepts_the_settings_again_and_again() -> None:
    assert tune_malloc()
    assert tune_malloc()
