"""How a bucket's slices are compressed on its worker, and what of them is held back.

Tested in tests/worker/test_compression.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfps.exchange.codecs import ITEM_BYTES, Codec, Floats, codec_of
from tfps.exchange.interface import BucketSpec, OnReply, Reply
from tfps.exchange.slicing import Slice
from tfps.types import Array
from tfps.wire.encoding import Encoding

if TYPE_CHECKING:
    from tfps.worker.bucket import PushedBucket

Failed = Callable[[Exception], Exception]


class Compressed:
    """The codec of one bucket on its worker.

    What is held back belongs to a bucket's numbers and not to its slices, so it stays where slices are cut anew. Slices
    are disjoint, and a slice is encoded for one step after the other: its reply has come before the next push begins.

    Args:
        failed: see `Encoding`.
    """

    def __init__(self, codec: Codec, nbytes: int, failed: Failed) -> None:
        self._codec, self._failed = codec, failed
        self.held: Floats | None = np.zeros(nbytes // ITEM_BYTES, np.float32) if codec.feeds_back else None

    @classmethod
    def of(cls, spec: BucketSpec, failed: Failed) -> Compressed | None:
        """For the bucket `spec`; None if it has no codec."""
        codec = codec_of(spec.codec)
        return None if codec is None else cls(codec, spec.nbytes, failed)

    def wire_bytes(self, piece: Slice) -> int:
        """Encoded size of a slice."""
        return self._codec.wire_bytes(piece.nbytes // ITEM_BYTES)

    def encoding(self, payload: memoryview, piece: Slice) -> Encoding:
        """A slice of `payload`, to be encoded when it is sent."""
        held = None if self.held is None else self.held[_items(piece)]
        values = np.frombuffer(payload[piece.offset : piece.offset + piece.nbytes], np.float32)
        return Encoding(self._codec, values, held, self._failed)

    def decode(self, payload: memoryview, out: Array) -> None:
        """Decodes a slice into its bytes of the sum.

        Raises:
            ProtocolError: it is malformed.
        """
        self._codec.decode(np.frombuffer(payload, np.uint8), out.view(np.float32))

    def all_held(self) -> memoryview:
        """A copy of what is held back, as bytes; nothing must be under way."""
        return memoryview(b"") if self.held is None else self.held.copy().view(np.uint8).data


def _items(piece: Slice) -> slice:
    return slice(piece.offset // ITEM_BYTES, (piece.offset + piece.nbytes) // ITEM_BYTES)


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
