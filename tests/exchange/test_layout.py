"""Layout: slices cover every byte once, in whole items; placement is even, and the same wherever it is computed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfps.config import Placement
from tfps.errors import ConfigError
from tfps.exchange.layout import Placer, Slice, cut

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


buckets = st.lists(st.lists(st.integers(0, 10_000), max_size=20), max_size=20)  # sizes of slices
pserver_counts = st.integers(1, 7)
placements = st.sampled_from(["balanced", "round_robin"])


@given(buckets=buckets, pservers=pserver_counts)
def test_balanced_bytes_differ_by_at_most_one_slice(buckets: list[list[int]], pservers: int) -> None:
    placer = Placer(range(pservers), "balanced")
    for sizes in buckets:
        placer.place(sizes)
        largest = max((size for all_sizes in buckets for size in all_sizes), default=0)
        assert max(placer.bytes_per_pserver) - min(placer.bytes_per_pserver) <= largest


@given(buckets=buckets, pservers=pserver_counts, placement=placements)
def test_equal_calls_give_equal_owners(buckets: list[list[int]], pservers: int, placement: Placement) -> None:
    first, second = Placer(range(pservers), placement), Placer(range(pservers), placement)
    for sizes in buckets:
        owners = first.place(sizes)
        assert owners == second.place(sizes)
        assert first.place_gather() == second.place_gather()
        assert len(owners) == len(sizes)
        assert all(0 <= owner < pservers for owner in owners)


def test_round_robin_goes_on_where_the_last_bucket_ended() -> None:
    placer = Placer(range(3), "round_robin")
    assert placer.place([1, 1]) == [0, 1]
    assert placer.place([1, 1]) == [2, 0]


def test_gathers_are_spread_by_number() -> None:
    placer = Placer(range(2), "balanced")
    placer.place([1000])
    assert [placer.place_gather() for _ in range(4)] == [0, 1, 0, 1]


def test_owners_are_the_pservers_of_the_view() -> None:
    assert Placer((1, 4), "balanced").place([1, 1, 1]) == [1, 4, 1]
    assert Placer((1, 4), "round_robin").place_gather() == 1


def test_occasional_buckets_do_not_disturb_the_balance_of_the_others() -> None:
    placer = Placer(range(2), "balanced")
    assert placer.place([1000, 10], occasional=True) == [0, 1]
    assert placer.place([4, 4]) == [0, 1]
    assert placer.bytes_per_pserver == [4, 4]
