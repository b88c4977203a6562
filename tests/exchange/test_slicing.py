"""Slicing: every byte once, whole items, nothing larger than asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfps.errors import ConfigError
from tfps.exchange.slicing import Slice, cut

item_sizes = st.sampled_from([1, 2, 4, 8, 16])


@given(items=st.integers(0, 5000), slice_bytes=st.integers(1, 3000), item_bytes=item_sizes)
def test_slices_cover_every_byte_once_and_in_order(items: int, slice_bytes: int, item_bytes: int) -> None:
    slices = cut(items * item_bytes, slice_bytes, item_bytes)
    end = 0
    for piece in slices:
        assert piece.offset == end
        end += piece.nbytes
    assert end == items * item_bytes


@given(items=st.integers(1, 5000), slice_bytes=st.integers(1, 3000), item_bytes=item_sizes)
def test_slices_hold_whole_items_and_are_equal_except_the_last(items: int, slice_bytes: int, item_bytes: int) -> None:
    slices = cut(items * item_bytes, slice_bytes, item_bytes)
    assert all(piece.nbytes % item_bytes == 0 for piece in slices)
    assert all(piece.nbytes == slices[0].nbytes for piece in slices[:-1])
    assert 0 < slices[-1].nbytes <= slices[0].nbytes <= max(slice_bytes, item_bytes)


def test_an_empty_bucket_has_one_empty_slice() -> None:
    assert cut(0, 100) == [Slice(0, 0)]


@pytest.mark.parametrize(("nbytes", "slice_bytes", "item_bytes"), [(-4, 8, 4), (6, 8, 4), (8, 0, 4), (8, 8, 0)])
def test_sizes_out_of_range_are_refused(nbytes: int, slice_bytes: int, item_bytes: int) -> None:
    with pytest.raises(ConfigError, match="must be"):
        cut(nbytes, slice_bytes, item_bytes)
