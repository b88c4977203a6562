"""Compares this process's clocks with a pserver's, by round trips of a small call.

Tested in tests/worker/test_captures.py and tests/doctor/test_pserver.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from tfps.protos import tfps_pb2 as pb
from tfps.wire.control import Pserver

_CALL_TIMEOUT_S = 10.0
_ROUND_TRIPS = 20


class Compared(NamedTuple):
    """From the shortest of several round trips, which took `round_trip_ns`.

    Attributes:
        offset_ns: to add to the pserver's times of captures to get this process's.
        error_ns: the most by which the two offsets may be wrong.
        wall_offset_ns: the same of the times of day; None if the pserver does not tell, as it is older.
    """

    offset_ns: int
    error_ns: int
    round_trip_ns: int
    wall_offset_ns: int | None


def compare(pserver: Pserver, clock: Callable[[], int], timeout_s: float = _CALL_TIMEOUT_S) -> Compared:
    """Compares the clocks.

    Args:
        clock: of this process's captures, nanoseconds.
        timeout_s: of each of the calls.

    Raises:
        TfpsError: the pserver did not answer.
    """
    best: Compared | None = None
    for _ in range(_ROUND_TRIPS):
        before_ns, wall_ns = clock(), time.time_ns()
        there = pserver.call("Clock", pb.ClockRequest(), timeout_s)
        after_ns = clock()
        took_ns = after_ns - before_ns
        if best is None or took_ns < best.round_trip_ns:
            middle_ns = (before_ns + after_ns) // 2
            wall_offset_ns = wall_ns + took_ns // 2 - there.wall_ns if there.wall_ns else None
            best = Compared(middle_ns - there.time_ns, (took_ns + 1) // 2, took_ns, wall_offset_ns)
    return best or Compared(0, 0, 0, None)
