"""A receiver of frames that keeps what it gets."""

from __future__ import annotations

import threading

from tfps.wire.frames import Header
from tfps.wire.shared_memory import Place


class Taking:
    """See `tfps.wire.connection.Receiver`; sets `all` when `expected` data frames have come."""

    def __init__(self, expected: int = 0) -> None:
        self.got: list[tuple[Header, bytes]] = []
        self.notices: list[tuple[Header, bytes]] = []
        self.all = threading.Event()
        self._expected = expected

    def memory(self, header: Header, nbytes: int) -> memoryview | None:
        return None

    def data(self, header: Header, payload: memoryview, place: Place | None) -> None:
        self.got.append((header, bytes(payload)))
        if len(self.got) == self._expected:
            self.all.set()

    def control(self, header: Header, payload: memoryview) -> None:
        self.notices.append((header, bytes(payload)))
