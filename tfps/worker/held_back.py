"""What compression holds back, for checkpoints.

Tested in tests/worker/test_compression.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tfps.exchange.codecs import Floats
from tfps.exchange.interface import OnReply, Reply
from tfps.worker.bucket import PushedBucket


class HeldBack:
    """What all ranks and pservers hold back of the buckets, for checkpoints. For one thread at a time.

    Args:
        buckets: all declared ones, by number; grows over time.
        push: pushes what is held back of a bucket, whole.
        rank: this worker's, once it has joined.
    """

    def __init__(
        self, buckets: Sequence[PushedBucket], push: Callable[[int, OnReply], None], rank: Callable[[], int]
    ) -> None:
        self._buckets, self._push, self._rank = buckets, push, rank

    def steps(self, bucket: int) -> int:
        """How many steps of a bucket have begun."""
        return self._buckets[bucket].steps

    def collect(self, bucket: int, on_reply: OnReply) -> None:
        """Takes one step of `bucket`, as every rank must: the reply is the sum of all that is held back of it.

        After that rank 0 holds back the sum, and neither other ranks nor pservers hold anything. So what follows is the
        same as after `hold` with this sum in a new job, whatever its numbers of workers and pservers. Nothing else of
        the bucket may be under way.
        """

        def take(reply: Reply) -> None:
            if reply.error is None:
                self.hold(bucket, np.asarray(reply.sum).view(np.float32))
            on_reply(reply)

        self._push(bucket, take)

    def hold(self, bucket: int, values: Floats) -> None:
        """Makes rank 0 hold back `values` of `bucket`, other ranks nothing."""
        compressed = self._buckets[bucket].compressed
        if compressed is not None and compressed.held is not None:
            compressed.held[...] = values if self._rank() == 0 else 0
