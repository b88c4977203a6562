"""What a pserver does with the frames of one rank, on either data path.

Tested in tests/pserver/test_server.py.
"""

from __future__ import annotations

from tfps.pserver.job import Job
from tfps.wire.frames import Header, Kind
from tfps.wire.shared_memory import Place
from tfps.wire.stream import not_expected


class Pushes:
    """Receives one rank's frames; see `Receiver`. A push stays where it was received until its sum is complete."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank = job, rank

    def memory(self, header: Header, nbytes: int) -> memoryview | None:
        return None

    def data(self, header: Header, payload: memoryview, place: Place | None) -> None:
        self._job.push(self._rank, header, payload, place)

    def notice(self, header: Header, payload: memoryview) -> None:
        if header.kind != Kind.NUMBERS:
            raise not_expected(header, Kind.PUSH)
        self._job.take_numbers(self._rank, header, payload)
