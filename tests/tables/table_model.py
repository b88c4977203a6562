"""What a table must do, one row at a time: dictionaries, and no care for speed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfps.exchange import rules
from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.tables import hashing
from tfps.tables.initial import Initial
from tfps.tables.spec import TableSpec
from tfps.tables.table import Table
from tfps.types import Argument, Options

EXTREMES = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**32)]
RULES = {
    "sgd": ((("momentum", 0.0), ("nesterov", 0.0)), ()),
    "adagrad": ((("epsilon", 1e-7),), (("accumulator", 0.1),)),
    "adam": ((("beta_1", 0.9), ("beta_2", 0.99), ("epsilon", 1e-7)), (("momentum", 0.0), ("velocity", 0.0))),
}
SCALARS = {"sgd": (0.0, 0.5), "adagrad": (0.0, 0.5), "adam": (0.0, 0.5, 0.25)}


def int64(ids: Sequence[int]) -> np.ndarray:
    return np.array(ids, np.int64)


def update_of(rule: str = "adagrad", dim: int = 3, *, decay: bool = False) -> UpdateSpec:
    constants, slots = RULES[rule]
    return UpdateSpec(rule, (*constants, *((("weight_decay", 0.01),) if decay else ())), slots, (dim,), (decay,))


def spec_of(
    rule: str = "adagrad", dim: int = 3, *, rows: int | None = None, decay: bool = False, **other: Argument
) -> TableSpec:
    rest: Options = {"initial": Initial("uniform", -0.5, 0.5), "seed": 7, **other}
    return TableSpec(dim, rows, update=update_of(rule, dim, decay=decay), **rest)


def scalars_of(spec: TableSpec) -> StepScalars:
    return StepScalars(0, SCALARS[spec.update.rule])


class Model:
    """Rows by id: arrays (row, slots) and step; how often ids without a row have been updated."""

    def __init__(self, spec: TableSpec, count: int) -> None:
        self.spec, self.now = spec, -1
        self.limit = None if spec.max_rows is None else -(-spec.max_rows // count)
        self.rows: dict[int, tuple[list[np.ndarray], int]] = {}
        self.seen: dict[int, int] = {}
        self.made = self.evicted = self.expired = self.refused = 0

    def read(self, id_: int) -> np.ndarray:
        if id_ in self.rows:
            return self.rows[id_][0][0]
        return self.spec.initial.values(self.spec.seed, int64([id_]), self.spec.dim)[0]

    def update(self, parts: list[dict[int, np.ndarray]], step: int) -> None:
        step = max(step, self.now)
        self._expire(max(self.now, step - 1))
        sums: dict[int, np.ndarray] = {}
        for part in parts:
            for id_, gradient in part.items():
                sums[id_] = sums[id_] + gradient if id_ in sums else gradient
        scalars = dict(zip(self.spec.update.scalars, scalars_of(self.spec).values, strict=True))
        for id_, gradient in sums.items():
            if id_ not in self.rows:
                self.seen[id_] = self.seen.get(id_, 0) + 1
                if self.seen[id_] < self.spec.admit_after:
                    self.refused += 1
                    continue
                slots = [np.full(self.spec.dim, value, np.float32) for _, value in self.spec.update.slots]
                self.rows[id_] = [self.read(id_).copy(), *slots], step
                self.made += 1
            w, *slots = self.rows[id_][0]
            named = {name: slot for (name, _), slot in zip(self.spec.update.slots, slots, strict=True)}
            runs = [(0, self.spec.dim, self.spec.update.decayed[0])]
            rules.update(self.spec.update, runs, w, named, gradient, scalars)
            self.rows[id_] = [w, *slots], step
        self.now = step
        self._expire(step)
        if self.limit is not None and len(self.rows) > self.limit:
            oldest = sorted(self.rows, key=lambda id_: (self.rows[id_][1], int(hashing.of_ids(int64([id_]))[0])))
            for id_ in oldest[: len(self.rows) - self.limit + self.limit // 16]:
                del self.rows[id_]
                self.evicted += 1

    def _expire(self, now: int) -> None:
        if self.spec.expire_after is not None:
            for id_ in [id_ for id_, (_, step) in self.rows.items() if step <= now - self.spec.expire_after]:
                del self.rows[id_]
                self.expired += 1


class Pservers:
    """The tables of `count` pservers, used as one."""

    def __init__(self, spec: TableSpec, count: int) -> None:
        self.spec, self.count = spec, count
        self.tables = [Table(spec, place, count) for place in range(count)]

    def _owners(self, ids: np.ndarray) -> np.ndarray:
        return self.spec.owners(ids, self.count)

    def update(self, parts: list[dict[int, np.ndarray]], step: int) -> None:
        arrays = [
            (int64(list(part)), np.array([*part.values()], np.float32).reshape(-1, self.spec.dim)) for part in parts
        ]
        for place, table in enumerate(self.tables):
            own = [(ids, gradients, self._owners(ids) == place) for ids, gradients in arrays]
            table.update([(ids[of], gradients[of]) for ids, gradients, of in own], scalars_of(self.spec), step)

    def lookup(self, ids: Sequence[int]) -> np.ndarray:
        pulled = np.full((len(ids), self.spec.dim), np.nan, np.float32)
        for place, table in enumerate(self.tables):
            own = self._owners(int64(ids)) == place
            pulled[own] = table.lookup(int64(ids)[own])
        return pulled


def dump(tables: Sequence[Table], since: int | None = None) -> dict[int, tuple[int, list[bytes]]]:
    """All rows: id -> step, row and slots."""
    found: dict[int, tuple[int, list[bytes]]] = {}
    for table in tables:
        for chunk in table.chunks(since, most_rows=7):
            for number, id_ in enumerate(chunk.ids.tolist()):
                assert id_ not in found
                found[id_] = int(chunk.steps[number]), [array[number].tobytes() for array in chunk.arrays]
    return found
