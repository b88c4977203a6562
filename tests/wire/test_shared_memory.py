"""Slices that pass through memory of their worker, to pservers on its host."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import fcntl
import functools
import gc
import os
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import cast

import jobs
import numpy as np
import pytest
from jobs import push, summed, together

from tfps.errors import ProtocolError
from tfps.exchange.interface import BucketSpec
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.server import ParameterServer
from tfps.types import Argument, Array
from tfps.wire import frames, shared_memory
from tfps.wire.frames import EMPTY, SHARED, Header, Kind
from tfps.wire.shared_memory import Arena, Attached, Place
from tfps.worker.worker import Worker

SPECS = [BucketSpec(("large",), "sum", 20_000, "float32", 0), BucketSpec(("small",), "sum", 400, "float32", 1)]


def job(cluster: jobs.Cluster, server: ParameterServer, workers: int, **options: Argument) -> list[Worker]:
    members = cluster.workers([server.address], workers, **options)
    together(*(functools.partial(worker.declare, SPECS) for worker in members))
    return members


def exchange(members: list[Worker], value: float) -> list[Array]:
    """One step of both buckets; the sums of the large one."""
    pushes = [[push(worker, b, np.full(SPECS[b].nbytes // 4, value, np.float32)) for b in (0, 1)] for worker in members]
    sums = [[summed(pending.wait()) for pending in each] for each in pushes]
    assert all(set(found.tolist()) == {value * len(members)} for each in sums for found in each)
    return [large for large, _ in sums]


# The memory


def test_both_ends_see_the_same_bytes() -> None:
    arena = Arena()
    region = arena.allocate(10_000)
    assert region is not None
    region.array[:] = np.arange(10_000) % 256
    attached = Attached(arena.offer)
    found = attached.view(region.place(300, 50))
    np.testing.assert_array_equal(found, np.arange(300, 350) % 256)
    found[:] = 7
    assert region.array[299:351].tolist() == [299 % 256, *[7] * 50, 350 % 256]


def test_memory_that_has_grown_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_CHUNK_BYTES", 2**20)  # regions are backed by memory of the machine
    arena = Arena()
    attached = Attached(arena.offer)
    regions = [arena.allocate(shared_memory._CHUNK_BYTES // 2) for _ in range(5)]
    for number, region in enumerate(regions):
        assert region is not None
        region.array[-1] = number
        assert attached.view(region.place(len(region.array) - 1, 1)).tolist() == [number]


def test_regions_overlap_only_when_nobody_refers_to_the_first_any_more() -> None:
    arena = Arena()
    first, second = arena.allocate(5000), arena.allocate(5000)
    assert first is not None
    assert second is not None
    assert abs(first.offset - second.offset) >= 5000
    offset, part = first.offset, first.array[10:20].view(np.uint16)  # TensorFlow holds such a view
    del first
    other = arena.allocate(5000)
    assert other is not None
    assert other.offset != offset
    del part
    gc.collect()
    again = arena.allocate(6000)  # as many pages
    assert again is not None
    assert again.offset == offset


def test_what_is_free_gives_its_memory_back_for_something_of_another_size() -> None:
    arena = Arena()
    for pages in range(100, 120):  # one model after the other
        region = arena.allocate(4096 * pages)
        assert region is not None
        region.array[:] = pages
        assert 4096 * pages < arena.nbytes <= 4096 * (2 * 120 + 1)
        del region
    again = arena.allocate(4096 * 100)
    assert again is not None
    again.array[:] = 1
    np.testing.assert_array_equal(Attached(arena.offer).view(again.place(0, 4096)), np.ones(4096, np.uint8))


@pytest.mark.parametrize("place", [Place(2**40, 4), Place(0, 2**40), Place(2**64 - 1, 1), Place(2**63, 2**63)])
def test_places_beyond_the_end_are_refused(place: Place) -> None:
    arena = Arena()
    attached = Attached(arena.offer)
    with pytest.raises(ProtocolError, match="must end within its"):
        attached.view(place)


def test_whoever_has_mapped_it_is_safe_from_its_becoming_shorter() -> None:
    arena = Arena()
    with pytest.raises(PermissionError):
        os.ftruncate(arena.offer.fd, 0)


@pytest.mark.parametrize(
    "wrong", [{"host": "other"}, {"host": ""}, {"secret": b""}, {"secret": bytes(16)}, {"fd": 10**6}, {"pid": 0}]
)
def test_wrong_offers_are_refused(wrong: dict[str, Argument]) -> None:
    arena = Arena()
    with pytest.raises(OSError, match=r"."):
        Attached(dataclasses.replace(arena.offer, **wrong))


def opened(path: Path) -> Callable[[], bool]:
    """Watches `path`; returns what tells whether it has been opened since."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert watch >= 0
    assert libc.inotify_add_watch(watch, os.fsencode(path), 0x20) >= 0  # IN_OPEN

    def tell() -> bool:
        try:
            return bool(os.read(watch, 4096))
        except BlockingIOError:
            return False
        finally:
            os.close(watch)

    return tell


