"""Parameters that travel as encoded changes. No I/O and no locks.

Their owner keeps what it has **shown** to all workers, and sends the encoded difference. What a codec cannot express is
part of the next difference, so it is late but not lost, and nothing is held back beside it. Workers compute gradients
at what they were shown, the owner updates the exact parameters (a preserved central model: MCM,
https://arxiv.org/abs/2102.12528).
"""

from __future__ import annotations

import numpy as np

from tfps.exchange.codecs import Bytes, Codec, Floats
from tfps.exchange.rules import flushed


class Change:
    """Encodes parameters as their change.

    Args:
        shown: what all workers have; each encoding adds to it what they decode, as they do, bit for bit.
    """

    __slots__ = ("_codec", "_shown")

    def __init__(self, codec: Codec, shown: Floats) -> None:
        self._codec, self._shown = codec, shown

    def wire_bytes(self, items: int) -> int:
        """Size of so many encoded changes."""
        return self._codec.wire_bytes(items)

    def encode(self, values: Floats, held: Floats | None = None) -> Bytes:
        """Encodes the change from what was shown to `values`; `held` is not used."""
        with np.errstate(all="ignore"):
            change = np.subtract(values, self._shown)
        data = self._codec.encode(change)
        self._codec.decode(data, change)
        # All of it, not only what a codec has chosen: adding 0 makes 0 of -0 and of denormals, as in TensorFlow.
        with flushed(), np.errstate(all="ignore"):
            np.add(self._shown, change, out=self._shown)
        return data
