"""Decides which pserver owns a slice.

Workers and pservers decide independently: equal calls in equal order give equal answers.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from tfps.config import Placement
from tfps.errors import ConfigError


class Placer:
    """Places the slices of one bucket after another on pservers 0 to `pservers` - 1. Not thread-safe.

    `"balanced"` takes the pserver with the fewest bytes so far, so that any two differ by at most one slice;
    `"round_robin"` takes them in turn; `"hash"` takes the one given by the slice's name alone.
    """

    def __init__(self, pservers: int, placement: Placement) -> None:
        if pservers < 1:
            raise ConfigError(f"pservers must be at least 1, got {pservers}")
        self._placement = placement
        self._bytes = [0] * pservers
        self._occasional = [0] * pservers
        self._gathers = [0] * pservers
        self._turn = 0

    @property
    def bytes_per_pserver(self) -> list[int]:
        """Bytes that each pserver owns so far, without gathers and occasional buckets."""
        return list(self._bytes)

    def place(self, name: str, sizes: Sequence[int], occasional: bool = False) -> list[int]:
        """The owner of each slice of bucket `name`; `sizes` in bytes. Occasional ones are balanced apart."""
        load = self._occasional if occasional else self._bytes
        owners = []
        for index, nbytes in enumerate(sizes):
            owner = self._next(f"{name}:{index}", load)
            load[owner] += nbytes
            owners.append(owner)
        return owners

    def place_gather(self, name: str) -> int:
        """The owner of a gather. Gathers are counted instead of bytes, as their sizes are unknown."""
        owner = self._next(f"{name}:0", self._gathers)
        self._gathers[owner] += 1
        return owner

    def _next(self, key: str, load: list[int]) -> int:
        if self._placement == "balanced":
            return load.index(min(load))
        if self._placement == "hash":
            return zlib.crc32(key.encode()) % len(load)
        self._turn += 1
        return (self._turn - 1) % len(load)
