"""What a pserver says of declarations that differ. Rounds and members are in test_server.py and test_worker.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tfps.job import first_difference

texts = st.lists(st.sampled_from("abc"), max_size=4)


@given(declared=st.dictionaries(st.integers(0, 5), texts, min_size=1))
def test_a_difference_is_found_if_and_only_if_there_is_one(declared: dict[int, list[str]]) -> None:
    found = first_difference(declared, lambda rank: f"rank {rank}")
    assert (found is None) == (len({tuple(lines) for lines in declared.values()}) == 1)


def test_the_first_difference_names_what_every_rank_has() -> None:
    declared = {1: ["a", "x", "p"], 0: ["a", "y"], 2: ["a", "y", "q"]}
    found = first_difference(declared, lambda rank: f"rank {rank}")
    assert found is not None
    assert found.endswith("line 2 of what they declare differs: rank 0 has y; rank 1 has x; rank 2 has y")
    del declared[1]
    found = first_difference(declared, lambda rank: f"rank {rank}")
    assert found is not None
    assert found.endswith("line 3 of what they declare differs: rank 0 has nothing; rank 2 has q")
