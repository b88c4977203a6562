"""What a pserver owns: each slice has one owner, and a new cutting counts from its step on."""

from __future__ import annotations

import pytest

from tfps.config import Config
from tfps.errors import ConfigError, ProtocolError
from tfps.exchange.aggregate import SumRound
from tfps.exchange.interface import BucketSpec
from tfps.exchange.layout import Layout
from tfps.exchange.update_spec import UpdateSpec
from tfps.membership.view import View
from tfps.pserver.shard import Shard
from tfps.pserver.slices import OwnedSlice, Push, SumSlice
from tfps.trace.recorder import Recorder
from tfps.wire.frames import Header, Kind

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


def test_a_layout_whose_step_cannot_be_recorded_is_refused() -> None:
    (shard,) = shards(1)
    with pytest.raises(ProtocolError, match=r"a step of a layout must be below 2\*\*63, got 9223372036854775808"):
        shard.cut_anew(Layout(5000, 8192, {0: 2**63}))


def limited(max_memory: int) -> Shard:
    return Shard(CONFIG, View.first(2), 0, Recorder(), max_memory)


def test_what_is_cut_for_later_steps_counts_for_the_limit_of_memory() -> None:
    shard = limited(2**20)
    shard.add(SPECS)
    with pytest.raises(ConfigError, match=r"must fit into the 1048576 bytes .* slices of up to 100 bytes"):
        for step in range(1000):
            shard.cut_anew(Layout(100, 8192, {0: step}))
    assert len(shard.buckets[0].next) < 20


SLOTS = tuple((f"slot{number}", 0.0) for number in range(5000))
UPDATE = UpdateSpec("sgd", (("momentum", 0.0), ("nesterov", 0.0)), SLOTS, (0,), (False,))
LARGE = {
    "names": BucketSpec(("x" * 2**20,), "sum", 4, "float32", 0),
    "slots": BucketSpec(("b",), "sum", 0, "float32", 0, update=UPDATE),
}


@pytest.mark.parametrize("what", LARGE)
def test_what_a_bucket_takes_beside_its_values_counts_for_the_limit_of_memory(what: str) -> None:
    with pytest.raises(ConfigError, match="must fit into the 1048576 bytes"):
        limited(2**20).check([LARGE[what]])


def test_a_gather_without_an_end_is_refused_once_it_does_not_fit_into_memory() -> None:
    shard = limited(2**20)
    shard.add(SPECS)
    pieces = shard.buckets[1].slices[0]
    with pytest.raises(ProtocolError, match=r"pieces of bucket 'words' in step 0 must fit into the 1048576 bytes"):
        for index in range(2000):
            pieces.take(Push(0, Header(Kind.PUSH, bucket=1, index=index, generation=1), memoryview(bytes(1024))))
