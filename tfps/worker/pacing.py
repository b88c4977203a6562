"""What a worker tells and asks pservers in mode "async", beside its pushes.

Tested in tests/worker/test_async.py.
"""

from __future__ import annotations

from tfps.protos import tfps_pb2 as pb
from tfps.worker.questions import Questions


class Pacing(Questions):
    """Says that a rank rests, and draws numbers that nobody else gets. See `Questions`."""

    def rest(self) -> None:
        """See `Exchange.rest`."""
        self._check_open()
        request = pb.RestRequest(incarnation=self._membership.incarnation, rank=self._membership.rank)
        for pserver in self._pservers:
            pserver.call("Rest", request, self._timeout_s)

    def ticket(self, counter: str) -> int:
        """See `Exchange.ticket`."""
        self._check_open()
        request = pb.TakeRequest(incarnation=self._membership.incarnation, rank=self._membership.rank, counter=counter)
        return int(self._pservers[0].call("Take", request, self._timeout_s).number)
