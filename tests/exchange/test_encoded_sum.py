"""Sums of encoded contributions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tfps.errors import ProtocolError
from tfps.exchange.codecs import known
from tfps.exchange.encoded_sum import EncodedSumRound

ITEMS = 700
INT8 = known("int8")
VALUES = [np.random.default_rng(seed).normal(size=ITEMS).astype(np.float32) for seed in range(3)]
PARTS = [INT8.encode(values) for values in VALUES]


def round_of(workers: int, deterministic: bool = False) -> EncodedSumRound:
    return EncodedSumRound("slice 0 of bucket 'x'", workers, 4 * ITEMS, deterministic, INT8)


def total(order: tuple[int, ...], deterministic: bool) -> bytes:
    summing = round_of(len(order), deterministic)
    for rank in order:
        summing.expect(rank, whole=False)
        summing.add(rank, 0, PARTS[rank])
    assert summing.contributed
    return bytes(summing.finish())


@pytest.mark.parametrize("deterministic", [False, True])
def test_contributions_are_decoded_and_summed(deterministic: bool) -> None:
    found = np.frombuffer(total((1, 2, 0), deterministic), np.float32)
    np.testing.assert_allclose(found, sum(VALUES), atol=0.05)


def test_deterministic_sums_do_not_depend_on_the_order_of_arrival() -> None:
    assert len({total(order, True) for order in itertools.permutations(range(3))}) == 1


def test_who_contributes_nothing_changes_nothing() -> None:
    summing = round_of(3)
    for rank, part in ((0, None), (1, PARTS[1]), (2, None)):
        summing.expect(rank, whole=False)
        summing.add(rank, 0, part)
    alone = round_of(1)
    alone.expect(0, whole=False)
    alone.add(0, 0, PARTS[1])
    assert bytes(summing.finish()) == bytes(alone.finish())
    summing.add(0, 1, None)
    assert not summing.contributed


@pytest.mark.parametrize("deterministic", [False, True])
def test_whole_steps_are_exact_and_the_next_is_encoded_again(deterministic: bool) -> None:
    summing = round_of(2, deterministic)
    for rank in range(2):
        summing.expect(rank, whole=True)
        summing.add(rank, 0, VALUES[rank])
    assert summing.whole
    assert bytes(summing.finish()) == (VALUES[0] + VALUES[1]).tobytes()
    summing.expect(0, whole=False)
    assert not summing.whole


def test_a_rank_that_collects_while_another_trains_is_named() -> None:
    summing = round_of(2)
    summing.expect(1, whole=False)
    summing.add(1, 0, PARTS[1])
    with pytest.raises(ProtocolError, match=r"step 0: rank 0 collects while rank 1 trains: .*strategy.combine\(\)"):
        summing.expect(0, whole=True)