def test_what_a_stranger_offers_is_not_opened_to_see_what_it_is(tmp_path: Path) -> None:
    """Opening a device or a pipe may do something; a pserver may run as root, and the offer is a stranger's."""
    path = tmp_path / "device"
    path.touch()
    arena = Arena()
    with path.open("r+b") as file:
        was_opened = opened(path)
        with pytest.raises(OSError, match=r"must be a worker's memory, got .*device"):
            Attached(dataclasses.replace(arena.offer, fd=file.fileno()))
    assert not was_opened()


def test_memory_of_another_name_is_refused() -> None:
    arena, other = Arena(), os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(other, 4096)
    os.pwrite(other, arena.offer.secret, 0)
    fcntl.fcntl(other, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    try:
        with pytest.raises(OSError, match="must be a worker's memory, got /memfd:other"):
            Attached(dataclasses.replace(arena.offer, fd=other))
    finally:
        os.close(other)


def test_a_closed_arena_gives_nothing_and_leaves_what_is_in_use() -> None:
    arena = Arena()
    region = arena.allocate(5000)
    assert region is not None
    arena.close()
    region.array[:] = 1
    assert arena.allocate(5000) is None
    with pytest.raises(OSError, match=r"."):  # also if another thread's file has the number by now
        Attached(arena.offer)


def test_free_memory_of_a_size_can_be_given_back() -> None:
    arena = Arena()
    free, kept, other = (arena.allocate(4096 * pages) for pages in (10, 10, 20))
    assert free is not None
    assert kept is not None
    assert other is not None
    kept.array[:] = 7
    before = arena.nbytes
    del free
    arena.give_back(4096 * 10 - 1)  # the same number of pages
    assert arena.nbytes == before - 4096 * 10
    assert (kept.array == 7).all()
    assert arena.allocate(4096 * 10) is not None
    assert arena.nbytes == before


# Jobs


def test_memory_is_used_again_step_after_step(cluster: jobs.Cluster) -> None:
    server = cluster.pserver(2)
    members = job(cluster, server, 2)
    assert [worker._memory.pservers for worker in members] == [{0}, {0}]
    assert [each.shared_memory for each in server.status().members] == [True, True]
    exchange(members, 1)
    arenas = [cast(Arena, worker._memory.arena) for worker in members]
    step_nbytes = min(arena._end for arena in arenas)
    assert step_nbytes > SPECS[0].nbytes
    for step in range(20):
        exchange(members, step)
    # Not as much as after one step: what a thread still holds of one is not free for the next.
    assert max(arena._end for arena in arenas) <= 3 * step_nbytes


def test_a_result_that_is_kept_stays_what_it_was(cluster: jobs.Cluster) -> None:
    members = job(cluster, cluster.pserver(2), 2)
    kept = [exchange(members, step) for step in range(4)]
    for step, found in enumerate(kept):
        assert all(set(each.tolist()) == {2 * step} for each in found)


def test_a_pserver_lets_go_of_the_memory_of_who_has_left(cluster: jobs.Cluster) -> None:
    server = cluster.pserver(2)
    members = job(cluster, server, 2)
    exchange(members, 1)
    maps = [weakref.ref(server._job._state.memory[rank]._map) for rank in range(2)]
    for worker in members:
        worker.close()

    def gone() -> bool:
        gc.collect()
        return [each() for each in maps] == [None, None]

    jobs.poll(gone)


def test_workers_may_differ_in_what_they_share(cluster: jobs.Cluster) -> None:
    server = cluster.pserver(3)
    configs = [dataclasses.replace(jobs.CONFIG, shared_memory=shared) for shared in (True, False, True)]
    members = together(
        *(functools.partial(cluster.worker, [server.address], rank, config=configs[rank]) for rank in range(3))
    )
    together(*(functools.partial(worker.declare, SPECS) for worker in members))
    assert [each.shared_memory for each in server.status().members] == [True, False, True]
    for step in range(3):
        exchange(members, step)


def test_where_there_is_no_more_memory_slices_pass_through_sockets(
    cluster: jobs.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = job(cluster, cluster.pserver(1), 1)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    exchange(members, 1)
    monkeypatch.undo()
    exchange(members, 2)


def test_a_system_without_such_memory_is_no_error(cluster: jobs.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    server = cluster.pserver(1)
    exchange(job(cluster, server, 1), 1)
    assert not server.status().members[0].shared_memory


def test_another_network_namespace_is_another_host(cluster: jobs.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter(["worker's", "pserver's"])
    monkeypatch.setattr(shared_memory, "host", lambda: next(hosts))
    server = cluster.pserver(1)
    exchange(job(cluster, server, 1), 1)
    assert not server.status().members[0].shared_memory


# Protocol


def shared(header: Header, place: Place) -> bytes:
    """A message that says where a payload is."""
    return frames.encode(*frames.shared(header, place))


@pytest.fixture
def sharing(cluster: jobs.Cluster) -> tuple[jobs.RawWorker, Arena]:
    """A worker that has declared a slice of 1024 bytes and a gather, and its memory."""
    arena, server = Arena(), cluster.pserver(1)
    offer = pb.SharedMemory(host=arena.offer.host, fd=arena.offer.fd, secret=arena.offer.secret)
    raw = cluster.raw(server.address, memory=offer)
    assert raw.joined.shared_memory
    raw.open().declare()
    gather = pb.Bucket(names=["g"], kind="gather", dtype="uint8")
    raw.declare(pb.Bucket(names=["b"], kind="sum", nbytes=1024, dtype="float32"), gather, number=1)
    return raw, arena


def test_the_sum_takes_the_place_of_the_slice(sharing: tuple[jobs.RawWorker, Arena]) -> None:
    raw, arena = sharing
    region = arena.allocate(4096)
    assert region is not None
    for step, flags in ((0, 0), (1, EMPTY)):
        region.array[:] = 7
        raw.send(shared(Header(Kind.PUSH, flags, step=step), region.place(1024, 1024)))
        header, payload = raw.read()
        assert (header.kind, header.flags, header.step) == (Kind.REPLY, SHARED, step)
        assert frames.decode_place(header, memoryview(payload)) == region.place(1024, 1024)
        expected = 0 if flags & EMPTY else 7
        assert set(region.array[1024:2048].tolist()) == {expected}
        assert set(region.array[:1024].tolist()) == set(region.array[2048:].tolist()) == {7}
    # What came in and is in no frame counts all the same: half of a window of 4096 bytes is receipted with a reply.
    raw.send(shared(Header(Kind.PUSH, step=2), region.place(1024, 1024)))
    assert raw.read()[0].received == 2048


WRONG = {
    "no place": (frames.encode(Header(Kind.PUSH, SHARED), b"12345"), "the place of a shared slice must have 16 bytes"),
    "beyond the end": (shared(Header(Kind.PUSH), Place(2**40, 1024)), "must end within its"),
    "wrong size": (shared(Header(Kind.PUSH), Place(0, 1020)), "must have 1024 bytes"),
    "wrong size, nothing there": (shared(Header(Kind.PUSH, EMPTY), Place(0, 8)), "must have 1024 bytes"),
    "a gather": (shared(Header(Kind.PUSH, bucket=1), Place(0, 8)), "bucket 'g' must come in frames"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_place_fails_the_job_and_names_the_rank(sharing: tuple[jobs.RawWorker, Arena], what: str) -> None:
    raw, _ = sharing
    message, rule = WRONG[what]
    raw.send(message)
    error = raw.read_error(ProtocolError)
    assert str(error).startswith("rank 0: ")
    assert rule in str(error)


def test_a_place_in_memory_that_was_not_offered_fails_the_job(cluster: jobs.Cluster) -> None:
    raw = cluster.raw(cluster.pserver(1).address)
    assert not raw.joined.shared_memory
    raw.open().declare()
    raw.declare(pb.Bucket(names=["b"], kind="sum", nbytes=1024, dtype="float32"), number=1)
    raw.send(shared(Header(Kind.PUSH), Place(0, 1024)))
    assert "bucket 'b' must come in frames" in str(raw.read_error())


@pytest.mark.parametrize("wrong", [b"", struct.pack("<QQ", 0, 1024), struct.pack("<QQ", 4096, 1020)])
def test_a_reply_at_a_wrong_place_fails_the_worker(
    cluster: jobs.Cluster, monkeypatch: pytest.MonkeyPatch, wrong: bytes
) -> None:
    (worker,) = job(cluster, cluster.pserver(1), 1)
    right = frames.shared

    def wrongly(header: Header, place: Place) -> tuple[Header, bytes]:
        if header.kind == Kind.REPLY:
            return header._replace(flags=SHARED), wrong
        return right(header, place)

    monkeypatch.setattr(frames, "shared", wrongly)
    pending = push(worker, 1, bytes(400))
    with pytest.raises(ProtocolError, match=r"place of a shared slice|must be at Place"):
        pending.wait()
