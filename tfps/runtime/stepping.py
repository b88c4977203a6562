"""How the steps of a job follow each other, as far as reports need it: one by one, or in rounds.

A round ends where a part of the model, a fragment, is exchanged; the worker takes what comes back some steps later, all
of it at once. Steps are not timed: a round has equal ones.

Tested in tests/runtime/test_report.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfps.trace.step_times import Interval, Intervals, clip, total, union

_HALVINGS = 50


@dataclass(frozen=True, slots=True)
class Stepping:
    """When workers exchange what.

    Attributes:
        inner_steps: from one exchange of a bucket to the next; 1: every step exchanges all.
        fragments, overlap_steps: of `Config`.
        waits: whether workers wait for each other's steps.
        whole_replies: whether replies are parameters, not compressed as gradients are.
        every_step: whether each step exchanges gradients that all wait for, so that other ways to train are faster.
    """

    inner_steps: int = 1
    fragments: int = 1
    overlap_steps: int = 0
    waits: bool = True
    whole_replies: bool = False
    every_step: bool = True

    @property
    def in_parts(self) -> bool:
        """Whether the model is exchanged in parts or behind further steps: then it does not wait layer by layer."""
        return self.fragments > 1 or self.overlap_steps > 0

    def waits_in(self, bounds: Interval, exchanges: Sequence[Interval]) -> Intervals:
        """When a worker waited in a round from one exchange of all to the next.

        Args:
            bounds: of the round, in nanoseconds.
            exchanges: from when a bucket was ready until its variables had come; of the rounds that `bounds` touches.
        """

        def waits(step_ns: float) -> Intervals:
            begins = [(ready + round(self.overlap_steps * step_ns), done) for ready, done in exchanges]
            return clip(union(begins), *bounds)

        duration = bounds[1] - bounds[0]
        low, high = 0.0, duration / self.inner_steps
        for _ in range(_HALVINGS):  # how long a step takes such that its steps and waits fill the round
            middle = (low + high) / 2
            fills = self.inner_steps * middle + total(waits(middle)) >= duration
            low, high = (low, middle) if fills else (middle, high)
        return waits(high)

    def round_s(self, compute_s: float, exchange_s: float) -> float:
        """Returns a round in seconds: its steps take `compute_s` without waits, all that travels `exchange_s`."""
        meanwhile_s = compute_s * self.overlap_steps / self.inner_steps
        return compute_s + self.fragments * max(exchange_s / self.fragments - meanwhile_s, 0.0)


STEP_BY_STEP = Stepping()
