"""What a direction of a stream has still to carry in a step: what it carried in the step before.

Tested in tests/wire/test_upcoming.py.
"""

from __future__ import annotations

from tfps.wire.frames import Header

_KEPT = 8  # steps: buckets that are not pushed together count theirs apart
_AHEAD = 2  # steps by which batches and rows that are asked for may be ahead of gradients

Key = tuple[int, int, int]  # priority, bucket, index of a slice


class Upcoming:
    """Tells whether something more urgent than a frame may come before its step is over. Not thread-safe.

    It expects each slice that has come since the step before began, unless it has come in this step or one soon after.
    What counts its steps apart may come at any time. So may all in a first step. A wrong answer costs time and nothing
    else: see docs/transport.md.
    """

    def __init__(self) -> None:
        self._last: dict[Key, tuple[int, int]] = {}  # the step in which a slice came last, and how many came before it
        self._count = 0
        self._began: dict[int, int] = {}  # by step: how many had come before it
        self._expected: dict[int, list[Key]] = {}  # by step; the most urgent at the end

    def put(self, header: Header) -> None:
        """A slice has come."""
        step = header.step
        if step not in self._began:
            self._began[step] = self._count
            if len(self._began) > _KEPT:
                oldest = next(iter(self._began))
                del self._began[oldest]
                self._expected.pop(oldest, None)
                since = next(iter(self._began.values()))
                self._last = {key: came for key, came in self._last.items() if came[1] >= since}
        self._last[header.priority, header.bucket, header.index] = step, self._count
        self._count += 1

    def before(self, header: Header) -> bool:
        """Whether something more urgent may come before the step of `header`, which has been put, is over."""
        step, last = header.step, self._last
        since = self._began.get(step - 1)
        if since is None or step not in self._began:
            return True
        if (expected := self._expected.get(step)) is None:
            recent = [key for key, came in last.items() if came[1] >= since]
            expected = self._expected[step] = sorted(recent, reverse=True)
        while expected and (expected[-1] not in last or step <= last[expected[-1]][0] <= step + _AHEAD):
            expected.pop()
        return bool(expected) and expected[-1][0] < header.priority
