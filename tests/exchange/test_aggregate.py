"""Rounds: sums and gathers of all ranks, step after step."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfps.errors import ProtocolError
from tfps.exchange.aggregate import GatherRound, SliceFormat, SumRound, pack_sparse, split_gathered, unpack_sparse
from tfps.exchange.codecs import known
from tfps.membership.view import View
from tfps.types import Array

FLOAT = np.dtype("float32")
floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)


def total(round_: SumRound, order: Sequence[int], parts: Sequence[Array | None], step: int = 0) -> Array:
    for rank in order:
        assert round_.missing()
        round_.add(rank, step, parts[rank])
    assert not round_.missing()
    return np.frombuffer(round_.finish(), round_.format.dtype)


@given(rows=st.lists(st.lists(floats, min_size=3, max_size=3), min_size=1, max_size=4), data=st.data())
def test_deterministic_sums_do_not_depend_on_the_order_of_arrival(rows: list[list[float]], data: st.DataObject) -> None:
    parts = [np.array(row, FLOAT) for row in rows]
    expected = parts[0].copy()
    for part in parts[1:]:
        expected = expected + part
    order = data.draw(st.permutations(range(len(parts))))
    result = total(SumRound(SliceFormat("x", FLOAT, 12), View.first(len(parts)), deterministic=True), order, parts)
    assert result.tobytes() == expected.tobytes()


@given(
    rows=st.lists(st.lists(st.integers(-1000, 1000), min_size=2, max_size=2), min_size=1, max_size=5), data=st.data()
)
def test_sums_are_right_in_any_order_and_leave_the_parts_alone(rows: list[list[int]], data: st.DataObject) -> None:
    parts = [np.array(row, "int64") for row in rows]
    before = [part.copy() for part in parts]
    order = data.draw(st.permutations(range(len(parts))))
    result = total(
        SumRound(SliceFormat("x", np.dtype("int64"), 16), View.first(len(parts)), deterministic=False), order, parts
    )
    assert result.tolist() == np.sum(rows, axis=0).tolist()
    assert all((part == old).all() for part, old in zip(parts, before, strict=True))


@given(rows=st.lists(st.lists(floats, min_size=3, max_size=3), min_size=1, max_size=4), data=st.data())
def test_only_parts_that_may_be_written_to_are(rows: list[list[float]], data: st.DataObject) -> None:
    parts = [np.array(row, FLOAT) for row in rows]
    owned = [data.draw(st.booleans()) for _ in parts]
    before = [part.copy() for part in parts]
    expected = before[0]
    for part in before[1:]:
        expected = expected + part
    round_ = SumRound(SliceFormat("x", FLOAT, 12), View.first(len(parts)), data.draw(st.booleans()))
    for rank, part in enumerate(parts):
        round_.add(rank, 0, part, owned=owned[rank])
    assert bytes(round_.finish()) == expected.tobytes()
    for part, old, may in zip(parts, before, owned, strict=True):
        assert may or part.tobytes() == old.tobytes()


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_only_contribution_comes_back_bit_for_bit(deterministic: bool) -> None:
    bits = np.array([0x80000000, 0x7FA00001, 1], np.uint32)  # -0.0, a signalling NaN, a denormal
    for rank in range(3):
        parts = [bits.view(FLOAT) if r == rank else None for r in range(3)]
        result = total(SumRound(SliceFormat("x", FLOAT, 12), View.first(3), deterministic), range(3), parts)
        assert result.tobytes() == bits.tobytes()


def test_without_contributions_the_sum_is_zero() -> None:
    assert total(SumRound(SliceFormat("x", FLOAT, 8), View.first(2), False), [1, 0], [None, None]).tolist() == [0, 0]


def test_nan_and_infinity_pass_as_arithmetic_has_it() -> None:
    parts = [np.array([np.nan, np.inf, 1], FLOAT), np.array([1, -np.inf, 1], FLOAT)]
    with np.errstate(invalid="ignore"):
        result = total(SumRound(SliceFormat("x", FLOAT, 12), View.first(2), False), [0, 1], parts)
    assert np.isnan(result[:2]).all()
    assert result[2] == 2


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "uint8", "complex64", "bool"])
def test_every_numeric_dtype_is_summed(dtype: str) -> None:
    part = np.array([1, 0, 1], dtype)
    round_ = SumRound(SliceFormat("x", part.dtype, part.nbytes), View.first(2), False)
    assert total(round_, [0, 1], [part, part]).tolist() == (part + part).tolist()


def test_steps_follow_each_other() -> None:
    round_ = SumRound(SliceFormat("x", FLOAT, 4), View.first(2), False)
    for step in range(3):
        parts = [np.array([step], FLOAT), np.array([1], FLOAT)]
        assert total(round_, [0, 1], parts, step).tolist() == [step + 1]


def pieces(payload: bytes, size: int) -> list[bytes]:
    return [payload[start : start + size] for start in range(0, len(payload), size)] or [b""]


@given(payloads=st.lists(st.binary(max_size=50), min_size=1, max_size=4), size=st.integers(1, 20), data=st.data())
def test_gathered_payloads_come_back_in_rank_order(payloads: list[bytes], size: int, data: st.DataObject) -> None:
    round_ = GatherRound("g", View.first(len(payloads)), size)
    left = {rank: list(enumerate(pieces(payload, size))) for rank, payload in enumerate(payloads)}
    while left:
        rank = data.draw(st.sampled_from(sorted(left)))
        index, piece = left[rank].pop(0)
        last = not left[rank]
        round_.add(rank, 0, index, memoryview(piece), last)
        if last:
            del left[rank]
    assert not round_.missing()
    parts = split_gathered(round_.finish(), range(len(payloads)))
    assert {rank: bytes(part) for rank, part in parts.items()} == dict(enumerate(payloads))
    assert round_.step == 1


@pytest.mark.parametrize(
    ("index", "nbytes", "last", "rule"),
    [
        (1, 4, False, "index of g must be 0, got 1"),
        (0, 3, False, "must have 4 bytes, got 3"),
        (0, 5, True, "at most 4"),
    ],
)
def test_malformed_pieces_of_a_gather_are_refused(index: int, nbytes: int, last: bool, rule: str) -> None:
    with pytest.raises(ProtocolError, match=rule):
        GatherRound("g", View.first(2), 4).add(0, 0, index, memoryview(bytes(nbytes)), last)


def test_a_gather_ends_with_the_last_piece() -> None:
    round_ = GatherRound("g", View.first(2), 4)
    round_.add(0, 0, 0, memoryview(b"ab"), True)
    with pytest.raises(ProtocolError, match="twice"):
        round_.add(0, 0, 1, memoryview(b"ab"), True)


@given(result=st.binary(max_size=64), workers=st.integers(1, 4))
def test_a_malformed_gather_result_is_refused(result: bytes, workers: int) -> None:
    try:
        parts = split_gathered(memoryview(result), range(workers))
    except ProtocolError:
        return
    assert len(parts) == workers
    assert b"".join(parts.values()) == result[8 * workers :]


def test_orders_of_arrival_matter_without_deterministic() -> None:
    parts = [np.array([value], FLOAT) for value in (1e8, -1e8, 1.0)]
    results = {
        total(SumRound(SliceFormat("x", FLOAT, 4), View.first(3), False), order, parts).tobytes()
        for order in itertools.permutations(range(3))
    }
    assert len(results) > 1  # else the test of deterministic sums shows nothing


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_sum_of_one_part_is_not_in_memory_that_its_rank_may_write_to(deterministic: bool) -> None:
    part = np.array([1, 2, 3], FLOAT)
    result = total(SumRound(SliceFormat("x", FLOAT, 12), View.first(2), deterministic), [1, 0], [part, None])
    part[:] = 0  # its rank has its reply, and pushes the next step, while the other one's is still being sent
    assert result.tolist() == [1, 2, 3]


def test_sparse_parts_come_back_joined_in_rank_order() -> None:
    parts = []
    for rank in range(3):
        indices, data = np.full(rank, rank, np.int64), np.full(2 * rank, rank, np.float32)
        parts.append(pack_sparse(indices.tobytes(), data.tobytes()))
    indices, data = unpack_sparse(parts)
    assert indices.view(np.int64).tolist() == [1, 2, 2]
    assert data.view(np.float32).tolist() == [1, 1, 2, 2, 2, 2]


def test_a_rank_without_a_part_contributes_no_rows() -> None:
    one = pack_sparse(np.array([5], np.int64).tobytes(), b"\x01\x02\x03\x04")
    indices, data = unpack_sparse([b"", one])
    assert indices.view(np.int64).tolist() == [5]
    assert data.tolist() == [1, 2, 3, 4]
    assert [array.size for array in unpack_sparse([b"", b""])] == [0, 0]


# Encoded contributions

ITEMS = 700
INT8 = known("int8")
VALUES = [np.random.default_rng(seed).normal(size=ITEMS).astype(np.float32) for seed in range(3)]
PARTS = [INT8.encode(values) for values in VALUES]


def round_of(workers: int, deterministic: bool = False) -> SumRound:
    return SumRound(SliceFormat("slice 0 of bucket 'x'", FLOAT, 4 * ITEMS, INT8), View.first(workers), deterministic)


def encoded_total(order: tuple[int, ...], deterministic: bool) -> bytes:
    summing = round_of(len(order), deterministic)
    for rank in order:
        summing.add(rank, 0, PARTS[rank])
    assert summing.contributed
    return bytes(summing.finish())


@pytest.mark.parametrize("deterministic", [False, True])
def test_contributions_are_decoded_and_summed(deterministic: bool) -> None:
    found = np.frombuffer(encoded_total((1, 2, 0), deterministic), np.float32)
    np.testing.assert_allclose(found, sum(VALUES), atol=0.05)


def test_deterministic_sums_of_encoded_parts_do_not_depend_on_the_order_of_arrival() -> None:
    assert len({encoded_total(order, True) for order in itertools.permutations(range(3))}) == 1


def test_who_contributes_nothing_changes_nothing() -> None:
    summing = round_of(3)
    for rank, part in ((0, None), (1, PARTS[1]), (2, None)):
        summing.add(rank, 0, part)
    alone = round_of(1)
    alone.add(0, 0, PARTS[1])
    assert bytes(summing.finish()) == bytes(alone.finish())
    summing.add(0, 1, None)
    assert not summing.contributed


def test_the_first_contribution_waits_as_it_came_and_not_decoded() -> None:
    summing = SumRound(SliceFormat("x", FLOAT, 4 * 2**20, INT8), View.first(2), deterministic=False)
    part = INT8.encode(np.ones(2**20, np.float32))
    tracemalloc.start()
    try:
        summing.add(0, 0, part)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    summing.add(1, 0, part)
    assert np.frombuffer(summing.finish(), np.float32).tolist()[:: 2**18] == [2.0] * 4


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_cannot_be_decoded_is_refused_as_it_comes_and_not_when_another_rank_completes_the_sum(
    deterministic: bool,
) -> None:
    topk = known("topk:0.5")
    summing = SumRound(SliceFormat("x", FLOAT, 16, topk), View.first(2), deterministic)
    part = topk.encode(np.ones(4, np.float32))
    part[:8].view(np.uint32)[1] = 4
    with pytest.raises(ProtocolError, match="must be below 4, got 4"):
        summing.add(0, 0, part)


@pytest.mark.parametrize("deterministic", [False, True])
def test_uncoded_steps_are_exact_and_the_next_is_encoded_again(deterministic: bool) -> None:
    summing = round_of(2, deterministic)
    for rank in range(2):
        summing.add(rank, 0, VALUES[rank], uncoded=True)
    assert summing.uncoded
    assert bytes(summing.finish()) == (VALUES[0] + VALUES[1]).tobytes()
    summing.add(0, 1, PARTS[0])
    assert not summing.uncoded


def test_a_round_is_complete_when_all_ranks_of_its_view_have_come() -> None:
    view = View.first(3).next(left=[1])
    sum_, gather = SumRound(SliceFormat("x", FLOAT, 4), view, deterministic=True), GatherRound("g", view, 16)
    for rank in (2, 0):
        assert not sum_.complete and not gather.complete
        sum_.add(rank, 0, np.full(1, rank + 1, np.float32))
        gather.add(rank, 0, 0, memoryview(b"r%d" % rank), last=True)
    assert sum_.complete and gather.complete
    assert np.frombuffer(sum_.finish(), np.float32).tolist() == [4]
    assert split_gathered(gather.finish(), view.ranks) == {0: b"r0", 2: b"r2"}
    assert sum_.missing() == gather.missing() == [0, 2]
