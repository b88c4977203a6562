"""How much a sender hands to the kernel at a time: half a millisecond of the link; 64 KiB if that is more, but takes
at most 3 ms.

An urgent slice cannot overtake what the kernel holds. Too little there leaves the link idle between two wake-ups of
the sender, and small parts cost CPU. docs/transport.md has the measurements.
"""

from __future__ import annotations

PART_S, SLOW_PART_S = 0.5e-3, 3e-3  # link time of one part, and of one that is larger to save CPU
UNSENT_S = 0.75e-3  # link time of what the kernel holds unsent (TCP_NOTSENT_LOWAT)
MIN_BYTES, CHEAP_BYTES, MAX_BYTES = 16 * 1024, 64 * 1024, 1024 * 1024
_FIRST_BYTES = CHEAP_BYTES
_LEAST_S = 5e-3  # shortest time to measure a rate
_SMOOTHING = 0.3
_FREE = 16  # after so many parts in a row without a wait they grow
_UNLIMITED = 4  # so many mean that nothing need be asked before the next


class Pace:
    """Adapts the size of parts to the socket's rate. For one thread.

    Attributes:
        part_bytes: payload bytes to hand over at a time.
        unsent_bytes: the most that the kernel may hold unsent.
    """

    def __init__(self) -> None:
        self.part_bytes, self.unsent_bytes = _FIRST_BYTES, _unsent(_FIRST_BYTES)
        self._rate = 0.0  # bytes per second
        self._since_s: float | None = None  # the socket has been full at each check since
        self._nbytes = 0  # taken since
        self._free = 0  # parts taken without a wait

    @property
    def unlimited(self) -> bool:
        """Whether the socket has taken several parts in a row at once: it is not the link that limits."""
        return self._free >= _UNLIMITED

    def idle(self) -> None:
        """Notes that there was nothing to send.

        Measuring restarts when the socket is full again. And that a socket takes what comes at the link's own rate, as
        replies do, does not show that the link is faster.
        """
        self._since_s, self._free = None, 0

    def sent(self, nbytes: int, *, waited: bool, now_s: float) -> bool:
        """Notes that the socket took `nbytes`, at once or after it `waited`; returns whether the sizes changed."""
        if not waited:
            self._nbytes += nbytes
            self._free += 1
            if self._free >= _FREE and self.part_bytes < MAX_BYTES:
                self._free = 0
                return self._set(2 * self.part_bytes)
            return False
        self._free = 0
        if self._since_s is None:
            self._since_s, self._nbytes = now_s, nbytes
            return False
        passed_s = now_s - self._since_s
        if passed_s < _LEAST_S:
            self._nbytes += nbytes
            return False
        rate = self._nbytes / passed_s
        self._rate = rate if not self._rate else (1 - _SMOOTHING) * self._rate + _SMOOTHING * rate
        self._since_s, self._nbytes = now_s, nbytes
        return self._set(max(self._rate * PART_S, min(CHEAP_BYTES, self._rate * SLOW_PART_S)))

    def _set(self, nbytes: float) -> bool:
        """Rounds to a power of two, so that small changes of the rate have no effect."""
        part = MIN_BYTES
        while part < MAX_BYTES and 1.5 * part < nbytes:
            part *= 2
        if part == self.part_bytes:
            return False
        self.part_bytes, self.unsent_bytes = part, _unsent(part)
        return True


def _unsent(part_bytes: int) -> int:
    return int(part_bytes * UNSENT_S / PART_S)
