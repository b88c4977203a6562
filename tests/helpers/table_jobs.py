"""Tables for tests that look at them from outside: declared, asked and updated through exchanges, no TensorFlow."""

from __future__ import annotations

import numpy as np
from jobs import Pending

from tfps.exchange.interface import BucketSpec, Exchange
from tfps.exchange.requests import Lookup, RowUpdate
from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.tables.initial import Initial
from tfps.tables.spec import TableSpec
from tfps.types import Argument, Array

DIM = 3
SCALARS = StepScalars(0, (0.0, 0.5))
TABLE = 3  # the number of a table in a job of `moving`, after the buckets of `moving.SPECS`
IDS = np.arange(-40, 40) * 2**56


def described(**fields: Argument) -> TableSpec:
    """A table of rows of `DIM` floats, for any ids."""
    update = UpdateSpec("adagrad", (("epsilon", 1e-7),), (("accumulator", 0.1),), (DIM,), (False,))
    given = {"dim": DIM, "rows": None, "seed": 7, "initial": Initial("uniform", -1.0, 1.0), "update": update}
    return TableSpec(**{**given, **fields})


def declared(name: str, spec: TableSpec | None = None, **fields: Argument) -> BucketSpec:
    given = {"names": (name,), "kind": "table", "nbytes": 0, "dtype": "float32", "priority": 0}
    return BucketSpec(**{**given, "table": (spec or described()).text(), **fields})


def ids_of(*ids: int) -> Array:
    return np.array(ids, np.int64)


def asked(exchange: Exchange, table: int, ids: Array, step: int) -> Pending:
    """Asks, for the last time in `step`, for rows that may get gradients in it."""
    pending = Pending()
    exchange.tables.lookup(Lookup(table, step, ids, trains=True, complete=True), pending)
    return pending


def added(exchange: Exchange, table: int, ids: Array, step: int) -> Pending:
    """Adds gradients of ones."""
    pending = Pending()
    ones = np.ones((len(ids), DIM), np.float32)
    exchange.tables.apply(RowUpdate(table, step, ids, ones, SCALARS.pack()), pending)
    return pending
