"""Compressed buckets between workers and pservers."""

from __future__ import annotations

from collections.abc import Sequence

import jobs
import numpy as np
import pytest
from jobs import Cluster, Pending, declare, job, push, summed, together

from tfps.config import Config
from tfps.errors import ProtocolError, TfpsError
from tfps.exchange import codecs
from tfps.exchange.interface import BucketSpec
from tfps.wire import connection
from tfps.wire.frames import Kind
from tfps.wire.send_queue import Next, Outgoing
from tfps.worker.worker import Worker

NAMES = ["bfloat16", "float16", "int8", "topk:0.05", "onebit"]
FEEDING_BACK = NAMES[2:]
ITEMS = 5003  # does not divide: slices of 1 KiB, blocks of 256 and of 1024


def compressed(codec: str, items: int = ITEMS, name: str = "b", priority: int = 0) -> BucketSpec:
    return BucketSpec((name,), "sum", 4 * items, "float32", priority, codec=codecs.codec_of(codec))


def gradient(rank: int, step: int, items: int = ITEMS) -> np.ndarray:
    return np.random.default_rng(100 * step + rank).normal(size=items).astype(np.float32)


def step(workers: Sequence[Worker], payloads: Sequence[np.ndarray | None], bucket: int = 0) -> np.ndarray:
    """One step of all workers; the sum, which is bitwise the same for all."""
    pending = [push(worker, bucket, payload) for worker, payload in zip(workers, payloads, strict=True)]
    first, *others = [summed(each.wait()) for each in pending]
    for other in others:
        assert other.tobytes() == first.tobytes()
    return first


def collected(workers: Sequence[Worker], bucket: int = 0) -> np.ndarray:
    """The residuals of all workers and pservers."""
    pending = []
    for worker in workers:
        pending.append(Pending())
        worker.state.collect_residual(bucket, pending[-1])
    first, *others = [summed(each.wait()).copy() for each in pending]
    for other in others:
        assert other.tobytes() == first.tobytes()
    return first


@jobs.OVER_ALL
@pytest.mark.parametrize("codec", NAMES)
def test_all_workers_get_the_same_bytes_and_nothing_is_lost(cluster: Cluster, codec: str) -> None:
    workers = job(cluster, 3, compressed(codec), pservers=2)
    given, got = np.zeros(ITEMS), np.zeros(ITEMS)
    for number in range(6):
        payloads = [gradient(rank, number) for rank in range(3)]
        given += np.sum(payloads, axis=0)
        got += step(workers, payloads)
    if codec in FEEDING_BACK:
        rest = collected(workers)
        assert np.abs(rest).max() > 0.01
        np.testing.assert_allclose(got + rest, given, atol=1e-4)
        np.testing.assert_allclose(collected(workers), rest, atol=0)  # it stays, whoever has it now
    else:
        np.testing.assert_allclose(got, given, atol=0.3)


