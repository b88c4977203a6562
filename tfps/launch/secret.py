"""Files with a secret, for processes on this host only."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def secret_file(text: str) -> Iterator[str]:
    """The path of a file with `text` that only this user can read.

    On Linux it is in memory and ends with this process, however that ends; elsewhere it is removed on leaving.

    Raises:
        OSError: it cannot be written.
    """
    if sys.platform.startswith("linux"):
        fd = _in_memory(text)
        try:
            path = _path(fd)
            if os.access(path, os.R_OK):
                yield path
                return
        finally:
            os.close(fd)
    with tempfile.NamedTemporaryFile("w", prefix="tfps-token-") as file:  # with mode 0600
        file.write(text)
        file.flush()
        yield file.name


def lasting_secret_file(text: str) -> str:
    """The same in memory, on Linux only: a new file, there until this process ends, however that ends.

    Raises:
        OSError: there is no memory for it.
    """
    return _path(_in_memory(text))


def _in_memory(text: str) -> int:
    fd = os.memfd_create("tfps-token")
    os.fchmod(fd, 0o600)
    os.write(fd, text.encode())
    return fd


def _path(fd: int) -> str:
    return f"/proc/{os.getpid()}/fd/{fd}"
