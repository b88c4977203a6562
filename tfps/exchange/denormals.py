"""Numbers below the smallest normal float become 0, as in TensorFlow's threads, whose results updates must repeat.

They would also take a hundred times as long: momentum of a weight without gradients decays into them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
import struct
from collections.abc import Callable, Iterator

# Where the control register is in glibc's fenv_t, and its bits "flush to zero" (and, on x86, "denormals are zero").
_LAYOUTS = {"x86_64": (32, 28, 0x8040), "aarch64": (8, 0, 1 << 24)}  # bytes, offset, bits
_REGISTER = struct.Struct("<I")


@functools.cache
def _access() -> tuple[Callable[..., int], Callable[..., int], int, int, int] | None:
    layout = _LAYOUTS.get(platform.machine())
    if layout is None or platform.libc_ver()[0] != "glibc":
        return None
    try:
        library = ctypes.CDLL("libm.so.6")
        return library.fegetenv, library.fesetenv, *layout
    except (OSError, AttributeError):
        return None


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Makes this thread's floats flush to zero inside the block; without glibc on x86-64 or ARM nothing changes."""
    access = _access()
    if access is None:
        yield
        return
    get, put, size, offset, bits = access
    before = ctypes.create_string_buffer(size)
    get(before)
    inside = ctypes.create_string_buffer(before.raw, size)
    _REGISTER.pack_into(inside, offset, _REGISTER.unpack_from(before, offset)[0] | bits)
    put(inside)
    try:
        yield
    finally:
        put(before)
