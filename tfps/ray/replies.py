"""What Ray says of a process, in one line, and waits for several: for the driver and Ray Train's controller.

Tested in tests/ray/test_running.py and tests/ray/test_pservers.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import ray
from ray.exceptions import RayActorError, RayError


def node() -> str:
    """Ray's id of the node that this process is on."""
    return str(ray.get_runtime_context().get_node_id())


def line(error: RayError) -> str:
    """What Ray says."""
    return " ".join(str(error).split())


def failure(error: RayError) -> str:
    """What became of a call: what its function raised, or that its process ended, or what Ray could not do."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        return f"{type(cause).__name__}: {cause}"
    if isinstance(error, RayActorError):
        return f"its process ended ({line(error)})"
    return f"{type(error).__name__}: {line(error)}"


class Deadline:
    """The end of the user's time for a start of many steps, `timeout_s` from now."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds, at least 0."""
        return max(self._end_s - time.monotonic(), 0.0)

    def __str__(self) -> str:
        return f"within {self.timeout_s:g} s"


def wait_all(calls: Sequence[ray.ObjectRef], deadline: Deadline) -> list[int]:
    """Waits until all calls have ended, one has failed, or the time is up.

    Returns the indices of those that have not ended by then.

    Raises:
        RayError: one has failed.
    """
    pending = list(calls)
    while pending:
        ready, _ = ray.wait(pending, timeout=deadline.left_s)
        if not ready:
            break
        for each in ready:
            pending.remove(each)
            ray.get(each)
    return [index for index, each in enumerate(calls) if each in pending]
