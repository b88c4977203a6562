"""Where the time of one step goes: the shared figures of capture summaries and `Strategy.report`.

Tested in tests/trace/test_summary.py and tests/runtime/test_report.py.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from tfps.trace.intervals import Interval, Intervals, clip, difference, total, union

NEGLIGIBLE = 0.03  # of a step


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
