"""What is wrong with a save is said before anything changes, or leaves an empty table; nothing wrong is read."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from tests.tables.table_model import dump, int64, scalars_of, spec_of
from tfps.errors import ConfigError
from tfps.tables import files, tombstones
from tfps.tables.spec import TableSpec
from tfps.tables.table import Table


def updated(
    spec: TableSpec, some: Sequence[int], step: int = 0, place: int = 0, count: int = 1, table: Table | None = None
) -> Table:
    table = table or Table(spec, place, count)
    ids = int64(some)
    ids = ids[spec.owners(ids, count) == place]
    table.update([(ids, np.full((ids.size, spec.dim), step + 1, np.float32))], scalars_of(spec), step)
    return table


def saved(folder: Path, spec: TableSpec, count: int = 2) -> list[Table]:
    tables = [updated(spec, range(40), place=place, count=count) for place in range(count)]
    for table in tables:
        files.write_shard(table, folder, "user", since=None)
    return tables


def refused(folders: Path | list[Path], message: str, spec: TableSpec, *, left: bool = True) -> None:
    """Reading says so, and the table is as before, or empty."""
    table = updated(spec, [777] if spec.rows is None else [1])
    before = dump([table])
    with pytest.raises(ConfigError, match=message):
        files.read_table(table, folders, "user")
    assert dump([table]) == (before if left else {})


SPEC = spec_of("adagrad", 3)


@pytest.mark.parametrize("most", [2**16, 7])
def test_all_files_are_there_and_numpy_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(files, "_MOST_ROWS", most)
    tables = saved(tmp_path, SPEC)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"user-0-of-2.json", "user-1-of-2.json", "user-0-of-2.0.npz"} <= names
    assert all(name.endswith((".json", ".npz")) for name in names)
    manifest = json.loads((tmp_path / "user-0-of-2.json").read_bytes())
    assert TableSpec.parse(json.dumps(manifest["spec"])) == SPEC
    assert manifest["rows"] == tables[0].stats().rows == sum(rows for rows, _ in manifest["parts"])
    assert manifest["nbytes"] == sum(path.stat().st_size for path in tmp_path.glob("user-0-of-2.*.npz"))
    with np.load(tmp_path / "user-0-of-2.0.npz") as part:
        assert sorted(part) == ["ids", "rows", "slot.accumulator", "steps"]
        assert part["rows"].shape == (min(manifest["rows"], most), 3)
    whole = Table(SPEC)
    found = files.read_table(whole, tmp_path, "user")
    assert dump([whole]) == dump(tables)
    assert (found["step"], found["rows"]) == (0, 40)
    assert found["nbytes"] == sum(path.stat().st_size for path in tmp_path.glob("*.npz"))


def test_a_save_replaces_one_of_the_same_name_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_ROWS", 7)
    saved(tmp_path, SPEC, 1)
    other = updated(SPEC, [1])
    for name in ("user-0-of-1.x", "use", "user.0"):
        files.write_shard(other, tmp_path, name, since=None)
    few = updated(SPEC, [1, 2])
    files.write_shard(few, tmp_path, "user", since=None)
    assert [path.name for path in tmp_path.glob("user-0-of-1.?.npz")] == ["user-0-of-1.0.npz"]
    for name, table in (("user", few), ("user-0-of-1.x", other), ("use", other), ("user.0", other)):
        read = Table(SPEC)
        files.read_table(read, tmp_path, name)
        assert dump([read]) == dump([table])


def test_pservers_read_only_shards_that_have_some_of_their_rows(tmp_path: Path) -> None:
    saved(tmp_path, SPEC, 3)
    sizes = [sum(path.stat().st_size for path in tmp_path.glob(f"user-{place}-*.npz")) for place in range(3)]
    for place in range(3):
        assert files.read_table(Table(SPEC, place, 3), tmp_path, "user")["nbytes"] == sizes[place]


def test_an_incremental_save_has_what_has_changed_and_what_has_gone(tmp_path: Path) -> None:
    spec = spec_of("adagrad", 3, expire_after=4)
    table = updated(spec, range(1000))
    first = files.write_shard(table, tmp_path / "1", "user", since=None)
    for step in (2, 4):
        updated(spec, range(step, 500), step, table=table)
    second = files.write_shard(table, tmp_path / "2", "user", since=first["step"])
    assert (second["since"], second["rows"], second["gone_rows"]) == (0, 498, 502)
    updated(spec, [3, 998], 5, table=table)
    third = files.write_shard(table, tmp_path / "3", "user", since=second["step"])
    assert (third["since"], third["rows"], third["gone_rows"]) == (4, 498, 502)  # those of step 4 once more
    read = Table(spec)
    files.read_table(read, [tmp_path / name for name in "123"], "user")
    assert dump([read]) == dump([table])
    assert read.step == 5
    # What has been restored goes on where it was.
    updated(spec, [5], 8, table=read)
    fourth = files.write_shard(read, tmp_path / "4", "user", since=third["step"])
    files.read_table(table, [tmp_path / name for name in "1234"], "user")
    assert dump([read]) == dump([table])
    assert fourth["gone_rows"] > 0
    # The first is not needed where a later one is full.
    files.write_shard(read, tmp_path / "4", "user", since=None)
    files.read_table(table, [tmp_path / name for name in "234"], "user")
    assert dump([read]) == dump([table])


def test_a_shard_is_full_where_too_many_rows_have_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others of that save are not, and on another number of pservers all is right too."""
    spec = spec_of("adagrad", 3, max_rows=40)
    tables = [updated(spec, range(100), place=place, count=2) for place in range(2)]
    for table in tables:
        files.write_shard(table, tmp_path / "1", "user", since=None)
    for table, most in zip(tables, (1000, 3), strict=True):
        monkeypatch.setattr(tombstones, "LEAST_KEPT", most)
        updated(spec, range(90, 120), 2, table.place, 2, table)
    written = [files.write_shard(table, tmp_path / "2", "user", since=0) for table in tables]
    assert [found["since"] for found in written] == [0, None]
    assert "since step 0 is no more known: too many rows" in written[1]["full_because"]
    for count in (1, 3):
        read = [Table(spec, place, count) for place in range(count)]
        for table in read:
            files.read_table(table, [tmp_path / "1", tmp_path / "2"], "user")
        assert dump(read) == dump(tables)


