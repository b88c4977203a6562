"""Slices on a pserver: whom a round answers, and step scalars: once per rank and step, alike on all ranks."""

from __future__ import annotations

import jobs
import numpy as np
import pytest
from jobs import Cluster

from tfps.errors import MismatchError, ProtocolError
from tfps.exchange.aggregate import GatherRound, SliceFormat, SumRound
from tfps.exchange.codecs import codec_of, known
from tfps.exchange.interface import BucketSpec, kept_arrays
from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.membership.view import RankSets, View
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.slices import Answer, GatherSlice, Late, OwnedSlice, Push, RoundScalars, SumSlice
from tfps.trace.recorder import Recorder
from tfps.wire import frames
from tfps.wire.control import STATE_PIECE_BYTES
from tfps.wire.frames import LAST, SHARED, UNCODED, Header, Kind
from tfps.wire.send_queue import Encoding
from tfps.wire.shared_memory import Place, Target

SGD = UpdateSpec("sgd", (("momentum", 0.0), ("nesterov", 0.0)), (), (4,), (False,))
SPEC = BucketSpec(("w",), "sum", 16, "float32", 0, update=SGD)


def packed(iteration: float = 0.0, rate: float = 0.1) -> memoryview:
    return memoryview(StepScalars(0, (iteration, rate)).pack())


def floats(value: float) -> bytes:
    return np.full(4, value, np.float32).tobytes()


def sum_of(workers: int, codec: str = "none") -> OwnedSlice:
    format_ = SliceFormat("slice 0 of bucket 'w'", np.dtype(np.float32), 16, codec_of(codec))
    round_ = SumRound(format_, View.first(workers), deterministic=False)
    return SumSlice(Recorder(), round_, RankSets(range(workers), print))


def pushed(item: OwnedSlice, rank: int, payload: bytes, step: int = 0, flags: int = 0) -> list[Answer]:
    header = Header(Kind.PUSH, flags, 0, 0, 3, step)
    return item.take(Push(rank, header, memoryview(payload)))[0]


def test_the_last_push_of_a_sum_answers_all_ranks_at_once_and_those_that_share_memory_there() -> None:
    item, target = sum_of(3), Target(Place(0, 16), np.frombuffer(bytearray(floats(2.0)), np.uint8))
    assert pushed(item, 0, floats(1.0)) == []
    assert item.take(Push(1, Header(Kind.PUSH, SHARED), target.memory.data, target))[0] == []
    assert item.late([1, 2]) == Late(2, 0)
    shared, others = pushed(item, 2, floats(4.0))
    assert (shared.ranks, shared.target, list(others.ranks), others.target) == ((1,), target, [0, 2], None)
    for answer in (shared, others):
        assert answer.header == Header(Kind.REPLY, 0, 0, 0, 3, 0, generation=1)
        assert answer.payload == memoryview(floats(7.0))
    assert item.late([0, 1, 2]) is None


def test_an_encoded_sum_is_one_encoding_for_all_and_its_residual_comes_back_whole() -> None:
    item, codec = sum_of(2, "onebit"), known("onebit")
    for rank, values in enumerate(([3, 3, 3, 3], [1, -1, 1, -1])):
        answers = pushed(item, rank, codec.encode(np.array(values, np.float32)).tobytes())
    (answer,) = answers
    assert list(answer.ranks) == [0, 1]
    assert isinstance(answer.payload, Encoding)
    assert answer.payload.data() == codec.encode(np.array([3, 3, 3, 3], np.float32)).data  # of 4, 2, 4, 2
    for rank in (0, 1):
        answers = pushed(item, rank, floats(10.0), step=1, flags=UNCODED)
    (answer,) = answers
    assert answer.header.flags == UNCODED
    assert answer.payload == memoryview(np.array([21, 19, 21, 19], np.float32).tobytes())


def test_a_gather_answers_all_ranks_piece_by_piece() -> None:
    item = GatherSlice(Recorder(), GatherRound("bucket 'words'", View.first(2), 16), RankSets(range(2), print))
    assert pushed(item, 1, b"x" * 3, flags=LAST) == []
    first, last = pushed(item, 0, b"y" * 5, flags=LAST)
    assert (list(first.ranks), list(last.ranks)) == ([0, 1], [0, 1])
    assert [(each.header.index, each.header.flags) for each in (first, last)] == [(0, 0), (1, LAST)]
    assert last.payload == memoryview(b"yyyyyxxx")


