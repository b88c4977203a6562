"""The parts of a table: the index finds what was added and not removed, the sketch counts, memory grows in place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables.table_model import EXTREMES, int64
from tfps.tables import index, sketch
from tfps.tables.index import Index
from tfps.tables.merging import Part, merged
from tfps.tables.region import Region
from tfps.tables.sketch import Sketch
from tfps.tables.tombstones import LEAST_KEPT, Tombstones

POOL = [*EXTREMES, *range(50)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.sampled_from(POOL), max_size=30)), max_size=40))
def test_an_index_is_a_dictionary(steps: list[tuple[bool, set[int]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_LEAST_SLOTS", 4)  # so that there are collisions, and ways around the end
        patch.setattr(index, "PIECE", 5)
        patch.setattr(index, "_FULL", 0.9)
        found, model = Index(), dict[int, int]()
        for add, ids in steps:
            if add:
                new = [id_ for id_ in ids if id_ not in model]
                model |= dict(zip(new, found.add(int64(new)).tolist(), strict=True))
            else:
                old = [id_ for id_ in ids if id_ in model]
                found.remove(int64([model.pop(id_) for id_ in old]))
            assert found.find(int64(POOL)).tolist() == [model.get(id_, -1) for id_ in POOL]
            assert len(set(model.values())) == len(model) == found.rows
            assert found.ids(int64([*model.values()])).tolist() == list(model)
            assert found.top <= len(POOL)  # free positions are taken again
            assert found._slots.items <= 3 * len(POOL)


def test_memory_grows_where_it_is_and_also_while_someone_looks_at_it() -> None:
    region = Region(np.float32, 3000, 4)
    region.array[:] = np.arange(12_000).reshape(3000, 4)
    memory = region._map
    region.grow(100_000)
    assert region._map is memory
    view = region.array[:10]
    region.grow(200_000)
    assert region._map is not memory
    assert (view == region.array[:10]).all()
    assert (region.array[:3000].ravel() == np.arange(12_000)).all()
    assert not region.array[3000:].any()
    region.grow(5)
    assert region.items == 200_000
    del view
    with pytest.raises(MemoryError, match="no memory for 1152921504606846976 items of 16 bytes"):
        region.grow(2**60)
    assert (region.array[2999] == [11_996, 11_997, 11_998, 11_999]).all()


def test_counts_are_never_too_low_and_hardly_ever_too_high() -> None:
    counts, random = Sketch(4), np.random.default_rng(0)
    often = random.integers(-(2**63), 2**63 - 1, 1000)
    for number in range(1, 7):
        assert (counts.add(often) == min(number, 4)).all()
    once = random.integers(-(2**63), 2**63 - 1, 200_000)
    assert np.mean(counts.add(once) > 1) < 0.001
    assert counts.nbytes == 4 * sketch.WIDTH


def test_a_sketch_that_has_counted_much_still_tells_rare_from_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch, "WIDTH", 2**12)
    counts, often = Sketch(5), np.arange(-50, 0)
    for step in range(100):
        rare = counts.add(np.arange(step * 1000, step * 1000 + 1000))
        assert np.mean(rare >= 5) < 0.05
        frequent = counts.add(often)
        assert step < 8 or (frequent >= 3).all()


def test_what_has_gone_is_known_since_a_step_or_it_is_said_that_it_is_not() -> None:
    tombstones = Tombstones()

    def since(step: int) -> list[int] | None:
        found = tombstones.since(step)
        return None if found is None else found.tolist()

    tombstones.add(3, int64([7, 5]), 0)
    tombstones.add(5, int64([5]), 0)
    assert [since(step) for step in (-1, 3, 4, 6)] == [[5, 7], [5, 7], [5], []]
    tombstones.add(6, np.arange(LEAST_KEPT - 1), 0)
    assert since(3) is None
    assert since(4) == list(range(LEAST_KEPT - 1))
    tombstones.add(7, np.arange(LEAST_KEPT), 4 * LEAST_KEPT * 2)  # many rows: more is kept
    assert since(6) == list(range(LEAST_KEPT))
    tombstones.add(8, np.arange(LEAST_KEPT + 1), 0)
    assert since(8) is None
    assert since(9) == []
    assert tombstones.nbytes == 0
    tombstones.begin(20)
    assert since(19) is None
    assert since(20) == []


def test_gradients_are_added_in_the_order_of_ranks() -> None:
    random = np.random.default_rng(0)
    parts = []
    for _ in range(4):
        ids = random.permutation(60)[:40]
        parts.append(
            Part(ids, (random.normal(size=(40, 2)) * 10.0 ** random.integers(-6, 6, 40)[:, None]).astype("f4"))
        )
    sums: dict[int, np.ndarray] = {}
    for part in parts:
        for id_, gradient in zip(part.ids.tolist(), part.gradients, strict=True):
            sums[id_] = sums[id_] + gradient if id_ in sums else gradient
    found = merged(parts)
    wanted = np.array([sums[id_] for id_ in found.ids.tolist()])
    assert sorted(sums) == found.ids.tolist()
    assert found.rows(slice(3, 20)).tobytes() == wanted[3:20].tobytes()
    assert found.rows(int64([9, 4, 30])).tobytes() == wanted[[9, 4, 30]].tobytes()
