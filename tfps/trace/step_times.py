"""Where the time of one step goes: the one count of it, for summaries of captures and for `Strategy.report`.

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
        input_ns: it waited for its input batch.
        under_way_ns: something of the exchange was under way.
        hidden_ns: of that, while no read waited.
    """

    compute_ns: int
    exposed_ns: int
    input_ns: int
    under_way_ns: int
    hidden_ns: int


def step_times(
    bounds: Interval, computing: Intervals, gates: Intervals, inputs: Intervals, under_way: Intervals
) -> StepTimes:
    """The times of a step with these bounds; of the sets of times what is within them counts.

    Args:
        computing: forward and backward passes, waiting included.
        gates: when a read waited at a gate.
        inputs: when the worker waited for a batch.
        under_way: when something of the exchange was under way.
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
    """What part of the exchange's time cost nothing: no read waited meanwhile. 1 where nothing was exchanged."""
    return hidden / under_way if under_way else 1.0


class Limit(enum.Enum):
    """What a step spends its time on; of an exchange the cause has to be found."""

    COMPUTATION = "computation"
    INPUT = "input"
    EXCHANGE = "exchange"


def limit_of(duration: float, exposed: float, input_: float = 0.0) -> Limit:
    """What limits steps of this duration, which wait so long for the exchange and for input; any unit."""
    if max(exposed, input_) < NEGLIGIBLE * duration:
        return Limit.COMPUTATION
    return Limit.INPUT if input_ > exposed else Limit.EXCHANGE
