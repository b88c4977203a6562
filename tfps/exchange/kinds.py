"""The kinds of buckets, and what a room has for each of them.

Tested in tests/exchange/test_interface.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

BucketKind = Literal["sum", "gather", "table"]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ByKind(Generic[_T]):
    """What there is for each kind. A new kind is a new field: mypy then names every room that has nothing for it."""

    sum: _T  # the payloads of all ranks are added
    gather: _T  # they are returned one by one
    table: _T  # rows are kept; see `Tables`

    def __getitem__(self, kind: BucketKind) -> _T:
        found: _T = getattr(self, kind)
        return found


# Whether pservers alone have what a bucket keeps: of the rows of a table no worker has a copy.
ONLY_ON_PSERVERS = ByKind(sum=False, gather=False, table=True)
