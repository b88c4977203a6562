"""Mixes ids: which pserver owns one, where an index looks for it, what it begins with.

The mix is the finalizer of SplitMix64 (Steele, Lea and Flood: Fast splittable pseudorandom number generators, OOPSLA
2014): one to one, and each bit of the input changes each of the output with a probability of about one half.

Tested in tests/tables/test_spec.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tfps.exchange.requests import Ids

Hashes = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's step from one number of a stream to the next
_ONE, _TWO = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_27, _30, _31, _32 = (np.uint64(bits) for bits in (27, 30, 31, 32))
_LOW = np.uint64(0xFFFFFFFF)


def mix(numbers: Hashes) -> Hashes:
    """Mixes 64-bit numbers in place, and returns them."""
    shifted = numbers >> _30
    numbers ^= shifted
    numbers *= _ONE
    np.right_shift(numbers, _27, out=shifted)
    numbers ^= shifted
    numbers *= _TWO
    np.right_shift(numbers, _31, out=shifted)
    numbers ^= shifted
    return numbers


def of_ids(ids: Ids) -> Hashes:
    """The mix of each id, in new memory."""
    return mix(ids.astype(np.uint64))


def high_below(hashes: Hashes, bound: int) -> NDArray[np.int64]:
    """Numbers from 0 to below `bound` (at most 2**32) in proportion to the upper halves: multiply-shift."""
    return _below(hashes >> _32, bound)


def low_below(hashes: Hashes, bound: int) -> NDArray[np.int64]:
    """The same of the lower halves, which are as good where the upper ones are alike."""
    return _below(hashes & _LOW, bound)


def _below(halves: Hashes, bound: int) -> NDArray[np.int64]:
    halves *= np.uint64(bound)
    halves >>= _32
    return halves.view(np.int64)
