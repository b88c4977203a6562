"""Workers of a job: what is sent when, and what comes back. What every exchange does is in test_interface.py."""

from __future__ import annotations

import dataclasses
import threading
import weakref

import jobs
import numpy as np
from jobs import Cluster, bucket, declare, job, push, summed, together
from recorded import sends

from tfps.config import Config
from tfps.errors import TfpsError
from tfps.exchange.interface import BucketSpec
from tfps.membership.members import State
from tfps.trace.recorder import Recorder
from tfps.types import Array
from tfps.worker.worker import Worker


def test_an_urgent_slice_overtakes_waiting_ones(cluster: Cluster) -> None:
    recorder = Recorder()
    config = Config(slice_bytes=1024, window_bytes=1024)
    first, second = job(cluster, 2, bucket(200 * 1024, 9), bucket(1024, 0), config=config, recorder=recorder)
    recorder.start()
    with first._queues[0]._changed:  # nothing is sent before all waits, however long this thread takes for it
        pushes = [push(first, b, bytes(size)) for b, size in ((0, 200 * 1024), (1, 1024))]
    for pending in [*pushes, *(push(second, b, None) for b in (0, 1))]:
        pending.wait()
    assert [each.bucket for each in sends(recorder) if each.nbytes] == [1] + [0] * 200


def test_windows_full_of_different_slices_do_not_deadlock(cluster: Cluster) -> None:
    # If a slice were in flight until its sum comes, rank 0's window would be full of bucket 0 and rank 1's of bucket 1.
    config = Config(slice_bytes=1024, window_bytes=1024, policy="fifo", step_timeout_s=jobs.DEADLINE_S)
    workers = job(cluster, 2, bucket(20 * 1024), bucket(20 * 1024), config=config)
    pushes = [push(workers[0], b, bytes(20 * 1024)) for b in (0, 1)]
    pushes += [push(workers[1], b, bytes(20 * 1024)) for b in (1, 0)]
    for pending in pushes:
        pending.wait()


def test_a_rank_may_run_ahead_in_other_buckets(cluster: Cluster) -> None:
    first, second = job(cluster, 2, *(bucket(10_000, p) for p in range(8)))
    early = [push(first, b, bytes(10_000)) for b in range(8)]
    assert not any(pending.replied for pending in early)
    late = [push(second, b, bytes(10_000)) for b in reversed(range(8))]
    for pending in early + late:
        pending.wait()


def test_what_has_been_sent_is_freed_before_the_reply_comes(cluster: Cluster) -> None:
    first, second = job(cluster, 2, bucket(40_000))
    values: Array = np.ones(10_000, np.float32)
    freed = threading.Event()
    weakref.finalize(values, freed.set)
    pending = push(first, 0, values)
    del values
    assert freed.wait(jobs.DEADLINE_S)
    assert not pending.replied
    push(second, 0, np.ones(10_000, np.float32)).wait()
    assert set(summed(pending.wait()).tolist()) == {2}


def test_the_other_placement_works_alike(cluster: Cluster) -> None:
    config = Config(slice_bytes=1024, window_bytes=4096, placement="round_robin")
    specs = [bucket(10_000, 0, "x"), BucketSpec(("g",), "gather", 0, "uint8", 0), bucket(3000, 0, "y")]
    workers = job(cluster, 2, *specs, pservers=3, config=config)
    for pending in [push(w, b, np.ones(n, np.float32)) for w in workers for b, n in ((0, 2500), (2, 750))]:
        assert set(summed(pending.wait()).tolist()) == {2}
    for pending in [push(w, 1, b"abc") for w in workers]:
        assert list(map(bytes, (pending.wait().parts or {}).values())) == [b"abc"] * 2


def test_deterministic_sums_of_three_workers_repeat_bitwise(cluster: Cluster) -> None:
    config = Config(slice_bytes=1024, window_bytes=4096, deterministic=True)
    workers = job(cluster, 3, bucket(8000), config=config)
    random = np.random.default_rng(0)
    parts = [(random.standard_normal(2000) * 10.0 ** random.integers(-6, 6, 2000)).astype(np.float32) for _ in range(3)]
    expected = (parts[0] + parts[1]) + parts[2]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)):
        for pending in [push(workers[rank], 0, parts[rank]) for rank in order]:
            assert summed(pending.wait()).tobytes() == expected.tobytes()


def test_a_reply_stays_as_it_was_while_the_only_rank_that_contributed_pushes_the_next_step() -> None:
    with Cluster() as cluster:
        server = cluster.pserver(2)

        def join_second() -> Worker:
            jobs.poll(lambda: bool(server.status().members))  # replies go out in the order of joining
            return cluster.worker([server.address], 1, config=dataclasses.replace(jobs.CONFIG, shared_memory=False))

        first, second = together(lambda: cluster.worker([server.address], 0), join_second)
        declare([first, second], bucket(1024))
        theirs = push(second, 0, None)
        jobs.poll(lambda: server.status().open_slices == 1)
        with server._job._state.queues[1]._changed:  # rank 1's reply is not sent yet
            assert summed(push(first, 0, np.full(256, 1, np.float32)).wait()).tolist() == [1] * 256
            ours = push(first, 0, np.full(256, 2, np.float32))
            jobs.poll(lambda: not first._queues[0].load.queued_slices)
        assert summed(theirs.wait()).tolist() == [1] * 256
        push(second, 0, None).wait()
        assert summed(ours.wait()).tolist() == [2] * 256


def test_slices_in_shared_memory_that_were_pushed_before_a_rank_left_count() -> None:
    with Cluster() as cluster:
        server = cluster.pserver(2)
        first, second = cluster.workers([server.address], 2)
        declare([first, second], bucket(1024))
        with server._job._state.queues[0]._changed:  # its push is on the pserver, and not taken yet
            ours = push(first, 0, np.full(256, 1, np.float32))
            jobs.poll(lambda: not first._queues[0].load.queued_slices)
            leaving = threading.Thread(target=first._leave)
            leaving.start()
            jobs.poll(lambda: server._job._state.roster.members[0].state is State.DEPARTED)
        leaving.join(jobs.DEADLINE_S)
        assert summed(push(second, 0, np.full(256, 2, np.float32)).wait()).tolist() == [3] * 256
        first.close()
        assert isinstance(ours.error(), TfpsError)
