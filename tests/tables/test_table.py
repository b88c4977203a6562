"""A table is its model (table_model.py), bit for bit, on any number of pservers; what is saved is what is restored."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables.table_model import EXTREMES, Model, Pservers, dump, int64, scalars_of, spec_of
from tfps.errors import ConfigError, ProtocolError
from tfps.tables import files
from tfps.tables import table as table_module
from tfps.tables.spec import TableSpec
from tfps.tables.table import Chunk, Table

POOL = [*EXTREMES, *range(100, 125)]
FIXED = 40


def states(models: list[Model]) -> dict[int, tuple[int, list[bytes]]]:
    return {
        id_: (step, [array.tobytes() for array in arrays])
        for model in models
        for id_, (arrays, step) in model.rows.items()
    }


class Run:
    """Pservers and models of their parts, which do the same."""

    def __init__(self, spec: TableSpec, count: int, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        self.pool = POOL if spec.rows is None else list(range(FIXED))
        self.saves: list[Path] = []
        self.saved: dict[int, tuple[int, list[bytes]]] = {}
        self.rows: dict = {}
        self.step = self.saved_step = -1
        self.begin(count)

    def begin(self, count: int) -> None:
        self.pservers, self.models = Pservers(self.spec, count), [Model(self.spec, count) for _ in range(count)]

    def owner(self, id_: int) -> int:
        return int(self.spec.owners(int64([id_]), self.pservers.count)[0])

    def update(self, random: np.random.Generator, ranks: int, most: int, jump: int) -> None:
        self.step += jump
        parts = []
        for _ in range(ranks):
            ids = random.choice(self.pool, random.integers(0, most + 1), replace=False).tolist()
            parts.append({id_: random.normal(size=self.spec.dim).astype(np.float32) for id_ in ids})
        self.pservers.update(parts, self.step)
        for place, model in enumerate(self.models):
            model.update([{i: g for i, g in part.items() if self.owner(i) == place} for part in parts], self.step)
        self.step = max(self.step, self.models[0].now)

    def save(self, incremental: bool) -> None:
        since = self.saved_step if incremental and self.saves else None
        folder = self.folder / str(len(list(self.folder.iterdir())))
        manifests = [files.write_shard(table, folder, "user", since=since) for table in self.pservers.tables]
        assert all(found["since"] == since for found in manifests)
        self.saves = [*self.saves, folder] if since is not None else [folder]
        self.rows, self.saved_step = copy.deepcopy({k: v for m in self.models for k, v in m.rows.items()}), self.step

    def restore(self, count: int) -> None:
        if not self.saves:
            return
        self.begin(count)
        for table in self.pservers.tables:
            files.read_table(table, self.saves, "user")
        self.step = self.saved_step
        for model in self.models:
            model.now = self.step
        for id_, row in copy.deepcopy(self.rows).items():
            self.models[self.owner(id_)].rows[id_] = row

    def check(self) -> None:
        wanted = np.array([self.models[self.owner(id_)].read(id_) for id_ in self.pool])
        assert self.pservers.lookup(self.pool).tobytes() == wanted.tobytes()
        assert dump(self.pservers.tables) == states(self.models)

    def check_counts(self) -> None:
        for table, model in zip(self.pservers.tables, self.models, strict=True):
            table.sweep()
            found = table.stats()
            assert (found.rows, found.made_rows, found.evicted_rows, found.expired_rows, found.refused_rows) == (
                len(model.rows), model.made, model.evicted, model.expired, model.refused
            )  # fmt: skip


operations = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(1, 3), st.integers(0, 20), st.integers(-1, 3)),
        st.tuples(st.just("save"), st.booleans()),
        st.tuples(st.just("restore"), st.integers(1, 3)),
    ),
    max_size=24,
)
specs = st.one_of(
    st.builds(
        spec_of,
        st.sampled_from(["sgd", "adagrad", "adam"]),
        st.integers(1, 5),
        decay=st.booleans(),
        admit_after=st.integers(1, 3),
        expire_after=st.none() | st.integers(1, 12),
        max_rows=st.sampled_from([None, 1, 5, 17, 20]),
    ),
    st.builds(spec_of, st.sampled_from(["sgd", "adagrad", "adam"]), st.integers(1, 5), rows=st.just(FIXED)),
)


@pytest.fixture(autouse=True, scope="module")
def _rows_past_their_time_stay_long() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_module, "_SWEEPS", 1)
        yield


def ran(spec: TableSpec, count: int, todo: list[tuple], seed: int) -> None:
    folder, random = Path(tempfile.mkdtemp()), np.random.default_rng(seed)
    try:
        run = Run(spec, count, folder)
        for name, *arguments in todo:
            if name == "update":
                ranks, most, jump = arguments
                run.update(random, ranks, most, max(jump, -run.step))
            else:
                getattr(run, name)(*arguments)
            run.check()
        run.check_counts()
    finally:
        shutil.rmtree(folder)


@settings(max_examples=60, deadline=None)
@given(specs, st.integers(1, 3), operations, st.integers(0, 2**32))
def test_tables_are_their_model_also_after_saves_and_restores(
    spec: TableSpec, count: int, todo: list[tuple], seed: int
) -> None:
    ran(spec, count, todo, seed)


def test_a_gradient_of_one_rank_is_not_added_to_anything() -> None:
    spec = spec_of("sgd", 1)
    table = Table(spec)
    zero = Chunk(int64([5, 6]), np.zeros(2, np.int32), [np.full((2, 1), -0.0, np.float32)])
    table.restore(zero)
    # -0.0 - 0.5 * 0.0 is -0.0, and 0.0 with a gradient of -0.0, which 0.0 + -0.0 is not.
    gradients = np.array([[0.0], [-0.0]], np.float32)
    table.update([(int64([5, 6]), gradients), (int64([7]), np.ones((1, 1), np.float32))], scalars_of(spec), 1)
    assert np.signbit(table.lookup(int64([5, 6]))).ravel().tolist() == [True, False]


def test_a_pull_changes_nothing_and_takes_no_memory() -> None:
    table = Table(spec_of(rows=None))
    before = table.stats()
    first = table.lookup(int64([*EXTREMES, 5, 5]))
    assert table.stats() == before
    assert first.tobytes() == table.lookup(int64([*EXTREMES, 5, 5])).tobytes()
    first[:] = 0  # a copy
    assert table.lookup(int64([5])).any()


def test_rows_keep_their_values_while_a_table_grows_and_takes_few_bytes_more_than_they_have() -> None:
    spec = spec_of("adagrad", 16)
    table, random = Table(spec), np.random.default_rng(1)
    ids = random.integers(-(2**63), 2**63 - 1, 300_000)
    table.update([(ids[:1000], np.ones((1000, 16), np.float32))], scalars_of(spec), 0)
    kept = table.lookup(ids[:1000])
    for begin in range(1000, ids.size, 13_000):
        some = ids[begin : begin + 13_000]
        table.update([(some, np.ones((some.size, 16), np.float32))], scalars_of(spec), 1)
        found = table.stats()
        assert found.rows == begin + some.size
        if found.rows > 10_000:
            assert found.memory_bytes / found.rows - spec.row_bytes <= 24
    assert table.lookup(ids[:1000]).tobytes() == kept.tobytes()
    # Initial accumulator 0.1, learning rate 0.5.
    initial = spec.initial.values(spec.seed, ids, 16)
    wanted = initial - np.float32(0.5) / np.sqrt(np.float32(0.1) + np.float32(1) + np.float32(1e-7))
    np.testing.assert_allclose(table.lookup(ids), wanted, rtol=1e-5, atol=1e-6)


def test_a_table_of_which_rows_come_and_go_does_not_grow() -> None:
    spec = spec_of("sgd", 2, expire_after=2)
    table = Table(spec)
    sizes = []
    for step in range(200):
        ids = np.arange(step * 1000, step * 1000 + 1000)
        table.update([(ids, np.ones((1000, 2), np.float32))], scalars_of(spec), step)
        sizes.append(table.stats().memory_bytes)
    assert table.stats().rows <= 3000
    # What goes is remembered for incremental saves, at most 64 Ki ids.
    assert max(sizes) <= 8 * 2**16 + 4 * sizes[5]


def resident_bytes() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_rows_of_a_fixed_table_that_nothing_was_written_to_take_no_memory() -> None:
    spec = spec_of("adagrad", 128, rows=2**27)  # 128 GiB with slots
    before = resident_bytes()
    table = Table(spec)
    empty = table.stats().memory_bytes
    ids = np.arange(0, 2**27, 2**17)
    table.update([(ids, np.ones((ids.size, 128), np.float32))], scalars_of(spec), 0)
    table.lookup(np.arange(2**26, 2**26 + 2**14))
    assert resident_bytes() - before < 2**26
    assert ids.size * spec.row_bytes <= table.stats().memory_bytes - empty < 2**26
    assert list(dump([table])) == ids.tolist()


# What is refused, and that nothing has changed then

ONE = np.ones((1, 3), np.float32)


@pytest.mark.parametrize(
    ("rows", "parts", "values", "step", "message"),
    [
        (10, [(int64([3, 10]), np.ones((2, 3), np.float32))], None, 0, "from 0 to 9, the table has 10 rows, got 10"),
        (10, [(int64([-1]), ONE)], None, 0, "got -1"),
        (10, [(int64([1]), ONE)], None, 0, "owned by place 0 of 2, got 1 of place 1"),
        (None, [(int64([4, 4]), np.ones((2, 3), np.float32))], None, 0, "unique, got 4 more than once"),
        (
            None,
            [(int64([4]), np.ones((1, 2), np.float32))],
            None,
            0,
            r"float32 \[1, 3\] for 1 ids, got float32 \[1, 2\]",
        ),
        (None, [(int64([4]), np.ones((1, 3)))], None, 0, "got float64"),
        (None, [(np.array([4], np.int32), ONE)], None, 0, r"ids of user must be int64 \[n\], got int32 \[1\]"),
        (None, [(int64([4]), ONE)], (1.0,), 0, "scalars of user must be iteration, learning_rate, got 1 of them"),
        (None, [(int64([4]), ONE)], None, -1, "step of user must be from 0 to 2147483646, got -1"),
    ],
)
def test_bad_updates_are_refused_whole(
    rows: int | None, parts: list, values: tuple[float, ...] | None, step: int, message: str
) -> None:
    spec = spec_of(rows=rows)
    table = Table(spec, 0, 2, "user")
    good = next(id_ for id_ in range(100) if spec.owners(int64([id_]), 2)[0] == 0 and id_ not in (3, 10))
    if rows is None:
        table = Table(spec, 0, 1, "user")
    before = table.stats()
    scalars = scalars_of(spec) if values is None else type(scalars_of(spec))(0, values)
    with pytest.raises(ProtocolError, match=message):
        table.update([(int64([good]), ONE), *parts], scalars, step)
    assert table.stats() == before
    assert table.step == -1


def test_bad_pulls_places_and_chunks_are_refused() -> None:
    spec = spec_of(rows=10)
    table = Table(spec, 0, 2, "user")
    with pytest.raises(ProtocolError, match="got 11"):
        table.lookup(int64([2, 11]))
    with pytest.raises(ProtocolError, match="got 3 of place 1"):
        table.lookup(int64([2, 3]))
    for place, count in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match=f"place of table must be .* got {place} and {count}"):
            Table(spec, place, count)
    with pytest.raises(ConfigError, match="rows of table must be at most 2147483646 for each pserver"):
        Table(spec_of(rows=2**33), 0, 2)
    good = Chunk(int64([2]), np.zeros(1, np.int32), [ONE, ONE])
    for bad, message in (
        (good._replace(arrays=[ONE]), r"2 arrays float32 \[n, 3\], got int64 \[1\], int32 \[1\], float32 \[1, 3\]"),
        (good._replace(steps=np.full(1, -1, np.int32)), "steps of a chunk of user must be from 0"),
        (good._replace(ids=int64([12])), "got 12"),
        (
            Chunk(int64([2, 2]), np.zeros(2, np.int32), [np.ones((2, 3), np.float32)] * 2),
            "unique, got 2 more than once",
        ),
    ):
        with pytest.raises(ProtocolError, match=message):
            table.restore(bad)
    assert table.stats().rows == 0


def test_rows_that_are_put_keep_their_slots_unless_past_their_time() -> None:
    spec = spec_of("adagrad", 3, expire_after=30)
    table = Table(spec)
    table.update([(int64([1, 2]), np.ones((2, 3), np.float32))], scalars_of(spec), 0)
    table.update([(int64([2]), np.ones((1, 3), np.float32))], scalars_of(spec), 29)
    table.update([], scalars_of(spec), 30)  # the first row is past its time, and not yet swept
    slots = [dump([table])[2][1][1], np.full(3, 0.1, np.float32).tobytes()]
    table.assign(int64([2, 1, 3]), np.arange(9, dtype=np.float32).reshape(3, 3))
    assert table.lookup(int64([1, 2, 3])).tolist() == [[3, 4, 5], [0, 1, 2], [6, 7, 8]]
    found = dump([table])
    assert [found[id_][1][1] for id_ in (2, 1, 3)] == [slots[0], slots[1], slots[1]]
    assert {step for step, _ in found.values()} == {30}
    with pytest.raises(ProtocolError, match="unique, got 4 more than once"):
        table.assign(int64([4, 4]), np.ones((2, 3), np.float32))


def test_updates_between_chunks_lose_no_row_that_stays() -> None:
    spec = spec_of("sgd", 1, max_rows=4000)
    table = Table(spec)
    table.update([(np.arange(4000), np.ones((4000, 1), np.float32))], scalars_of(spec), 0)
    found, stay, other = list[int](), set(range(4000)), 10_000
    for step, chunk in enumerate(table.chunks(most_rows=500), 1):
        found += chunk.ids.tolist()
        table.update([(np.arange(other, other + 300), np.ones((300, 1), np.float32))], scalars_of(spec), step)
        stay &= set(dump([table]))
        other += 300
    assert len(found) > 4000 - 500  # also rows that have taken the place of others
    assert table.stats().evicted_rows > 1000
    assert len(set(found)) == len(found)
    assert len(stay) > 1000
    assert stay <= set(found)


def test_time_goes_on_from_the_latest_row_in_a_job_that_counts_from_a_lower_step() -> None:
    spec = spec_of("adagrad", 3, expire_after=5)
    table, ids = Table(spec), int64([1])
    initial = table.lookup(ids)
    table.update([(ids, np.ones((1, 3), np.float32))], scalars_of(spec), 20)
    table.follow(1)
    table.update([], scalars_of(spec), 4)
    assert (table.step, (table.lookup(ids) != initial).all()) == (24, True)
    table.update([], scalars_of(spec), 5)
    np.testing.assert_array_equal(table.lookup(ids), initial)
