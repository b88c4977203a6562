"""Chooses sizes of slices and windows from measurements."""

from __future__ import annotations

from dataclasses import dataclass

_KIB = 1024
MIN_SLICE_BYTES, MAX_SLICE_BYTES = 32 * _KIB, 4096 * _KIB
MAX_GRPC_SLICE_BYTES = 1024 * _KIB  # nothing overtakes within one
MAX_WINDOW_BYTES = 64 * 1024 * _KIB
_OVERHEAD = 20  # least ratio of a slice's time on the wire to its handling cost
_FASTER = 1.25  # if larger slices are so much faster, CPUs are the limit, not the network
_DELAY = 0.015  # of a step that one slice per pserver may take on the wire, ahead of an urgent one


@dataclass(frozen=True, slots=True)
class Measured:
    """Rank 0's measurements.

    Args:
        bytes_per_s: payload that all pservers together received from this worker while it had something to send.
        round_trip_s: of a small call through gRPC, on an idle connection.
        message_s: cost of one message at both ends, without the network.
        step_s: of one training step.
        pservers: their number.
    """

    bytes_per_s: float
    round_trip_s: float
    message_s: float
    step_s: float
    pservers: int


def choose(
    measured: Measured, least_slice_bytes: int = MIN_SLICE_BYTES, most_slice_bytes: int = MAX_SLICE_BYTES
) -> tuple[int, int]:
    """Slice and window size in bytes.

    A slice's time on the wire is negligible in a step (a sum begins when all of it has come; over gRPC an urgent slice
    waits for one), but long enough for handling to be a fraction of it. The windows of all pservers together, of use
    over gRPC only, keep the link busy while receipts, one per half window, come back; anything more would only delay
    urgent slices.
    """
    unnoticed = _DELAY * measured.step_s * measured.bytes_per_s / measured.pservers
    slice_bytes = max(_OVERHEAD * measured.message_s * measured.bytes_per_s, unnoticed)
    slice_bytes = _rounded(min(max(slice_bytes, least_slice_bytes), most_slice_bytes))
    window_bytes = 2 * (slice_bytes + measured.bytes_per_s * measured.round_trip_s / measured.pservers)
    return slice_bytes, _rounded(min(window_bytes, MAX_WINDOW_BYTES))


def limited_by_handling(before: Measured, after: Measured) -> bool:
    """Whether the larger slices of `after` show that the wire was not the limit in `before`."""
    return after.bytes_per_s > _FASTER * before.bytes_per_s


def _rounded(nbytes: float) -> int:
    """Rounds to multiples of 16 KiB, at least one."""
    return max(round(nbytes / (16 * _KIB)), 1) * 16 * _KIB
