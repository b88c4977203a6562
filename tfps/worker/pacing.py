"""What a worker tells and asks pservers in mode "async", beside its pushes.

Tested in tests/worker/test_async.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfps.protos import tfps_pb2 as pb
from tfps.wire.control import Pserver
from tfps.worker.membership import Membership


class Pacing:
    """Any thread. Blocks on the network.

    Args:
        timeout_s: of one call.
        check_open: raises why nothing can be asked any more, if so.
    """

    def __init__(
        self,
        pservers: Sequence[Pserver],
        membership: Membership,
        timeout_s: float,
        check_open: Callable[[], None],
    ) -> None:
        self._pservers, self._membership, self._timeout_s = pservers, membership, timeout_s
        self._check_open = check_open

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
