"""A slice that its owner updates and whose new parameters travel as an encoded change.

Tested in tests/worker/test_shown.py.
"""

from __future__ import annotations

import numpy as np

from tfps.errors import ProtocolError
from tfps.exchange.codecs import Codec
from tfps.exchange.encoded_sum import EncodedSumRound
from tfps.exchange.shown import Change
from tfps.pserver.compressed_slice import CompressedSlice
from tfps.pserver.updated_slice import UpdatedSlice
from tfps.trace.recorder import Recorder
from tfps.wire.encoding import Encoding


class ShownSlice(CompressedSlice):
    """As `CompressedSlice`, for sums that update what is `kept`, which also says what workers have of it.

    Nothing is held back here: what a reply cannot express is in the next one. A whole step changes nothing that is
    kept; its reply is the sum of what the ranks hold back of their gradients.
    """

    __slots__ = ()

    def __init__(self, recorder: Recorder, codec: Codec, round_: EncodedSumRound) -> None:
        super().__init__(recorder, codec, round_)
        self._held = None

    def _finish(self, last: bool) -> tuple[memoryview, Encoding | None, int]:
        round_, kept = self._sum_round, self.kept
        if not isinstance(kept, UpdatedSlice):
            raise ProtocolError(f"{round_.label} has nothing that a sum could update")
        if round_.whole:
            kept.skip(round_.step)
            return super()._finish(last)
        step = round_.step
        parameters = kept.updated(round_.finish(), step)
        # The reply before this one has reached all ranks, so it has been encoded: nobody else uses what they have.
        change = Change(self._codec, kept.shown)
        return parameters, Encoding(change, np.frombuffer(parameters, np.float32), None), 0
