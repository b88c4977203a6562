"""Bytes per second to and from a pserver, over the path that slices would take, and what a running job has seen."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfps.doctor.report import Check
from tfps.errors import TfpsError, WaitTimeoutError
from tfps.types import Json
from tfps.wire.connection import introduce
from tfps.wire.control import Pserver
from tfps.wire.measuring import SECONDS, Direction, Measured, measure_connection, measure_grpc, purpose
from tfps.wire.status import MemberStatus

_AGAIN_S = 0.1  # between two attempts, while another client measures
_LEAST_BUSY_S = 0.02  # of a running job, to say something
_SLOW = 0.5  # of the median of all pservers
_MTU = (
    "calls are answered, but bulk data does not arrive. Look at the MTU of the path: ping -M do -s 1472 HOST gets no "
    "answer where it is below 1500"
)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Payload bytes per second in each direction; 0.0 where too little came to say.

    Attributes:
        path: "tcp" or "grpc".
    """

    push: float
    pull: float
    path: str

    @property
    def least(self) -> float:
        return min(self.push, self.pull)

    @property
    def text(self) -> str:
        path = "data connection" if self.path == "tcp" else "gRPC"
        return f"push {mbit(self.push)}, pull {mbit(self.pull)} ({path})"

    @property
    def values(self) -> dict[str, Json]:
        return {"push_bytes_per_s": self.push, "pull_bytes_per_s": self.pull, "path": self.path}


def mbit(bytes_per_s: float) -> str:
    """For people."""
    return f"{bytes_per_s * 8 / 1e6:.3g} Mbit/s" if bytes_per_s < 125e6 else f"{bytes_per_s * 8 / 1e9:.3g} Gbit/s"


def measure(pserver: Pserver, data_port: int, timeout_s: float, seconds: float = SECONDS) -> Bandwidth | Check:
    """Measures both directions, one after the other.

    Args:
        data_port: 0: over gRPC.
        timeout_s: for an answer, and for other clients to end their measurement.
        seconds: of each direction.

    Raises:
        OSError, TfpsError: it broke, or the pserver refuses.
    """
    try:
        push = _patiently(pserver, "push", data_port, timeout_s, seconds)
        pull = _patiently(pserver, "pull", data_port, timeout_s, seconds)
    except WaitTimeoutError as error:
        return Check("bandwidth", "skipped", f"not measured: {error}")
    except TimeoutError:
        return Check("bandwidth", "failed", "bulk data does not arrive", _MTU, "stalls")
    return Bandwidth(push.bytes_per_s, pull.bytes_per_s, "tcp" if data_port else "grpc")


def _patiently(pserver: Pserver, direction: Direction, data_port: int, timeout_s: float, seconds: float) -> Measured:
    end_s, tick = time.monotonic() + timeout_s, threading.Event()
    while True:
        try:
            if not data_port:
                return measure_grpc(pserver, direction, seconds)
            connected = introduce(pserver.address, data_port, pserver.token, purpose(direction), 0, timeout_s)
            return measure_connection(connected, direction, seconds, timeout_s)
        except WaitTimeoutError:
            if time.monotonic() >= end_s:
                raise
            tick.wait(_AGAIN_S)


def of_job(members: Sequence[MemberStatus]) -> Check:
    """What the replies of a running job have shown, which is not disturbed."""
    rates = {
        member.rank: member.busy_bytes / member.busy_s
        for member in members
        if not member.shared_memory and member.busy_s >= _LEAST_BUSY_S
    }
    if not rates:
        return Check("bandwidth", "skipped", "not measured: there is a job")
    rank = min(rates, key=lambda each: rates[each])
    text = f"not measured: there is a job; its replies reach rank {rank}, the slowest, at {mbit(rates[rank])}"
    return Check("bandwidth", "skipped", text, values={"job_bytes_per_s": rates[rank], "rank": rank})


def compared(found: Mapping[str, Bandwidth]) -> dict[str, Check]:
    """One check per address; a pserver that is much slower than the others is a warning."""
    median = statistics.median_high([each.least for each in found.values()]) if found else 0.0
    checks = {}
    for address, each in found.items():
        if each.least <= 0:
            advice = "too little arrived to say how fast the network is: measure again, on an idle host"
            checks[address] = Check("bandwidth", "warning", each.text, advice, "unknown", each.values)
        elif each.least < _SLOW * median:
            advice = (
                f"slow: {mbit(each.least)}, while half of the pservers reach {mbit(median)}: every step waits for the "
                "slowest"
            )
            checks[address] = Check("bandwidth", "warning", each.text, advice, "slow", each.values)
        else:
            checks[address] = Check("bandwidth", "ok", each.text, values=each.values)
    return checks


def failed(error: TfpsError | OSError) -> Check:
    """A measurement that broke, although small calls are answered."""
    advice = f"the measurement broke: {error}; see the pserver's log"
    return Check("bandwidth", "warning", "broke", advice, "broken")
