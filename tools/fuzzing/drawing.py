"""Random values, without those that are to be left out."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from typing import TypeVar

_T = TypeVar("_T")


class Drawing:
    """Draws values, none of which is in `without`."""

    def __init__(self, numbers: random.Random, without: Collection[str]) -> None:
        self._random, self._without = numbers, frozenset(without)

    def one(self, values: Iterable[_T]) -> _T:
        return self._random.choice([value for value in values if value not in self._without])

    def rarely(self, feature: str, of: int = 4) -> bool:
        """True once in `of` times."""
        return feature not in self._without and self._random.randrange(of) == 0

    def some(self, values: Iterable[str], most: int) -> tuple[str, ...]:
        allowed = [value for value in values if value not in self._without]
        return tuple(self._random.sample(allowed, min(self._random.randint(0, most), len(allowed))))

    def number(self, least: int, most: int) -> int:
        return self._random.randint(least, most)
