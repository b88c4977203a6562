"""Memory for slices: arrays that TensorFlow takes over, and a worker's memory shared on its host."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import pathlib
import secrets
import stat
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfps.errors import ProtocolError

_RESIDENT = ("RssAnon:", "RssFile:")  # without RssShmem, workers' memory mapped by a pserver
ALIGNMENT = 64  # bytes; TensorFlow copies buffers aligned to less


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
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(_RESIDENT))
    return 0


_SECRET_BYTES = 16
_NAME = "tfps"
_MEMFD = f"/memfd:{_NAME} (deleted)"  # what /proc shows of it
# Of address space; only regions take memory. So much that an arena hardly ever grows: mapping it again takes a file
# descriptor, of which a pserver may have none left in the middle of a job.
_CHUNK_BYTES = 2**34


class Place(NamedTuple):
    """Where a slice is in its worker's memory, in bytes."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Offer:
    """What another process needs to find the memory; see SharedMemory in tfps.proto."""

    host: str
    pid: int
    fd: int
    secret: bytes


class Target(NamedTuple):
    """The place of a slice and the bytes there: a push is written to them, then its sum."""

    place: Place
    memory: NDArray[np.uint8]


class Region(NamedTuple):
    """Part of an arena, freed when nothing refers to `array`."""

    offset: int
    array: NDArray[np.uint8]  # writable, page-aligned

    def place(self, offset: int, nbytes: int) -> Place:
        """The place of a part of it."""
        return Place(self.offset + offset, nbytes)

    def target(self, offset: int, nbytes: int) -> Target:
        """A part of it."""
        return Target(self.place(offset, nbytes), self.array[offset : offset + nbytes])


@dataclass(slots=True)
class _Pages:
    """Part of an arena, in use or free."""

    offset: int
    chunk: mmap.mmap
    chunk_begin: int
    backed: bool = False  # by memory


def host() -> str:
    """Identifies this host, with its network namespace: equal values need no network in between. Empty if unknown."""
    try:
        kernel = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel}/{pathlib.Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return ""


def _pages_bytes(nbytes: int) -> int:
    """What a region of `nbytes` takes."""
    return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


class Arena:
    """A worker's memory, from which regions are allocated; any thread. OSError: there is no memfd, or no memory."""

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("memfd_create is for Linux")
        secret = secrets.token_bytes(_SECRET_BYTES)
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self._fd)
        os.pwrite(self._fd, secret, 0)
        self._end = mmap.PAGESIZE  # of allocated regions
        os.ftruncate(self._fd, self._end + _CHUNK_BYTES)
        # If this process could shrink it, a signal would hit processes that have mapped it.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.offer = Offer(host(), os.getpid(), self._fd, secret)
        self._lock = threading.Lock()  # guards what follows, except deques: collected arrays add to them on any thread
        self._chunk: mmap.mmap | None = None
        self._chunk_begin = self._chunk_end = self._end
        self._free: dict[int, deque[_Pages]] = {}  # by size

    @property
    def nbytes(self) -> int:
        """How much memory it holds; 0 once closed."""
        with self._lock:
            return 0 if self._fd < 0 else os.fstat(self._fd).st_blocks * 512

    def allocate(self, nbytes: int) -> Region | None:
        """An uninitialized region; None if the system has no more memory."""
        size = _pages_bytes(nbytes)
        with self._lock:
            free = self._free.setdefault(size, deque())
            try:
                if not free:
                    free.append(self._new(size))
                if not free[0].backed:
                    os.posix_fallocate(self._fd, free[0].offset, size)  # else lack of memory raises a signal
            except OSError:
                free.rotate(-1)  # the next ones may have memory
                return None
            pages = free.popleft()
            pages.backed = True
        array: NDArray[np.uint8] = np.frombuffer(pages.chunk, np.uint8, nbytes, pages.offset - pages.chunk_begin)
        weakref.finalize(array, free.append, pages).atexit = False
        return Region(pages.offset, array)

    def give_back(self, nbytes: int) -> None:
        """Gives the memory of free regions of `nbytes` back to the system: none will be needed soon."""
        with self._lock:
            self._give_back(_pages_bytes(nbytes))

    def _give_back(self, size: int) -> None:
        free = self._free.get(size, deque())
        for _ in range(len(free)):
            pages = free.popleft()
            if pages.backed:
                pages.chunk.madvise(mmap.MADV_REMOVE, pages.offset - pages.chunk_begin, size)
                pages.backed = False
            free.append(pages)

    def close(self) -> None:
        """Closes the memory to new users. Regions stay while they are used."""
        with self._lock:
            self._close()
            self._fd = -1  # the number may be another file's now

    def _new(self, size: int) -> _Pages:
        """Pages of a size of which none are free; free ones of other sizes give their memory back."""
        for other in self._free:  # another model's, perhaps
            self._give_back(other)
        if self._chunk is None or self._end + size > self._chunk_end:
            begin, length = self._end, max(_CHUNK_BYTES, size)
            os.ftruncate(self._fd, begin + length)
            self._chunk = mmap.mmap(self._fd, length, offset=begin)
            self._chunk_begin, self._chunk_end = begin, begin + length
        offset, self._end = self._end, self._end + size
        return _Pages(offset, self._chunk, self._chunk_begin)


class Sharing:
    """A worker's side: its arena, if it shares one, and the pservers that have mapped it."""

    def __init__(self, wanted: bool) -> None:
        self.pservers: set[int] = set()
        self.arena: Arena | None = None
        if wanted:
            with contextlib.suppress(OSError):  # then everything goes through sockets
                self.arena = Arena()


def _open_memfd(path: str) -> int:
    """Opens a memfd named "tfps", and nothing else: opening a device or a pipe may already do something.

    The path may lead to some other file; what is looked at is what is opened, even if it is exchanged meanwhile.
    """
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)  # opens no file, only refers to it
    try:
        own = pathlib.Path(f"/proc/self/fd/{found}")
        if not stat.S_ISREG(os.fstat(found).st_mode) or str(own.readlink()) != _MEMFD:
            raise OSError(f"the file must be a worker's memory, got {own.readlink()}")
        return os.open(own, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    finally:
        os.close(found)


class Attached:
    """A worker's arena, on a pserver, for the thread of one stream. OSError: it is not accessible, or another one."""

    def __init__(self, offer: Offer) -> None:
        if not offer.host or offer.host != host():
            raise OSError("the worker is on another host")
        self._fd = _open_memfd(f"/proc/{offer.pid}/fd/{offer.fd}")
        weakref.finalize(self, os.close, self._fd)
        if not fcntl.fcntl(self._fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError("the memory is not sealed")
        if len(offer.secret) != _SECRET_BYTES or os.pread(self._fd, _SECRET_BYTES, 0) != offer.secret:
            raise OSError("the memory has another secret")
        self._map = mmap.mmap(self._fd, 0)

    def view(self, place: Place) -> NDArray[np.uint8]:
        """The bytes at `place`, writable."""
        end = place.offset + place.nbytes
        if end > len(self._map) and end <= os.fstat(self._fd).st_size:
            self._map = mmap.mmap(self._fd, 0)  # it has grown
        if end > len(self._map):
            raise ProtocolError(f"a place in shared memory must end within its {len(self._map)} bytes, got {place}")
        return np.frombuffer(self._map, np.uint8, place.nbytes, place.offset)