def test_rows_of_others_make_the_next_save_full(tmp_path: Path) -> None:
    one, two = updated(SPEC, [1]), updated(SPEC, [2])
    for chunk in two.chunks():
        one.restore(chunk)
    assert files.write_shard(one, tmp_path, "user", since=0)["since"] is None


def test_pulls_come_while_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_ROWS", 7)
    lock, table = threading.Lock(), updated(SPEC, range(40))
    replaced, free = files.new_file, list[bool]()

    def noted(path: Path) -> AbstractContextManager:
        free.append(not lock.locked())
        return replaced(path)

    monkeypatch.setattr(files, "new_file", noted)
    files.write_shard(table, tmp_path, "user", since=None, lock=lock)
    assert free == [True] * 7
    assert not lock.locked()


# What is wrong is named


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (spec_of("adagrad", 4), "dim of table must be that of .*user-0-of-2.json, 3, got 4"),
        (spec_of("adagrad", 3, rows=50), "rows of table must be that of .*user-0-of-2.json, None, got 50"),
    ],
)
def test_another_table_is_refused(tmp_path: Path, spec: TableSpec, message: str) -> None:
    saved(tmp_path, SPEC)
    refused(tmp_path, message, spec)


def test_rows_of_another_rule_are_read_and_their_slots_begin_anew(tmp_path: Path) -> None:
    rows = saved(tmp_path, SPEC, 1)[0].lookup(np.arange(40))
    table = Table(spec_of("adam", 3))
    assert files.read_table(table, tmp_path, "user")["slots"] == 0
    assert table.lookup(np.arange(40)).tobytes() == rows.tobytes()
    for chunk in table.chunks():
        assert not np.any(chunk.arrays[1:])


def test_ids_without_a_row_go_on_reading_as_they_did(tmp_path: Path) -> None:
    (table,) = saved(tmp_path, SPEC, 1)
    other = Table(spec_of("adagrad", 3, seed=8))
    assert other.lookup(int64([-5])).tobytes() != table.lookup(int64([-5])).tobytes()
    files.read_table(other, tmp_path, "user")
    assert other.lookup(int64([-5])).tobytes() == table.lookup(int64([-5])).tobytes()
    assert other.spec == SPEC


