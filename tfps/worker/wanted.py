"""Whether other ranks wait for a push of this one.

Tested in tests/worker/test_wanted.py.
"""

from __future__ import annotations

import time

from tfps.protos import tfps_pb2 as pb
from tfps.worker.questions import Questions


class Wanted(Questions):
    """Asks whether others wait, and counts the wait for them anew. See `Questions`."""

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
