"""Cuts buckets into slices, and limits the size of buckets."""

from __future__ import annotations

from dataclasses import dataclass

from tfps.errors import ConfigError


@dataclass(frozen=True, slots=True, order=True)
class Slice:
    """A contiguous range of a bucket, in bytes."""

    offset: int
    nbytes: int


def cut(nbytes: int, slice_bytes: int, item_bytes: int = 1) -> list[Slice]:
    """Cuts [0, nbytes) at multiples of `slice_bytes`, rounded down to whole items (at least one); the last is shorter.

    An empty bucket has one empty slice, so that it is pushed and replied to like any other.

    Raises:
        ConfigError: a size is out of range, or nbytes is not a whole number of items.
    """
    if slice_bytes <= 0 or item_bytes <= 0:
        raise ConfigError(f"slice_bytes and item_bytes must be positive, got {slice_bytes} and {item_bytes}")
    if nbytes < 0 or nbytes % item_bytes:
        raise ConfigError(f"nbytes must be a multiple of {item_bytes}, got {nbytes}")
    length = max(slice_bytes // item_bytes, 1) * item_bytes
    return [Slice(start, min(length, nbytes - start)) for start in range(0, nbytes, length)] or [Slice(0, 0)]


def bucket_limit(before: int, slice_bytes: int, first_bytes: int) -> int:
    """The size limit of a fused bucket that follows `before` bytes in the order of first use, in bytes.

    The first bucket gets the last gradient of a step, and the next step needs its update first: its whole exchange is
    exposed. So it is small, and each further one is at most as large as all before it.
    """
    return min(slice_bytes, max(first_bytes, before))
