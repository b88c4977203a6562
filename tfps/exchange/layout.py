"""How buckets are cut into slices of which size, and which pserver owns each, at first and when a job is tuned.

Workers and pservers decide independently: equal calls in equal order give equal answers.

Tested in tests/exchange/test_layout.py and tests/exchange/test_tuning.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tfps.config import MAX_SLICE_BYTES, Placement
from tfps.errors import ConfigError, ProtocolError
from tfps.exchange.interface import BucketSpec, parse_dtype

_KIB = 1024
_MOST_STEPS = 2**63  # so that they can be recorded
MIN_TUNED_BYTES, MAX_TUNED_BYTES = 32 * _KIB, 4096 * _KIB
# Of a step, that one slice per pserver may take on the wire: its sum begins when all of it has come.
DELAY = 0.04
MAX_TUNED_GRPC_BYTES, GRPC_DELAY = 1024 * _KIB, 0.015  # nothing overtakes within a slice there
MAX_WINDOW_BYTES = 64 * 1024 * _KIB
_OVERHEAD = 20  # least ratio of a slice's time on the wire to its handling cost
_FASTER = 1.25  # if larger slices are so much faster, CPUs are the limit, not the network


class Slice(NamedTuple):
    """A contiguous range of a bucket, in bytes."""

    offset: int
    nbytes: int


def cut(nbytes: int, slice_bytes: int, item_bytes: int = 1) -> list[Slice]:
    """Cuts [0, nbytes) at multiples of `slice_bytes`, rounded down to whole items (at least one); the last is shorter.

    An empty bucket has one empty slice, so that it is pushed and replied to like any other. Raises ConfigError if a
    size is out of range, or nbytes is not a whole number of items.
    """
    if slice_bytes <= 0 or item_bytes <= 0:
        raise ConfigError(f"slice_bytes and item_bytes must be positive, got {slice_bytes} and {item_bytes}")
    if nbytes < 0 or nbytes % item_bytes:
        raise ConfigError(f"nbytes must be a multiple of {item_bytes}, got {nbytes}")
    length = max(slice_bytes // item_bytes, 1) * item_bytes
    return [Slice(start, min(length, nbytes - start)) for start in range(0, nbytes, length)] or [Slice(0, 0)]


def bucket_limit(before: int, slice_bytes: int, first_bytes: int) -> int:
    """The size limit of a fused bucket that follows `before` bytes in the order of first use, in bytes.

    The whole exchange of the first is exposed: its gradient is the last, its update the first that is needed. So it is
    small, and each further one is at most as large as all before it.
    """
    return min(slice_bytes, max(first_bytes, before))


class Placer:
    """Places the slices of one bucket after another on `pservers`, those of a view. Not thread-safe.

    `"balanced"` takes the pserver with the fewest bytes so far, so that any two differ by at most one slice;
    `"round_robin"` takes them in turn.
    """

    def __init__(self, pservers: Sequence[int], placement: Placement) -> None:
        self._pservers, self._placement = pservers, placement
        # Bytes that each pserver owns so far; gathers are counted instead, as their sizes are unknown.
        self.bytes_per_pserver, self._occasional, self._gathers = ([0] * len(pservers) for _ in range(3))
        self._turns = itertools.cycle(range(len(pservers)))

    def place(self, sizes: Sequence[int], occasional: bool = False) -> list[int]:
        """The owner of each slice of a bucket; `sizes` in bytes. Occasional ones are balanced apart."""
        load = self._occasional if occasional else self.bytes_per_pserver
        return [self._next(load, nbytes) for nbytes in sizes]

    def place_gather(self) -> int:
        """The owner of a gather."""
        return self._next(self._gathers, 1)

    def _next(self, load: list[int], more: int) -> int:
        place = load.index(min(load)) if self._placement == "balanced" else next(self._turns)
        load[place] += more
        return self._pservers[place]


@dataclass(frozen=True, slots=True)
class Layout:
    """The result of tuning."""

    slice_bytes: int  # of the buckets in `steps`, from there on
    window_bytes: int  # from now on
    steps: Mapping[int, int]  # bucket -> the first step with the new slices


@dataclass(frozen=True, slots=True)
class Cutting:
    """The slices of a sum from `step` on; `owners[i]` is the pserver of slice i."""

    slices: Sequence[Slice]
    owners: Sequence[int]
    step: int = 0


def cut_sum(spec: BucketSpec, slice_bytes: int, placer: Placer, step: int = 0) -> Cutting:
    """Slices of a bucket and their owners."""
    slices = cut(spec.nbytes, slice_bytes, parse_dtype(spec.dtype).itemsize)
    return Cutting(slices, placer.place([piece.nbytes for piece in slices], spec.occasional), step)


def tunable(spec: BucketSpec) -> bool:
    """Whether tuning may cut this bucket anew: not one whose slices keep something."""
    return spec.kind == "sum" and not spec.occasional and spec.nbytes > 0 and not spec.update


def cut_anew(
    specs: Sequence[BucketSpec], layout: Layout, pservers: Sequence[int], placement: Placement
) -> dict[int, Cutting]:
    """The new cutting of every bucket in `layout`; `specs` has all, by number. ProtocolError: it does not fit them."""
    if not 0 < layout.slice_bytes <= MAX_SLICE_BYTES or layout.window_bytes <= 0:
        raise ProtocolError(
            f"a layout must have slices of 1 to {MAX_SLICE_BYTES} bytes and a window, got {layout.slice_bytes} and "
            f"{layout.window_bytes}"
        )
    placer, found = Placer(pservers, placement), {}
    for bucket in sorted(layout.steps):
        if not 0 <= bucket < len(specs) or not tunable(specs[bucket]):
            raise ProtocolError(f"a layout must list buckets that can be cut, got bucket {bucket}")
        if layout.steps[bucket] >= _MOST_STEPS:
            raise ProtocolError(f"a step of a layout must be below 2**63, got {layout.steps[bucket]}")
        found[bucket] = cut_sum(specs[bucket], layout.slice_bytes, placer, layout.steps[bucket])
    return found


# Sizes, from measurements


@dataclass(frozen=True, slots=True)
class Measured:
    """Rank 0's measurements."""

    bytes_per_s: float  # payload that all pservers together received from this worker while it had something to send
    round_trip_s: float  # of a small call through gRPC, on an idle connection
    message_s: float  # cost of one message at both ends, without the network
    step_s: float  # of one training step
    pservers: int  # their number


def choose(
    measured: Measured,
    least_slice_bytes: int = MIN_TUNED_BYTES,
    most_slice_bytes: int = MAX_TUNED_BYTES,
    delay: float = DELAY,
) -> tuple[int, int]:
    """Slice and window size in bytes: see "Tuning" in docs/design.md."""
    unnoticed = delay * measured.step_s * measured.bytes_per_s / measured.pservers
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
