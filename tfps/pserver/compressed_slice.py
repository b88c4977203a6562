"""A slice on its owner whose contributions and sums travel encoded.

Tested in tests/worker/test_compression.py.
"""

from __future__ import annotations

import numpy as np

from tfps.errors import ProtocolError
from tfps.exchange.codecs import Codec, Floats
from tfps.exchange.encoded_sum import EncodedSumRound
from tfps.pserver.owned_slice import OwnedSlice
from tfps.trace.recorder import Recorder
from tfps.wire.encoding import Encoding
from tfps.wire.frames import EMPTY, LAST, SHARED, WHOLE, Header
from tfps.wire.shared_memory import Target


class CompressedSlice(OwnedSlice):
    """As `OwnedSlice`. The thread that first sends the sum encodes it, once, so that all ranks get the same bytes.

    What that holds back is added to the next sum. A reply is whole (not encoded) and holds nothing back if the ranks
    collect what is held back, and in the last step of a slice that is cut anew.
    """

    __slots__ = ("_codec", "_held", "_sum_round")

    def __init__(self, recorder: Recorder, codec: Codec, round_: EncodedSumRound) -> None:
        super().__init__(recorder)
        self.round = self._sum_round = round_
        self._codec = codec
        self._held: Floats | None = np.zeros(round_.items, np.float32) if codec.feeds_back else None

    def _add(self, rank: int, header: Header, payload: memoryview, target: Target | None) -> None:
        round_, whole, empty = self._sum_round, bool(header.flags & WHOLE), bool(header.flags & EMPTY)
        expected = 0 if empty else round_.part_bytes(whole)
        if target is not None or len(payload) != expected or header.flags & (LAST | SHARED):
            raise ProtocolError(
                f"payload of {round_.label} must have {expected} bytes in its frame and no LAST flag, got "
                f"{len(payload)} bytes and flags {header.flags}"
            )
        round_.expect(rank, whole)
        part = None if empty else np.frombuffer(payload, np.uint8)
        if part is not None and whole:
            part = part.view(np.float32)
        round_.add(rank, header.step, part, owned=whole and not payload.readonly)

    def _finish(self, last: bool) -> tuple[memoryview, Encoding | None, int]:
        round_ = self._sum_round
        whole, contributed = round_.whole, round_.contributed
        result = round_.finish()
        values = np.frombuffer(result, np.float32)
        # The reply before this one has reached all ranks, so it has been encoded: nobody else uses what is held back.
        if not whole and not last:
            return result, Encoding(self._codec, values, self._held if contributed else None), 0
        if self._held is not None:
            values = values + self._held
            self._held[...] = 0
        return values.view(np.uint8).data, None, WHOLE
