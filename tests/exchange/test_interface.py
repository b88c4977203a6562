"""What every exchange must do, run by the embedded one and by workers over gRPC."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator

import jobs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jobs import push, summed, together

from tfps.errors import ClosedError, ConfigError, ProtocolError, TfpsError
from tfps.exchange.codecs import codec_of
from tfps.exchange.interface import BucketSpec, Exchange, Reply, as_bytes, parse_dtype
from tfps.types import Argument, Value
from tfps.worker.embedded import EmbeddedExchange

SIZES = (4, 1024, 1028, 10_000, 0)  # one item, one slice, a bit more, many slices, nothing


@pytest.fixture(
    params=[
        (0, 1, "embedded"),
        (1, 1, "grpc"),
        (1, 2, "shared memory"),
        (2, 3, "both"),
        (3, 2, "tcp"),
        (2, 3, "grpc"),
        (2, 2, "shared memory"),
    ],
    ids=lambda p: f"{p[1]} workers over {p[0]} pservers, {p[2]}" if p[0] else "embedded",
)
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Exchange]]:
    """All ranks of a job."""
    pservers, workers, transport = request.param
    jobs.use(transport, monkeypatch)
    with jobs.Cluster() as cluster:
        if pservers:
            yield list(cluster.workers(cluster.pservers(pservers, workers), workers))
        else:
            embedded = EmbeddedExchange(jobs.CONFIG)
            yield [embedded]
            embedded.close()


def declared(ranks: list[Exchange], *specs: BucketSpec) -> list[int]:
    ids: list[list[int]] = together(*(functools.partial(rank.declare, specs, ["detail"]) for rank in ranks))
    assert all(own == ids[0] for own in ids)
    return ids[0]


def sum_spec(nbytes: int, priority: int = 0, dtype: str = "float32") -> BucketSpec:
    return BucketSpec((f"b{nbytes}",), "sum", nbytes, dtype, priority)


GATHER = BucketSpec(("g",), "gather", 0, "uint8", 1)


def test_ranks_are_numbered(ranks: list[Exchange]) -> None:
    assert [rank.rank for rank in ranks] == list(range(len(ranks)))
    assert {(rank.view.generation, rank.view.ranks) for rank in ranks} == {(1, tuple(range(len(ranks))))}
    assert {rank.failure for rank in ranks} == {None}


def test_sums_reach_all_ranks_step_after_step(ranks: list[Exchange]) -> None:
    buckets = declared(ranks, *(sum_spec(size, priority) for priority, size in enumerate(SIZES)))
    for step in range(3):
        pushes = []
        for rank in ranks:
            for bucket, size in zip(buckets, SIZES, strict=True):
                items = np.arange(size // 4, dtype=np.float32) + rank.rank + step
                pushes.append((size, push(rank, bucket, items)))
        for size, pending in pushes:
            expected = np.arange(size // 4, dtype=np.float32) * len(ranks) + sum(range(len(ranks))) + step * len(ranks)
            np.testing.assert_array_equal(summed(pending.wait()), expected)


def test_a_single_contribution_is_broadcast_bit_for_bit(ranks: list[Exchange]) -> None:
    (bucket,) = declared(ranks, sum_spec(4096))
    payload = np.random.default_rng(0).integers(0, 2**32, 1024, np.uint32)  # any bits, also signalling NaNs
    pushes = [push(rank, bucket, payload if rank.rank == 0 else None) for rank in ranks]
    assert all(summed(pending.wait(), "uint32").tolist() == payload.tolist() for pending in pushes)


def test_no_contribution_at_all_gives_zeros(ranks: list[Exchange]) -> None:
    (bucket,) = declared(ranks, sum_spec(2000))
    for pending in [push(rank, bucket, None) for rank in ranks]:
        assert not summed(pending.wait()).any()


def test_nan_passes(ranks: list[Exchange]) -> None:
    (bucket,) = declared(ranks, sum_spec(8))
    pushes = [push(rank, bucket, np.array([np.nan, 1], np.float32)) for rank in ranks]
    for pending in pushes:
        result = summed(pending.wait())
        assert np.isnan(result[0])
        assert result[1] == len(ranks)


def test_dtypes_are_summed_as_themselves(ranks: list[Exchange]) -> None:
    dtypes = [parse_dtype(name) for name in ("float64", "int32", "int64", "float16", "uint8", "bfloat16")]
    given = [np.arange(700).astype(dtype) % 8 for dtype in dtypes]
    buckets = declared(ranks, *(sum_spec(items.nbytes, dtype=items.dtype.name) for items in given))
    for bucket, items in zip(buckets, given, strict=True):
        for pending in [push(rank, bucket, items) for rank in ranks]:
            result = np.asarray(pending.wait().sum).view(items.dtype)
            np.testing.assert_array_equal(result.astype(np.float64), items.astype(np.float64) * len(ranks))


def test_payloads_may_be_any_contiguous_buffer(ranks: list[Exchange]) -> None:
    (bucket,) = declared(ranks, sum_spec(8))
    items = np.array([1, 2], np.float32)
    raw = items.tobytes()
    for payload in (items, items.reshape(2, 1), raw, bytearray(raw), memoryview(raw)):
        for pending in [push(rank, bucket, payload) for rank in ranks]:
            assert summed(pending.wait()).tolist() == [len(ranks), 2 * len(ranks)]


def test_gathered_parts_come_in_rank_order_with_sizes_of_their_own(ranks: list[Exchange]) -> None:
    (bucket,) = declared(ranks, GATHER)
    for sizes in ((0, 1, 2), (1024, 0, 5000), (3000, 1023, 1025), (0, 0, 0)):
        parts = [bytes([65 + rank.rank]) * sizes[rank.rank] for rank in ranks]
        for pending in [push(rank, bucket, parts[rank.rank]) for rank in ranks]:
            assert list(map(bytes, (pending.wait().parts or {}).values())) == parts


def test_an_empty_part_of_a_gather_is_nothing(ranks: list[Exchange]) -> None:
    (bucket,) = declared(ranks, GATHER)
    for pending in [push(rank, bucket, None) for rank in ranks]:
        assert list(map(bytes, (pending.wait().parts or {}).values())) == [b""] * len(ranks)


def test_pushes_of_one_bucket_take_their_turns(ranks: list[Exchange]) -> None:
    buckets = declared(ranks, sum_spec(3000), GATHER)
    pushes = []
    for rank in ranks:
        for step in range(10):
            pushes.append((step, push(rank, buckets[0], np.full(750, step, np.float32))))
            pushes.append((step, push(rank, buckets[1], bytes([step]) * step)))
    for step, pending in pushes:
        reply = pending.wait()
        if reply.parts is None:
            assert set(summed(reply).tolist()) == {step * len(ranks)}
        else:
            assert list(map(bytes, reply.parts.values())) == [bytes([step]) * step] * len(ranks)


def test_on_reply_may_push(ranks: list[Exchange]) -> None:
    (bucket,) = declared(ranks, sum_spec(2000))
    done = [threading.Event() for _ in ranks]

    def pusher(rank: Exchange, steps: int) -> Callable[[Reply], None]:
        def take(reply: Reply) -> None:
            if steps and reply.error is None:
                rank.push(bucket, np.zeros(500, np.float32), pusher(rank, steps - 1))
            else:
                done[rank.rank].set()

        return take

    for rank in ranks:
        rank.push(bucket, np.zeros(500, np.float32), pusher(rank, 20))
    assert all(event.wait(jobs.DEADLINE_S) for event in done)


def test_several_declarations_add_up(ranks: list[Exchange]) -> None:
    assert declared(ranks, sum_spec(8), GATHER) == [0, 1]
    assert declared(ranks) == []
    assert declared(ranks, sum_spec(2048)) == [2]
    for pending in [push(rank, 2, np.ones(512, np.float32)) for rank in ranks]:
        assert set(summed(pending.wait()).tolist()) == {len(ranks)}


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mix_of_buckets_and_orders_is_right(ranks: list[Exchange], data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 1500).map(lambda items: items * 4), min_size=1, max_size=5))
    specs = [sum_spec(size, data.draw(st.integers(0, 3))) for size in sizes]
    buckets = declared(ranks, *specs)
    pushes = []
    for rank in ranks:
        for number in data.draw(st.permutations(range(len(sizes)))):
            items = np.arange(sizes[number] // 4, dtype=np.float32) * (rank.rank + 1)
            pushes.append((sizes[number], push(rank, buckets[number], items)))
    for size, pending in pushes:
        factor = sum(range(1, len(ranks) + 1))
        np.testing.assert_array_equal(summed(pending.wait()), np.arange(size // 4, dtype=np.float32) * factor)


def test_what_replies_lack_is_the_residual(ranks: list[Exchange]) -> None:
    (bucket,) = declared(ranks, BucketSpec(("coded",), "sum", 4 * 3000, "float32", 0, codec=codec_of("onebit")))
    payloads = np.random.default_rng(0).standard_normal([len(ranks), 3000]).astype(np.float32)
    (got, *_) = [summed(each.wait()).copy() for each in [push(rank, bucket, payloads[rank.rank]) for rank in ranks]]
    assert len({rank.state.steps(bucket) for rank in ranks}) == 1
    for _ in range(2):  # rank 0 has all of it after the first time
        pending = [jobs.Pending() for _ in ranks]
        for rank, each in zip(ranks, pending, strict=True):
            rank.state.collect_residual(bucket, each)
        for each in pending:
            np.testing.assert_allclose(got + summed(each.wait()), payloads.sum(axis=0), atol=1e-4)
    for rank in ranks:
        rank.state.set_residual(bucket, np.zeros(3000, np.float32))
    for each in [push(rank, bucket, None) for rank in ranks]:
        assert not summed(each.wait()).any()


def test_ranks_draw_different_numbers_and_nobody_is_awaited_where_all_have_come(ranks: list[Exchange]) -> None:
    (bucket,) = declared(ranks, sum_spec(8))
    for pending in [push(rank, bucket, bytes(8)) for rank in ranks]:
        pending.wait()
    assert [rank.peers.fetch_add("a") for rank in ranks] == list(range(len(ranks)))
    assert ranks[0].peers.fetch_add("a") == len(ranks)
    for rank in ranks:
        assert not rank.peers.is_awaited(bucket)
        rank.peers.extend_deadline(bucket)  # nothing is outstanding
        rank.peers.quiesce()
        assert rank.info.progress(bucket) == 1.0


def test_a_wrong_size_is_refused_and_changes_nothing(ranks: list[Exchange]) -> None:
    (bucket,) = declared(ranks, sum_spec(8))
    with pytest.raises(ProtocolError, match="payload of bucket 'b8' must have 8 bytes, got 4"):
        push(ranks[0], bucket, bytes(4))
    for pending in [push(rank, bucket, bytes(8)) for rank in ranks]:
        pending.wait()


@pytest.mark.parametrize("bucket", [-1, 1])
def test_an_undeclared_bucket_is_refused(ranks: list[Exchange], bucket: int) -> None:
    declared(ranks, sum_spec(8))
    with pytest.raises(ProtocolError, match=f"bucket must be one of the 1 declared ones, got {bucket}"):
        push(ranks[0], bucket, bytes(8))


def test_a_payload_with_gaps_is_refused(ranks: list[Exchange]) -> None:
    (bucket,) = declared(ranks, sum_spec(8))
    with pytest.raises(ProtocolError, match="must be C-contiguous"):
        push(ranks[0], bucket, np.zeros(4, np.float32)[::2])


def test_after_close_pushes_get_closed_error_and_listeners_nothing(ranks: list[Exchange]) -> None:
    (bucket,) = declared(ranks, sum_spec(8))
    heard: list[TfpsError] = []
    for rank in ranks:
        rank.add_failure_listener(heard.append)
    for rank in ranks:
        rank.close()
        rank.close()
    for rank in ranks:
        assert isinstance(push(rank, bucket, bytes(8)).error(), ClosedError)
        assert rank.failure is None
        with pytest.raises(ClosedError):
            rank.declare([])
    assert heard == []


def test_a_failure_from_outside_reaches_listeners_and_pushes_once(ranks: list[Exchange]) -> None:
    (bucket,) = declared(ranks, sum_spec(8))
    failed = [jobs.Failed(rank) for rank in ranks]
    error = TfpsError("the update broke")
    ranks[0].fail(error)
    ranks[0].fail(TfpsError("another"))
    assert failed[0].wait() is error
    assert ranks[0].failure is error
    assert push(ranks[0], bucket, bytes(8)).error() is error
    late = jobs.Failed(ranks[0])
    assert late.wait() is error
    for other in failed[1:]:
        assert "rank 0" in str(other.wait())
        assert "the update broke" in str(other.wait())
    assert all(len(listener.errors) == 1 for listener in failed)


def test_replies_over_the_wire_are_aligned_writable_and_ones_own(ranks: list[Exchange]) -> None:
    if ranks[0].info.embedded:
        pytest.skip("the embedded exchange hands back what was pushed")
    (bucket,) = declared(ranks, sum_spec(10_000))
    kept: list[Value] = []
    for _ in range(3):
        for pending in [push(rank, bucket, bytes(10_000)) for rank in ranks]:
            result = pending.wait().sum
            assert result.flags.writeable
            assert result.ctypes.data % 64 == 0
            assert not any(np.shares_memory(result, other) for other in kept)
            kept.append(result)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"names": "x"}, "names must be a tuple of at least one name, got 'x'"),
        ({"names": ()}, "names must be a tuple"),
        ({"kind": "mean"}, "kind must be one of sum, gather, table, got 'mean'"),
        ({"priority": -1}, "priority must be from 0"),
        ({"nbytes": 6}, r"nbytes must be a multiple of 4 \(float32\), got 6"),
        ({"nbytes": -4}, "got -4"),
        ({"dtype": "object"}, "numeric numpy dtype, got 'object'"),
        ({"dtype": "float33"}, "numeric numpy dtype, got 'float33'"),
        ({"dtype": "f4,("}, "numeric numpy dtype, got 'f4,"),
        ({"dtype": "(1000000000,1000000000)f4"}, "numeric numpy dtype, got"),
        ({"kind": "gather"}, "a gather must have nbytes 0 and dtype 'uint8'"),
    ],
)
def test_a_spec_out_of_range_is_refused(fields: dict[str, Argument], rule: str) -> None:
    good: dict[str, Argument] = {"names": ("x",), "kind": "sum", "nbytes": 8, "dtype": "float32", "priority": 0}
    with pytest.raises(ConfigError, match=rule):
        BucketSpec(**(good | fields))


def test_bytes_of_empty_and_exotic_arrays_are_found() -> None:
    payloads = (np.zeros((0, 3), np.float32), memoryview(b""), np.ones(2, parse_dtype("bfloat16")), None)
    views = [as_bytes(payload) for payload in payloads]
    assert [view if view is None else view.nbytes for view in views] == [0, 0, 4, None]
