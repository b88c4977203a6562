"""How buckets are cut and placed, at first and when a job is tuned. Workers and pservers compute the same on their own.

Tested in tests/exchange/test_tuning.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfps.config import MAX_SLICE_BYTES, Placement
from tfps.errors import ProtocolError
from tfps.exchange.interface import BucketSpec, parse_dtype
from tfps.exchange.placement import Placer
from tfps.exchange.slicing import Slice, cut


@dataclass(frozen=True, slots=True)
class Layout:
    """The result of tuning.

    Args:
        slice_bytes: of the listed buckets from the given steps on.
        window_bytes: from now on.
        steps: bucket -> the first step with the new slices.
    """

    slice_bytes: int
    window_bytes: int
    steps: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Cutting:
    """The slices of a sum from `step` on; `owners[i]` is the pserver of slice i."""

    slices: Sequence[Slice]
    owners: Sequence[int]
    step: int = 0


def cut_sum(spec: BucketSpec, slice_bytes: int, placer: Placer, step: int = 0) -> Cutting:
    """Slices of a bucket and their owners."""
    slices = cut(spec.nbytes, slice_bytes, parse_dtype(spec.dtype).itemsize)
    return Cutting(slices, placer.place(spec.common_name, [piece.nbytes for piece in slices], spec.occasional), step)


def tunable(spec: BucketSpec) -> bool:
    """Whether tuning may cut this bucket anew: not one whose slices keep something."""
    return spec.kind == "sum" and not spec.occasional and spec.nbytes > 0 and not spec.update


def cut_anew(specs: Sequence[BucketSpec], layout: Layout, pservers: int, placement: Placement) -> dict[int, Cutting]:
    """The new cutting of every bucket in `layout`; `specs` has all buckets, by number.

    Raises:
        ProtocolError: the layout does not fit the buckets.
    """
    if not 0 < layout.slice_bytes <= MAX_SLICE_BYTES or layout.window_bytes <= 0:
        raise ProtocolError(
            f"a layout must have slices of 1 to {MAX_SLICE_BYTES} bytes and a window, got {layout.slice_bytes} and "
            f"{layout.window_bytes}"
        )
    placer = Placer(pservers, placement)
    found = {}
    for bucket in sorted(layout.steps):
        if not 0 <= bucket < len(specs) or not tunable(specs[bucket]):
            raise ProtocolError(f"a layout must list buckets that can be cut, got bucket {bucket}")
        found[bucket] = cut_sum(specs[bucket], layout.slice_bytes, placer, layout.steps[bucket])
    return found
