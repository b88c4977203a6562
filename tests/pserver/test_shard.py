"""What a pserver owns: each slice has one owner, and a new cutting counts from its step on."""

from __future__ import annotations

import pytest

from tfps.config import Config
from tfps.errors import ProtocolError
from tfps.exchange.aggregate import SumRound
from tfps.exchange.interface import BucketSpec
from tfps.exchange.layout import Layout
from tfps.membership.view import View
from tfps.pserver.shard import Shard
from tfps.pserver.slices import OwnedSlice, SumSlice
from tfps.trace.recorder import Recorder

CONFIG = Config(slice_bytes=1024, window_bytes=4096)
SPECS = [
    BucketSpec(("kernel",), "sum", 10_000, "float32", 0),
    BucketSpec(("words",), "gather", 0, "uint8", 1),
    BucketSpec(("bias",), "sum", 400, "float32", 2),
]


def shards(pservers: int) -> list[Shard]:
    made = [Shard(CONFIG, View.first(2, pservers), index, Recorder()) for index in range(pservers)]
    for shard in made:
        shard.add(SPECS)
    return made


def round_of(item: OwnedSlice) -> SumRound:
    assert isinstance(item, SumSlice)
    return item.round


def test_every_slice_has_one_owner() -> None:
    made = shards(3)
    for number, count in enumerate((10, 1, 1)):
        owned = sorted(index for shard in made for index in shard.buckets[number].slices)
        assert owned == list(range(count))
    for shard in made:
        assert [bucket.spec for bucket in shard.buckets] == SPECS


def test_a_new_cutting_counts_from_its_step_on() -> None:
    made = shards(2)
    for shard in made:
        shard.cut_anew(Layout(5000, 8192, {0: 7}))
        bucket = shard.buckets[0]
        before = bucket.slices
        bucket.advance(6)
        assert bucket.slices is before
        bucket.advance(7)
        assert bucket.slices is not before
        assert not bucket.next
        assert {round_of(item).step for item in bucket.slices.values()} <= {7}
    rounds = {index: round_of(item) for shard in made for index, item in shard.buckets[0].slices.items()}
    assert {index: one.format.nbytes for index, one in rounds.items()} == {0: 5000, 1: 5000}


def test_a_layout_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    (shard,) = shards(1)
    with pytest.raises(ProtocolError, match="got bucket 1"):
        shard.cut_anew(Layout(5000, 8192, {0: 7, 1: 7}))
    assert not any(bucket.next for bucket in shard.buckets)
