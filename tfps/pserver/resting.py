"""Ranks that rest, and numbers that ranks draw, in mode "async".

Tested in tests/worker/test_async.py.
"""

from __future__ import annotations

import threading

from tfps.errors import ProtocolError

_MAX_COUNTERS = 1024  # of which those drawn from last are kept; a loop over a dataset takes one
_MAX_NAME = 256


class Counters:
    """Numbers that ranks draw, each once. Each rank's first is its rank, the others count up from `workers`."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._lock = threading.Lock()  # guards _drawn
        # By name, in the order of last use: the ranks that have their first, the next number.
        self._drawn: dict[str, tuple[set[int], int]] = {}

    def take(self, name: str, rank: int) -> int:
        """The next number of the counter `name` for `rank`.

        Raises:
            ProtocolError: there is no such rank, or the name is too long.
        """
        if not 0 <= rank < self._workers or len(name) > _MAX_NAME:
            raise ProtocolError(
                f"a number must be drawn by one of the {self._workers} ranks, from a counter whose name has at most "
                f"{_MAX_NAME} characters, got rank {rank} and {len(name)} characters"
            )
        with self._lock:
            begun, following = self._drawn.pop(name, (set[int](), self._workers))
            if len(self._drawn) == _MAX_COUNTERS:
                del self._drawn[next(iter(self._drawn))]
            if rank in begun:
                number, following = following, following + 1
            else:
                number = rank
                begun.add(rank)
            self._drawn[name] = begun, following
            return number


def not_assigned(rank: str, bucket: str) -> str:
    """The text of the error for a rank that others wait for in `bucket`, and that goes elsewhere."""
    return (
        f"{rank} has ended its epoch, or exchanges something else, while others wait for its first step, or for it to "
        f"assign values to variables of bucket '{bucket}' as they have, or to collect what compression holds back of "
        "them: give every rank a batch, assign on every rank, and save a tf.train.Checkpoint on every rank between "
        "epochs"
    )