def test_rank_0_counts_once_all_have_come() -> None:
    numbers = RoundScalars("w", SGD)
    assert numbers.take(1, 0, packed(rate=0.1 + 1e-9), (0, 1)) is None
    assert numbers.take(0, 0, packed(), (0, 1)) is None
    assert numbers.at(0).values == (0.0, 0.1)
    assert numbers.take(1, 1, packed(1.0), (0, 1)) is None  # it has the whole reply to step 0
    with pytest.raises(ProtocolError, match="must come before the slices of step 0"):
        numbers.at(0)


def test_numbers_that_come_twice_or_too_early_are_refused() -> None:
    numbers = RoundScalars("w", SGD)
    numbers.take(0, 0, packed(), (0, 1))
    for step in (0, 2):
        with pytest.raises(ProtocolError, match=f"must come once per step, .* got them for step {step}"):
            numbers.take(0, step, packed(), (0, 1))


def test_the_first_rank_that_differs_fails_the_job() -> None:
    numbers = RoundScalars("w", SGD)
    numbers.take(0, 0, packed(), (0, 1))
    error = numbers.take(1, 0, packed(rate=0.2), (0, 1))
    assert isinstance(error, MismatchError)
    assert "ranks 0 and 1 have different learning_rate 0.1 and 0.2" in str(error)


def test_the_numbers_of_a_lost_rank_that_differ_are_forgotten() -> None:
    numbers = RoundScalars("w", SGD)
    numbers.take(0, 0, packed(rate=0.2), (0, 1, 2))
    assert numbers.take(1, 0, packed(), (1, 2)) is None
    assert numbers.at(0).values == (0.0, 0.1)


def test_a_bucket_takes_memory_for_what_is_kept_of_it() -> None:
    momentum = UpdateSpec("sgd", (("momentum", 0.9), ("nesterov", 0.0)), (("momentum", 0.0),), (4,), (False,))
    assert kept_arrays(SPEC) == 1
    assert kept_arrays(BucketSpec(("w",), "sum", 16, "float32", 0, update=momentum)) == 2
    assert kept_arrays(jobs.bucket(16)) == 0


def test_a_push_that_is_sent_again_is_refused_and_not_applied_twice(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    raw = cluster.raw(server.address).open().declare()
    raw.declare(pb.Bucket(names=["w"], kind="sum", nbytes=16, dtype="float32", update=SGD.text()), number=1)
    incarnation = raw.incarnation
    raw.pserver.call("Put", pb.PutRequest(incarnation=incarnation, values=floats(1.0)), jobs.DEADLINE_S)
    pushed = frames.encode(Header(Kind.PUSH), floats(2.0))
    for message in (frames.encode(Header(Kind.SCALARS), bytes(packed(rate=0.25))), pushed):
        raw.send(message)
    assert raw.read()[1] == floats(0.5)
    raw.send(pushed)
    assert "step of slice 0 of bucket 'w' must be 1, got 0" in str(raw.read_error())


def test_numbers_for_a_bucket_without_an_update_and_too_large_gets_are_refused(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    raw = cluster.raw(server.address).open().declare()
    plain = pb.Bucket(names=["b"], kind="sum", nbytes=16, dtype="float32")
    served = pb.Bucket(names=["w"], kind="sum", nbytes=16, dtype="float32", update=SGD.text())
    raw.declare(plain, served, number=1)
    request = pb.GetRequest(incarnation=raw.incarnation, bucket=1, nbytes=STATE_PIECE_BYTES + 1)
    with pytest.raises(ProtocolError, match="a call of Get must ask for at most"):
        raw.pserver.call("Get", request, jobs.DEADLINE_S)
    with pytest.raises(ProtocolError, match="bucket 'b' has no slice 0 here that keeps anything"):
        raw.pserver.call("Put", pb.PutRequest(incarnation=raw.incarnation, bucket=0, values=bytes(4)), jobs.DEADLINE_S)
    for rank, begin, nbytes in ((1, 0, 4), (0, 2, 4), (0, 0, 3), (0, 0, STATE_PIECE_BYTES + 4)):
        put = pb.PutRequest(incarnation=raw.incarnation, rank=rank, bucket=1, begin=begin, values=bytes(nbytes))
        with pytest.raises(ProtocolError, match=r"a call of Put must be the first rank's, .* multiple of 4 on, got"):
            raw.pserver.call("Put", put, jobs.DEADLINE_S)
    raw.send(frames.encode(Header(Kind.SCALARS, bucket=0), bytes(packed())))
    assert "bucket 'b' has no update, got step scalars for one" in str(raw.read_error())
