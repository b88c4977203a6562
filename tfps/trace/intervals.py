"""Operations on sets of times. A set is an ascending list of (begin, end), none empty or overlapping.

Tested in tests/trace/test_summary.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

Interval = tuple[int, int]
Intervals = list[Interval]


def union(found: Iterable[Interval]) -> Intervals:
    """The times covered by at least one interval."""
    merged: Intervals = []
    last_begin = last_end = 0
    for begin, end in sorted(found):
        if begin >= end:
            continue
        if merged and begin <= last_end:
            if end > last_end:
                last_end = end
                merged[-1] = (last_begin, end)
        else:
            last_begin, last_end = begin, end
            merged.append((begin, end))
    return merged


def total(times: Intervals) -> int:
    """Total length of a set."""
    return sum(end - begin for begin, end in times)


def clip(times: Intervals, begin: int, end: int) -> Intervals:
    """The part of a set within [begin, end)."""
    first = max(bisect_left(times, (begin, begin)) - 1, 0)
    found = []
    for position in range(first, len(times)):
        if times[position][0] >= end:
            break
        one = max(times[position][0], begin), min(times[position][1], end)
        if one[0] < one[1]:
            found.append(one)
    return found


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """The times in both."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(one: Intervals, other: Intervals) -> Intervals:
    """The times in the first but not in the second."""
    found, j = [], 0
    for begin, end in one:
        while j < len(other) and other[j][1] <= begin:
            j += 1
        k = j
        while k < len(other) and other[k][0] < end:
            if other[k][0] > begin:
                found.append((begin, other[k][0]))
            begin = max(begin, other[k][1])
            k += 1
        if begin < end:
            found.append((begin, end))
    return found
