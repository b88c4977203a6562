"""Sums encoded contributions to a slice: decoded, then added in float32."""

from __future__ import annotations

import numpy as np

from tfps.errors import ProtocolError
from tfps.exchange.aggregate import Part, SumRound
from tfps.exchange.codecs import ITEM_BYTES, Codec


class EncodedSumRound(SumRound):
    """As `SumRound`, for contributions encoded by `codec`.

    In a **whole** step all contributions are plain float32: what the ranks hold back, which they collect. Parts are
    arrays of uint8 where they are encoded, else of float32.
    """

    __slots__ = ("_codec", "_whole")

    def __init__(self, label: str, workers: int, nbytes: int, deterministic: bool, codec: Codec) -> None:
        super().__init__(label, workers, np.dtype(np.float32), nbytes, deterministic)
        self._codec = codec
        self._whole = False

    @property
    def whole(self) -> bool:
        """Whether this step is whole; known once a rank has contributed."""
        return self._whole

    @property
    def items(self) -> int:
        return self.nbytes // ITEM_BYTES

    def part_bytes(self, whole: bool) -> int:
        """Size of a contribution."""
        return self.nbytes if whole else self._codec.wire_bytes(self.items)

    def expect(self, rank: int, whole: bool) -> None:
        """Checks that the ranks do the same; call it before each `add`.

        Raises:
            ProtocolError: one collects what is held back, another trains.
        """
        if not self.arrived:
            self._whole = whole
        elif whole != self._whole:
            one, other = ("collects", "trains") if whole else ("trains", "collects")
            raise ProtocolError(
                f"{self.label}, step {self.step}: rank {rank} {one} while rank {min(self.arrived)} {other}: what "
                "compression holds back is collected when a checkpoint is saved or restored; do so on every rank, or "
                "call strategy.combine() on every rank before"
            )

    @property
    def contributed(self) -> bool:
        """Whether any rank has contributed to the current step more than its presence."""
        return self._sum is not None or bool(self._parts)

    def _add(self, part: Part, owned: bool) -> None:
        if part.dtype == np.float32:
            super()._add(part, owned)
        elif self._sum is None or not self._owned:
            fresh = np.empty(self.items, np.float32)
            self._codec.decode(part, fresh)
            super()._add(fresh, True)
        else:
            self._codec.decode(part, self._sum, add=True)
