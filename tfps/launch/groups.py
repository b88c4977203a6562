"""Process groups, and children that end with their parent. Tested in tests/launch/test_supervisor.py."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def signal_group(leader: int, number: int) -> None:
    """Signals the process group of process `leader`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty; macOS says EPERM
        os.killpg(leader, number)


def end_with_parent() -> Callable[[], None] | None:
    """A `preexec_fn` that makes a child end with this process; None if unsupported.

    Nothing else helps if this process gets SIGKILL. Linux ties it to the thread that forks: the main thread.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def follow() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended in between
            os.kill(os.getpid(), signal.SIGKILL)

    return follow
