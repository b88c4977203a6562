"""A table's spec travels as text, says who owns an id, and refuses what is out of range."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from tests.tables.table_model import EXTREMES, int64, spec_of, update_of
from tfps.errors import ConfigError, ProtocolError
from tfps.exchange.update_spec import MEAN
from tfps.tables.initial import Initial
from tfps.tables.spec import TableSpec

ALL = [
    spec_of("adam", 5, admit_after=3, expire_after=100, max_rows=7, seed=2**64 - 1, decay=True),
    spec_of("sgd", 1, rows=2**40, seed=-(2**63), initial=Initial("normal", 0.1, 1 / 3)),
]


@pytest.mark.parametrize("spec", ALL)
def test_text_gives_the_same_spec_back(spec: TableSpec) -> None:
    text = spec.text()
    assert "\n" not in text
    assert TableSpec.parse(text) == spec
    assert spec.row_bytes == 4 * spec.dim * (1 + len(spec.update.slots))


def test_other_text_is_refused() -> None:
    good = json.loads(ALL[0].text())
    changed = [good | {"dim": 5.0}, good | {"seed": True}, good | {"initial": None}, {**good, "update": {}}, [], None]
    for text in ["", "{", *map(json.dumps, changed)]:
        with pytest.raises(ConfigError):
            TableSpec.parse(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 0}, "dim of a table must be a whole number from 1 to 1048576, got 0"),
        ({"dim": 2.0}, "dim of a table must be a whole number"),
        ({"rows": 0}, "rows of a table must be a whole number from 1 to"),
        ({"rows": True}, "rows of a table must be a whole number"),
        ({"seed": 2**64}, "seed of a table must be a whole number from -9223372036854775808 to"),
        ({"admit_after": 0}, "admit_after of a table must be a whole number from 1 to 65535, got 0"),
        ({"expire_after": 0}, "expire_after of a table must be a whole number from 1 to 2147483646, got 0"),
        ({"max_rows": 0}, "max_rows of a table must be a whole number from 1 to"),
        ({"rows": 9, "admit_after": 2}, r"admit_after must be 1 for a table with a fixed number of rows \(9\), got 2"),
        ({"rows": 9, "expire_after": 2}, "expire_after must be None for a table with a fixed number of rows"),
        ({"rows": 9, "max_rows": 2}, "max_rows must be None for a table with a fixed number of rows"),
        ({"update": update_of(dim=4)}, r"update of a table must have sizes \(3,\), its dim, got \(4,\)"),
        (
            {"update": dataclasses.replace(update_of(), constants=(("epsilon", 1e-7), (MEAN, 1.0)))},
            "must add gradients, not take their mean",
        ),
    ],
)
def test_what_is_out_of_range_is_named(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(spec_of(), **changes)


@pytest.mark.parametrize("rows", [None, 10_000])
def test_owners_are_balanced_and_only_overlapping_shards_share_ids(rows: int | None) -> None:
    spec, ids = spec_of(rows=rows), np.arange(10_000)
    for count in (1, 2, 3, 7):
        owners = spec.owners(ids, count)
        sizes = np.bincount(owners, minlength=count)
        assert sizes.size == count
        assert sizes.min() > 0.9 * sizes.max()
        for others in (1, 2, 3, 6):
            theirs = spec.owners(ids, others)
            for place in range(count):
                for other in range(others):
                    shared = bool(((owners == place) & (theirs == other)).any())
                    assert spec.overlap(place, count, other, others) == shared


def test_owners_of_extreme_ids_never_change() -> None:
    assert spec_of().owners(int64(EXTREMES), 1000).tolist() == [0, 338, 706, 353, 147, 844, 715]
    assert spec_of(rows=2**62).owners(int64([0, 1, 2**62 - 1]), 3).tolist() == [0, 1, 0]


def test_ids_of_fixed_tables_are_in_range() -> None:
    spec_of(rows=5).check(int64([0, 4, 4]))
    spec_of().check(int64(EXTREMES))
    with pytest.raises(ProtocolError, match="ids must be from 0 to 4, the table has 5 rows, got 5"):
        spec_of(rows=5).check(int64([1, 5, -1]))
