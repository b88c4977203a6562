"""Going back to what the rows of a table were, whatever has happened since."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.tables.table_model import int64, scalars_of, spec_of
from tfps.errors import ConfigError
from tfps.exchange.requests import Load
from tfps.tables import files
from tfps.tables.spec import TableSpec
from tfps.tables.table import Table
from tfps.types import Array, Options

POOL = int64(range(60))


def slots_of(table: Table) -> dict[int, bytes]:
    return {
        id_: b"".join(array[at].tobytes() for array in chunk.arrays[1:])
        for chunk in table.chunks()
        for at, id_ in enumerate(chunk.ids.tolist())
    }


def keep(table: Table, name: str, rank: int = 0) -> None:
    table.moments.keep(name, rank, table.spec, table.step)


def go_back(table: Table, name: str, seed: str = "") -> None:
    files.load(table, Load(0, 0, (), name, name, seed=seed))


class Run:
    """A table to which things happen at random."""

    def __init__(self, spec: TableSpec, seed: int) -> None:
        self.table, self.random, self.step = Table(spec), np.random.default_rng(seed), 0

    def some(self) -> Array:
        return self.random.choice(POOL, self.random.integers(1, 12), replace=False)

    def rows(self, count: int) -> Array:
        return self.random.normal(size=(count, self.table.spec.dim)).astype(np.float32)

    def happens(self, steps: int) -> None:
        for _ in range(steps):
            self.step += int(self.random.integers(1, 3))
            parts = [(ids, self.rows(len(ids))) for ids in (self.some(), self.some())]
            self.table.update(parts, scalars_of(self.table.spec), self.step)
            if self.random.random() < 0.2:
                ids = self.some()
                self.table.assign(ids, self.rows(len(ids)))


@pytest.mark.parametrize(
    "limits", [{"rows": 60}, {}, {"expire_after": 5}, {"max_rows": 30}, {"expire_after": 9, "max_rows": 40}], ids=str
)
def test_all_ids_read_as_they_did_whatever_has_happened_since(limits: Options, tmp_path: Path) -> None:
    for seed in range(8):
        run = Run(spec_of(**limits), seed)
        table = run.table
        run.happens(int(run.random.integers(0, 10)))
        first = table.lookup(POOL)
        keep(table, "first")
        run.happens(6)
        second = table.lookup(POOL)
        keep(table, "second")
        run.happens(9)
        before = slots_of(table)
        go_back(table, "second")
        np.testing.assert_array_equal(table.lookup(POOL), second)
        after = slots_of(table)
        assert all(after[id_] == before[id_] for id_ in after.keys() & before.keys())  # slots stay
        if "rows" in limits:
            assert after.keys() == before.keys()
        other = Run(spec_of(**limits, seed=99), seed + 100)
        other.happens(9)
        files.write_shard(other.table, tmp_path / str(seed), "user", since=None)
        files.read_table(table, tmp_path / str(seed), "user")
        np.testing.assert_array_equal(table.lookup(POOL), other.table.lookup(POOL))
        run.step = other.step
        for _ in range(2):  # what is kept stays, also through a restore
            go_back(table, "first")
            np.testing.assert_array_equal(table.lookup(POOL), first)
            run.happens(4)


def test_rows_that_are_past_their_time_since_come_back() -> None:
    run = Run(spec_of(expire_after=17), 0)
    run.table.update([(POOL, run.rows(len(POOL)))], scalars_of(run.table.spec), 0)
    then = run.table.lookup(POOL)
    keep(run.table, "then")
    for step in range(1, 18):  # rows are swept in every second one: in the last they are there, and past their time
        run.table.update([], scalars_of(run.table.spec), step)
    assert run.table.stats().rows == len(POOL)
    assert not np.array_equal(run.table.lookup(POOL), then)
    go_back(run.table, "then")
    np.testing.assert_array_equal(run.table.lookup(POOL), then)


def test_going_back_to_initial_values_keeps_slots() -> None:
    run = Run(spec_of(), 0)
    initial = run.table.lookup(POOL)
    run.happens(5)
    before = slots_of(run.table)
    seed = str(run.table.spec.seed)
    go_back(run.table, "initial", seed)
    np.testing.assert_array_equal(run.table.lookup(POOL), initial)
    assert slots_of(run.table) == before


def test_what_has_changed_is_in_the_next_incremental_save(tmp_path: Path) -> None:
    run = Run(spec_of(), 0)
    run.happens(5)
    keep(run.table, "then")
    run.happens(5)
    found = files.write_shard(run.table, tmp_path / "1", "user", since=None)
    go_back(run.table, "then")
    files.write_shard(run.table, tmp_path / "2", "user", since=found["step"])
    other = Table(run.table.spec)
    files.read_table(other, [tmp_path / "1", tmp_path / "2"], "user")
    np.testing.assert_array_equal(other.lookup(POOL), run.table.lookup(POOL))


def test_memory_is_that_of_what_has_changed_until_every_rank_has_forgotten() -> None:
    run = Run(spec_of(), 0)
    run.happens(20)
    before = run.table.stats().memory_bytes
    for rank in (0, 1):
        keep(run.table, "then", rank)
    kept = run.table.stats().memory_bytes
    run.table.update([(POOL[:1], run.rows(1))], scalars_of(run.table.spec), run.step)
    assert run.table.stats().memory_bytes > kept
    run.table.moments.forget(["then"], 0)
    run.table.moments.forget(["other"], 1)
    assert run.table.moments.get("then")
    run.table.moments.forget(["then"], 1)
    assert not run.table.moments.get("then")
    with pytest.raises(ConfigError, match="gone"):
        go_back(run.table, "then")
    assert run.table.stats().memory_bytes == before
