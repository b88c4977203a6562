"""How a bucket's slices are compressed on its worker, and what of them is held back.

Tested in tests/worker/test_compression.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tfps.exchange.codecs import ITEM_BYTES, Codec, Floats
from tfps.exchange.interface import BucketSpec
from tfps.exchange.layout import Slice
from tfps.types import Array
from tfps.wire.encoding import Encoding

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
        return None if spec.codec is None else cls(spec.codec, spec.nbytes, failed)

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
