"""What a table is: all pservers that hold a part of it have the same."""

from __future__ import annotations

import dataclasses
import json
import numbers
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tfps.errors import ConfigError, ProtocolError
from tfps.exchange.codecs import ITEM_BYTES
from tfps.exchange.requests import Ids
from tfps.exchange.update_spec import MEAN, UpdateSpec
from tfps.tables import hashing
from tfps.tables.initial import Initial

MOST_DIM, MOST_ROWS, MOST_STEP = 2**20, 2**62, 2**31 - 2
MOST_ADMIT = 2**16 - 1


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table of rows of `dim` numbers. ConfigError: a field is out of range.

    With `rows`, ids are from 0 to below it, and place `id % count` of `count` pservers owns one. Without, any int64 is
    an id, and its mix says who owns it. A row is made by the first update of its id; until then the id reads as its
    initial value.

    Only without `rows`:

    * `admit_after`: a row is made by the N-th update of its id, whose gradient counts; those before it are dropped.
    * `expire_after`: rows go that have had no update in so many steps.
    * `max_rows`: of the whole table; of each pserver the `count`-th part, rounded up. Rows beyond it go, the least
      recently updated first.
    """

    dim: int
    rows: int | None
    seed: int
    initial: Initial
    update: UpdateSpec  # of one variable of `dim` items
    admit_after: int = 1
    expire_after: int | None = None  # steps
    max_rows: int | None = None

    def __post_init__(self) -> None:
        _check_whole("dim", self.dim, 1, MOST_DIM)
        _check_whole("seed", self.seed, -(2**63), 2**64 - 1)
        _check_whole("admit_after", self.admit_after, 1, MOST_ADMIT)
        for name, most in (("rows", MOST_ROWS), ("expire_after", MOST_STEP), ("max_rows", MOST_ROWS)):
            if (value := getattr(self, name)) is not None:
                _check_whole(name, value, 1, most)
        if self.rows is not None:
            given = (("admit_after", self.admit_after, 1), ("expire_after", self.expire_after, None))
            for name, value, default in (*given, ("max_rows", self.max_rows, None)):
                if value != default:
                    raise ConfigError(
                        f"{name} must be {default} for a table with a fixed number of rows ({self.rows}), got {value}; "
                        "rows=None has no such number"
                    )
        rule = self.update
        if rule.sizes != (self.dim,):
            raise ConfigError(f"update of a table must have sizes ({self.dim},), its dim, got {rule.sizes}")
        if MEAN in dict(rule.constants):
            raise ConfigError(f"update of a table must add gradients, not take their mean: got the constant {MEAN!r}")

    @property
    def row_bytes(self) -> int:
        """Of one row and its slots."""
        return ITEM_BYTES * self.dim * (1 + len(self.update.slots))

    def text(self) -> str:
        """The spec in one line; `parse` gives the same bits back."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> TableSpec:
        """The reverse of `text`, or ConfigError."""
        try:
            found = json.loads(text)
            initial, update = found["initial"], UpdateSpec.parse(json.dumps(found["update"]))
            return cls(
                initial=Initial(str(initial["kind"]), float(initial["a"]), float(initial["b"])),
                update=update,
                **{name: found[name] for name in ("dim", "rows", "seed", "admit_after", "expire_after", "max_rows")},
            )
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"a table must be what TableSpec.text returns, got {text[:200]!r}") from error

    def owners(self, ids: Ids, count: int) -> NDArray[np.int64]:
        """The place, from 0 to below `count`, of the owner of each id."""
        if self.rows is not None:
            return ids % count
        return hashing.high_below(hashing.of_ids(ids), count)

    def overlap(self, place: int, count: int, other: int, others: int) -> bool:
        """Whether an id may be owned by `place` of `count`, and by place `other` of `others`."""
        if self.rows is not None:
            return (place - other) % int(np.gcd(count, others)) == 0
        return place * others < (other + 1) * count and other * count < (place + 1) * others

    def check(self, ids: Ids) -> None:
        """Raises ProtocolError that names the first id that the table cannot have."""
        if self.rows is not None and ids.size and (ids.min() < 0 or ids.max() >= self.rows):
            wrong = ids[(ids < 0) | (ids >= self.rows)][0]
            raise ProtocolError(f"ids must be from 0 to {self.rows - 1}, the table has {self.rows} rows, got {wrong}")


def _check_whole(name: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= value <= most:
        raise ConfigError(f"{name} of a table must be a whole number from {least} to {most}, got {value!r}")
