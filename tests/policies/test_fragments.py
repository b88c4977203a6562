"""Fragments have about equal bytes, whole layers, and are the same on all ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfps.errors import ConfigError
from tfps.policies.outer_optimizer import cut


def test_equal_layers_go_to_fragments_in_turn() -> None:
    names = [f"block_{n}/{part}" for n in range(6) for part in ("kernel", "bias")]
    assert cut(names, [400, 4] * 6, 3) == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def test_a_large_layer_is_balanced_by_small_ones() -> None:
    assert cut(["embedding/table", "a/kernel", "b/kernel", "c/kernel"], [300, 100, 100, 100], 2) == [[0], [1, 2, 3]]


def test_layers_are_parted_only_if_there_are_too_few() -> None:
    names = ["one/kernel", "one/bias", "two/kernel", "two/bias"]
    assert cut(names, [1, 1, 1, 1], 2) == [[0, 1], [2, 3]]
    assert cut(names, [1, 1, 1, 1], 3) == [[0, 3], [1], [2]]


def test_more_fragments_than_variables_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most the number of variables that an optimizer updates, 2, got 3"):
        cut(["a/kernel", "b/kernel"], [4, 4], 3)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1000)), min_size=1, max_size=30), st.integers(1, 30))
def test_every_variable_is_in_one_fragment_and_no_fragment_is_empty(drawn: list[tuple[int, int]], parts: int) -> None:
    parts = min(parts, len(drawn))
    found = cut([f"layer_{layer}/weight" for layer, _ in drawn], [nbytes for _, nbytes in drawn], parts)
    assert sorted(place for fragment in found for place in fragment) == list(range(len(drawn)))
    assert all(fragment == sorted(fragment) and fragment for fragment in found)