@pytest.mark.parametrize("codec", NAMES)
def test_slices_that_are_cut_anew_lose_nothing(cluster: Cluster, codec: str) -> None:
    workers = job(cluster, 2, compressed(codec), pservers=2)
    given, got = np.zeros(ITEMS), np.zeros(ITEMS)
    for number in range(8):
        payloads = [gradient(rank, number) for rank in range(2)]
        given += np.sum(payloads, axis=0)
        if number == 3:
            workers[0].tune(4096, 8192)
        got += step(workers, payloads)
    assert len(workers[1].info.owners(0)) == -(-4 * ITEMS // 4096)
    if codec in FEEDING_BACK:
        got += collected(workers)
        np.testing.assert_allclose(got, given, atol=1e-4)


@pytest.mark.parametrize("codec", FEEDING_BACK)
def test_what_was_collected_goes_on_in_a_new_job_of_another_size(cluster: Cluster, codec: str) -> None:
    """And in the same numbers, bitwise as if nothing had ended."""
    config = Config(slice_bytes=1024, window_bytes=4096, deterministic=True)
    workers = job(cluster, 2, compressed(codec), pservers=2, config=config)
    for number in range(3):
        step(workers, [gradient(rank, number) for rank in range(2)])
    rest = collected(workers)
    went_on = [step(workers, [gradient(rank, number) for rank in range(2)]) for number in (3, 4)]

    def again(count: int, pservers: int) -> list[np.ndarray]:
        new = job(cluster, count, compressed(codec), pservers=pservers, config=config)
        for worker in new:
            worker.state.set_residual(0, rest)
        return [
            *(step(new, [gradient(rank, n) if rank < 2 else None for rank in range(count)]) for n in (3, 4)),
            collected(new),
        ]

    first, second, _ = again(2, 2)
    assert [first.tobytes(), second.tobytes()] == [each.tobytes() for each in went_on]
    given = rest + np.sum([gradient(rank, number) for rank in range(2) for number in (3, 4)], axis=0)
    for count, pservers in ((1, 1), (3, 1)):
        if count > 1:
            np.testing.assert_allclose(np.sum(again(count, pservers), axis=0), given, atol=1e-4)


@pytest.mark.parametrize("codec", NAMES)
def test_a_worker_without_rows_contributes_nothing(cluster: Cluster, codec: str) -> None:
    workers = job(cluster, 2, compressed(codec))
    both = [gradient(rank, 0) for rank in range(2)]
    step(workers, both)
    found = step(workers, [None, gradient(1, 1)])
    assert np.abs(found).max() > 0
    assert not step(workers, [None, None]).any()  # nor do pservers, if nobody has any
    if codec in FEEDING_BACK:
        held = workers[0]._buckets[0].residual
        assert held is not None
        before = held.copy()
        step(workers, [None, gradient(1, 2)])
        assert held.tobytes() == before.tobytes()


@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_every_worker_and_is_over_with_its_step(
    cluster: Cluster, codec: str, bad: float
) -> None:
    workers = job(cluster, 2, compressed(codec), pservers=2)
    spoilt = gradient(1, 0)
    spoilt[[0, 700, ITEMS - 1]] = bad
    found = step(workers, [gradient(0, 0), spoilt])
    assert not np.isfinite(found[[0, 700, ITEMS - 1]]).any()
    assert np.isfinite(step(workers, [gradient(rank, 1) for rank in range(2)])).all()


def test_deterministic_sums_repeat_bitwise(cluster: Cluster) -> None:
    config = Config(slice_bytes=1024, window_bytes=4096, deterministic=True)
    runs = []
    for _ in range(2):
        workers = job(cluster, 3, compressed("int8"), config=config)
        runs.append([step(workers, [gradient(rank, n) for rank in range(3)]).tobytes() for n in range(3)])
    assert runs[0] == runs[1]


def test_codecs_and_plain_buckets_share_a_job(cluster: Cluster) -> None:
    whole = BucketSpec(("ints",), "sum", 8 * 100, "int64", 1)
    gather = BucketSpec(("words",), "gather", 0, "uint8", 2)
    workers = job(cluster, 2, compressed("int8"), whole, gather, compressed("none"), compressed("onebit", 0))
    pending = [[push(w, b, p) for w in workers] for b, p in ((1, np.arange(100)), (2, b"ab"), (4, np.empty(0, "f4")))]
    exact = step(workers, [gradient(rank, 0) for rank in range(2)], bucket=3)
    assert exact.tobytes() == (gradient(0, 0) + gradient(1, 0)).tobytes()
    step(workers, [gradient(rank, 0) for rank in range(2)])
    sums, parts, empty = [[each.wait() for each in one] for one in pending]
    assert [summed(each, "int64").tolist() for each in sums] == [(2 * np.arange(100)).tolist()] * 2
    assert [[bytes(part) for part in (each.parts or {}).values()] for each in parts] == [[b"ab", b"ab"]] * 2
    assert [summed(each).size for each in empty] == [0, 0]


def test_a_rank_that_collects_alone_fails_the_job_by_name(cluster: Cluster) -> None:
    workers = job(cluster, 2, compressed("int8"))
    alone = Pending()
    workers[0].state.collect_residual(0, alone)
    trains = push(workers[1], 0, gradient(1, 0))
    for error in (alone.error(), trains.error()):
        assert isinstance(error, ProtocolError)
        assert "call strategy.combine() on every rank before" in str(error)


@pytest.mark.parametrize("where", ["worker", "pserver"])
def test_an_encoding_that_runs_out_of_memory_fails_the_job_with_that_reason(
    cluster: Cluster, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It happens on a sender's thread, which nobody watches."""
    workers = job(cluster, 2, compressed("int8"), compressed("bfloat16", priority=1, name="c"))
    step(workers, [gradient(rank, 0) for rank in range(2)])
    encode = codecs.Codec.encode

    def short(self: codecs.Codec, values: np.ndarray, held: np.ndarray | None = None) -> np.ndarray:
        if values.size and values[0] == (1000 if where == "worker" else 2000):
            raise MemoryError("no room")
        return encode(self, values, held)

    monkeypatch.setattr(codecs.Codec, "encode", short)
    pending = [push(w, 1, np.full(ITEMS, 1000, np.float32)) for rank, w in enumerate(workers)]
    for each in pending:
        error = each.error(TfpsError, "no room")
        assert ("could not be compressed" in str(error)) == (where == "worker")


def test_a_slice_of_the_wrong_size_is_refused(cluster: Cluster) -> None:
    workers = cluster.workers(cluster.pservers(1, 2), 2)
    declare(workers, compressed("int8"))
    with pytest.raises(ProtocolError, match="must have"):
        together(lambda: workers[0].push(0, np.zeros(3, np.float32), Pending()))


@pytest.mark.parametrize("cluster", ["tcp"], indirect=True)
def test_any_error_on_a_senders_thread_ends_the_job(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    (worker,) = job(cluster, 1, compressed("none"))
    encoded = connection._encoded

    def broken(part: Next, more: bool) -> tuple[bytes | memoryview, ...]:
        if isinstance(part.item, Outgoing) and part.item.header.kind == Kind.PUSH:
            raise KeyError("oops")
        return encoded(part, more)

    monkeypatch.setattr(connection, "_encoded", broken)
    error = push(worker, 0, gradient(0, 0)).error()
    assert "sending failed at step 0: KeyError('oops')" in str(error)
