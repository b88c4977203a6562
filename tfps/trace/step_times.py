"""Operations on sets of times, and where the time of one step goes: shared by capture summaries and `Strategy.report`.

A set is an ascending list of (begin, end), none empty or overlapping. Tested in tests/trace/test_summary.py and
tests/runtime/test_report.py.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter

Interval = tuple[int, int]
Intervals = list[Interval]
NEGLIGIBLE = 0.03  # of a step
_begin, _end = itemgetter(0), itemgetter(1)


def union(found: Iterable[Interval]) -> Intervals:
    """The times covered by at least one interval."""
    merged: Intervals = []
    for begin, end in sorted(found):
        if merged and begin <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        elif begin < end:
            merged.append((begin, end))
    return merged


def total(times: Intervals) -> int:
    """Total length of a set."""
    return sum(end - begin for begin, end in times)


def clip(times: Intervals, begin: int, end: int) -> Intervals:
    """The part of a set within [begin, end)."""
    if begin >= end:
        return []
    within = times[bisect_right(times, begin, key=_end) : bisect_left(times, end, key=_begin)]
    return [(max(first, begin), min(last, end)) for first, last in within]


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """The times in both."""
    return [part for begin, end in one for part in clip(other, begin, end)]


def difference(one: Intervals, other: Intervals) -> Intervals:
    """The times in the first but not in the second."""
    found = []
    for begin, end in one:
        for first, last in clip(other, begin, end):
            if begin < first:
                found.append((begin, first))
            begin = last
        if begin < end:
            found.append((begin, end))
    return found


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Nanoseconds of one step of one worker."""

    duration_ns: int
    compute_ns: int  # forward and backward, without waiting for gates, rows or input
    exposed_ns: int  # at least one read waited at a gate, or a lookup for its rows
    input_ns: int  # the worker waited for its batch
    under_way_ns: int  # an exchange was under way
    hidden_ns: int  # the part of that while no read waited


def step_times(
    bounds: Interval, computing: Intervals, waits: Intervals, inputs: Intervals, under_way: Intervals
) -> StepTimes:
    """The times of a step; the sets of times are clipped to its `bounds`. `computing` has waiting included."""
    busy, exposed, waiting, exchange = (clip(times, *bounds) for times in (computing, waits, inputs, under_way))
    return StepTimes(
        duration_ns=bounds[1] - bounds[0],
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
