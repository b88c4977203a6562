"""Measurements of bytes per second on machines that are busy with other tests."""

from __future__ import annotations

from collections.abc import Callable

ATTEMPTS_S = (0.1, 0.1, 0.2, 0.5, 1.0, 1.0, 1.0, 1.0)


def enough(measure: Callable[[float], float]) -> float:
    """The first rate that says something: where a thread stalls too little may arrive.

    Args:
        measure: returns bytes per second, 0.0 if it cannot tell; gets the seconds to take.
    """
    for seconds in ATTEMPTS_S:
        if (rate := measure(seconds)) > 0:
            return rate
    raise TimeoutError("every attempt to measure was too short to say anything")
