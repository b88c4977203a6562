"""Operations on sets of times, and where the time of one step goes: shared by capture summaries and `Strategy.report`.

A set is an ascending list of (begin, end), none empty or overlapping. Tested in tests/trace/test_summary.py and
tests/runtime/test_report.py.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

Interval = tuple[int, int]
Intervals = list[Interval]
NEGLIGIBLE = 0.03  # of a step


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


class StepTimes(NamedTuple):
    """Nanoseconds of one step of one worker.

    Attributes:
        compute_ns: forward and backward, without waiting for gates or input.
        exposed_ns: at least one read waited at a gate.
        input_ns: the worker waited for its batch.
        under_way_ns: an exchange was under way.
        hidden_ns: the part of that while no read waited.
    """

    compute_ns: int
    exposed_ns: int
    input_ns: int
    under_way_ns: int
    hidden_ns: int


def step_times(
    bounds: Interval, computing: Intervals, gates: Intervals, inputs: Intervals, under_way: Intervals
) -> StepTimes:
    """The times of a step; the sets of times are clipped to its `bounds`.

    Args:
        computing: forward and backward passes, waiting included.
        gates: when a read waited at a gate.
        inputs: when the worker waited for a batch.
        under_way: when an exchange was under way.
    """
    busy, exposed, waiting, exchange = (clip(times, *bounds) for times in (computing, gates, inputs, under_way))
    return StepTimes(
        compute_ns=total(difference(busy, union(exposed + waiting))),
        exposed_ns=total(exposed),
        input_ns=total(waiting),
        under_way_ns=total(exchange),
        hidden_ns=total(difference(exchange, exposed)),
    )


def overlap(hidden: float, under_way: float) -> float:
    """Fraction of the exchange's time during which no read waited. 1 if nothing was exchanged."""
    return hidden / under_way if under_way else 1.0


class Limit(enum.Enum):
    """What limits a step; the cause of EXCHANGE is found elsewhere."""

    COMPUTATION = "computation"
    INPUT = "input"
    EXCHANGE = "exchange"


def limit_of(duration: float, exposed: float, input_: float = 0.0) -> Limit:
    """What limits steps of this duration with these waits for exchange and input; any unit."""
    if max(exposed, input_) < NEGLIGIBLE * duration:
        return Limit.COMPUTATION
    return Limit.INPUT if input_ > exposed else Limit.EXCHANGE
