"""Rows of one pserver without anything around them: a `Table` beside NumPy on plain arrays that are indexed directly.

On one thread. Ids of tables without a bound are any of 64 bits, which the table must find first; NumPy knows positions.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.tables.initial import Initial
from tfps.tables.spec import TableSpec
from tfps.tables.table import Table
from tfps.types import Array, Json
from tools.tables import work as works
from tools.tables.work import Ids, Work

DIM = 16
LAWS = ("uniform", "zipf")  # of ids
_SCALARS = StepScalars(0, (0.0, works.LEARNING_RATE))
_FILLED = 2**16  # rows at a time


class _Plain:
    """Rows and their accumulators as two arrays."""

    def __init__(self, rows: int) -> None:
        self._rows = np.full((rows, DIM), 0.01, np.float32)
        self._accumulators = np.full((rows, DIM), works.ACCUMULATOR, np.float32)

    def pull(self, positions: Ids) -> Array:
        return self._rows.take(positions, axis=0)

    def scatter(self, positions: Ids, values: Array) -> None:
        self._rows[positions] = values

    def update(self, positions: Ids, gradients: Array) -> None:
        """Adagrad."""
        rows, accumulators = self._rows.take(positions, axis=0), self._accumulators.take(positions, axis=0)
        accumulators += np.square(gradients)
        rows -= gradients * np.float32(works.LEARNING_RATE) / np.sqrt(accumulators + np.float32(works.EPSILON))
        self._rows[positions] = rows
        self._accumulators[positions] = accumulators


def measure(rows: int, *, bounded: bool, batches: Sequence[int], rounds: int) -> Iterator[dict[str, Json]]:
    """Million rows per second of each kind of work, which alternate; a run for each round, law of ids, and batch.

    Args:
        batches: how many ids, which all differ.
    """
    work = Work(rows, bounded, DIM)
    random = np.random.default_rng(0)
    table, about = _filled(work)
    plain = _Plain(rows)
    step = rows  # later than all of filling
    for number, law, count in itertools.product(range(-1, rounds), LAWS, batches):
        some = random.choice(rows, count, replace=False) if law == "uniform" else work.different(random, count)
        positions = random.permutation(some)
        ids, gradients = work.ids(positions), random.normal(size=(count, DIM)).astype(np.float32)
        step += 1
        found = {
            "pull": _speed(count, lambda ids=ids: table.lookup(ids)),  # type: ignore[misc]
            "numpy_take": _speed(count, lambda at=positions: plain.pull(at)),  # type: ignore[misc]
            "update": _speed(count, lambda i=ids, g=gradients, s=step: table.update([(i, g)], _SCALARS, s)),  # type: ignore[misc]
            "numpy_update": _speed(count, lambda at=positions, g=gradients: plain.update(at, g)),  # type: ignore[misc]
            "numpy_scatter": _speed(count, lambda at=positions, g=gradients: plain.scatter(at, g)),  # type: ignore[misc]
        }
        if number >= 0:  # the first one warms
            yield {"law": law, "batch": count, "round": number, **about, **found}


def _filled(work: Work) -> tuple[Table, dict[str, Json]]:
    """A table whose rows have each been made by an update, and what that took."""
    update = UpdateSpec(
        "adagrad", (("epsilon", works.EPSILON),), (("accumulator", works.ACCUMULATOR),), (DIM,), (False,)
    )
    spec = TableSpec(DIM, work.rows if work.bounded else None, 7, Initial("uniform", -0.05, 0.05), update)
    table, gradients, took = Table(spec), np.full((_FILLED, DIM), 0.1, np.float32), list[float]()
    for begin in range(0, work.rows, _FILLED):
        ids = work.ids(np.arange(begin, min(begin + _FILLED, work.rows), dtype=np.int64))
        began_s = time.perf_counter()
        table.update([(ids, gradients[: len(ids)])], _SCALARS, begin)
        took.append(time.perf_counter() - began_s)
    nbytes = table.stats().memory_bytes
    return table, {
        "rows": work.rows,
        "bounded": work.bounded,
        "made": work.rows / sum(took) / 1e6,
        "longest_update_s": max(took),
        "overhead_bytes": nbytes / work.rows - spec.row_bytes,
    }


def _speed(rows: int, call: Callable[[], object]) -> float:
    """Million rows per second."""
    began_s = time.perf_counter()
    call()
    return rows / (time.perf_counter() - began_s) / 1e6