def test_a_table_whose_rule_changes_is_saved_in_full(tmp_path: Path) -> None:
    (table,) = saved(tmp_path / "1", SPEC, 1)
    rows, spec = table.lookup(np.arange(40)), spec_of("adam", 3)
    table.change(spec)
    assert table.lookup(np.arange(40)).tobytes() == rows.tobytes()
    table.update([(int64([1]), np.ones((1, 3), np.float32))], scalars_of(spec), 1)
    assert files.write_shard(table, tmp_path / "2", "user", since=0)["since"] is None
    read = Table(spec)
    assert files.read_table(read, [tmp_path / "1", tmp_path / "2"], "user")["slots"] == 1
    assert dump([read]) == dump([table])
    assert files.saved_update(tmp_path / "2", "user") == spec.update
    with pytest.raises(ConfigError, match="table can only change its update"):
        table.change(spec_of("adam", 3, admit_after=2))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    refused(tmp_path, "must have shards of the table user .* has none", SPEC)
    refused(tmp_path / "none", "must have shards of the table user .* has none", SPEC)
    refused([], "at least one folder of a save of user must be given, got none", SPEC)
    saved(tmp_path, SPEC)
    (tmp_path / "user-1-of-2.0.npz").rename(tmp_path / "kept")
    refused(tmp_path, "user-1-of-2.0.npz, which user-1-of-2.json names, is missing", SPEC)
    (tmp_path / "kept").rename(tmp_path / "user-1-of-2.0.npz")
    (tmp_path / "user-1-of-2.json").unlink()
    refused(tmp_path, "user-1-of-2.json is missing: 1 of 2 shards of this save were not finished", SPEC)
    manifest = (tmp_path / "user-0-of-2.json").read_bytes()
    saved(tmp_path, SPEC, 3)
    assert not list(tmp_path.glob("*-of-2.*"))  # what was written there before goes
    (tmp_path / "user-0-of-2.json").write_bytes(manifest)
    refused(tmp_path, r"of one number of pservers, has those of \[2, 3\]", SPEC)
    with pytest.raises(ConfigError, match=r"name of a table that is saved must be .* got '\.\./user'"):
        files.write_shard(Table(SPEC), tmp_path, "../user", since=None)


def test_a_save_that_was_broken_off_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = saved(tmp_path, SPEC)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        files.write_shard(tables[1], tmp_path, "user", since=None)
    assert not list(tmp_path.glob("*.partial"))
    refused(tmp_path, "user-1-of-2.json is missing", SPEC)


def test_a_table_is_empty_if_a_file_turns_out_to_be_damaged(tmp_path: Path) -> None:
    saved(tmp_path, SPEC, 2)
    part = tmp_path / "user-1-of-2.0.npz"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    refused(tmp_path, "user-1-of-2.0.npz is damaged", SPEC, left=False)


def test_a_save_finds_those_before_it(tmp_path: Path) -> None:
    table = updated(SPEC, range(9))
    files.write_shard(table, tmp_path / "1", "user", since=None)
    before = {2: "../1", 3: str(tmp_path / "2")}
    for number, folder in before.items():
        since = table.step
        updated(SPEC, range(3 * number), number, table=table)
        files.write_shard(table, tmp_path / str(number), "user", since=since, before=folder)
    again = Table(SPEC)
    files.read_table(again, tmp_path / "3", "user")
    assert dump([again]) == dump([table])
    (tmp_path / "1" / "user-0-of-1.1.npz.partial").touch()  # of a pserver that was killed
    files.remove_saves(tmp_path / "3", ["1"])
    assert not (tmp_path / "1").exists()
    refused(tmp_path / "3", "1 must have shards of the table user .* has none", SPEC)
    with pytest.raises(ConfigError, match=r"a folder beside .*3, got '\.\./1'"):
        files.remove_saves(tmp_path / "3", ["../1"])
    files.write_shard(table, tmp_path / "2", "user", since=0, before="../3")
    refused(tmp_path / "3", "names more than 10000 saves before it: they must not be a circle", SPEC)


def test_saves_that_do_not_follow_each_other_are_refused(tmp_path: Path) -> None:
    table = updated(SPEC, range(9))
    files.write_shard(table, tmp_path / "1", "user", since=None)
    for step in (1, 2):
        updated(SPEC, [step], step, table=table)
        files.write_shard(table, tmp_path / str(step + 1), "user", since=step - 1)
    refused(tmp_path / "2", r"user-0-of-1.json has what has changed since step 0 only", SPEC)
    refused(
        [tmp_path / "1", tmp_path / "3"],
        "3/user-0-of-1.json has what has changed since step 1, but the save before it, .*1, ends at step 0",
        SPEC,
    )


def test_whatever_byte_of_a_save_changes_is_found_or_means_nothing(tmp_path: Path) -> None:
    spec = spec_of("sgd", 2)
    table = updated(spec, [5])
    files.write_shard(table, tmp_path, "user", since=None)
    wanted, found = dump([table]), 0
    for path in sorted(tmp_path.iterdir()):
        data = path.read_bytes()
        for place in range(len(data)):
            path.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
            read = updated(spec, [6])
            try:
                files.read_table(read, tmp_path, "user")
            except ConfigError as error:
                assert path.name in str(error)
                assert set(dump([read])) <= {6}
                found += 1
            else:
                assert dump([read]) == wanted
        path.write_bytes(data[:-1])
        refused(tmp_path, f"{path.name} is damaged", spec)
        path.write_bytes(data)
    assert found > 400
