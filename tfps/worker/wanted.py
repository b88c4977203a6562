"""Whether other ranks wait for a push of this one.

Tested in tests/worker/test_wanted.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tfps.protos import tfps_pb2 as pb
from tfps.wire.control import Pserver
from tfps.worker.bucket import PushedBucket
from tfps.worker.membership import Membership


class Wanted:
    """Any thread. `wanted` blocks on the network.

    Args:
        buckets: all declared ones, by number; grows over time.
        timeout_s: of a call.
        check_open: raises why nothing can be asked any more, if so.
    """

    def __init__(
        self,
        pservers: Sequence[Pserver],
        membership: Membership,
        buckets: Sequence[PushedBucket],
        timeout_s: float,
        check_open: Callable[[], None],
    ) -> None:
        self._pservers, self._membership, self._buckets, self._timeout_s = pservers, membership, buckets, timeout_s
        self._check_open = check_open

    def wanted(self, bucket: int) -> bool:
        """See `Exchange.wanted`. One slice tells: all of a bucket's are pushed together."""
        self._check_open()
        owner = self._pservers[self._buckets[bucket].cutting.owners[0]]
        rank = self._membership.rank
        request = pb.WaitingRequest(incarnation=self._membership.incarnation, rank=rank, bucket=bucket)
        missing = owner.call("Waiting", request, self._timeout_s).missing
        return any(each.startswith(f"rank {rank} ") for each in missing)

    def renew(self, bucket: int) -> None:
        """See `Exchange.renew`."""
        target = self._buckets[bucket]
        with target.lock:
            if target.current is not None:
                target.current.started_s = time.monotonic()
