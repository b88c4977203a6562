"""Workers over gRPC: scheduling, failures, ends. What every exchange does is in test_exchange.py."""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest
from jobs import Cluster, attempt, push, summed, together, use
from recorded import note_in_flight, sends

from tfps.config import Config, Placement
from tfps.errors import (
    ClosedError,
    ConfigError,
    ConnectError,
    MismatchError,
    PserverLostError,
    TfpsError,
    WaitTimeoutError,
    WorkerLostError,
)
from tfps.exchange.interface import BucketSpec
from tfps.trace.recorder import Recorder
from tfps.types import Argument
from tfps.worker.worker import Worker

SHORT = replace(jobs.CONFIG, connect_timeout_s=1.5, step_timeout_s=1.0)
# For whoever has to join, or to declare, in time before the wait that must end: a busy machine takes a while for that.
LONGER = replace(jobs.CONFIG, connect_timeout_s=5.0)


@pytest.fixture(params=["tcp", "grpc", "shared memory"])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    use(request.param, monkeypatch)
    with Cluster() as cluster:
        yield cluster


def bucket(nbytes: int, priority: int = 0, name: str = "b") -> BucketSpec:
    return BucketSpec((name,), "sum", nbytes, "float32", priority)


def declare(workers: list[Worker], *specs: BucketSpec) -> list[int]:
    ids: list[int] = together(*(functools.partial(worker.declare, specs) for worker in workers))[0]
    return ids


def job(cluster: Cluster, workers: int, *specs: BucketSpec, pservers: int = 1, **options: Argument) -> list[Worker]:
    members = cluster.workers(cluster.pservers(pservers, workers), workers, **options)
    declare(members, *specs)
    return members


# Scheduling


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


def test_fifo_sends_in_order_of_arrival(cluster: Cluster) -> None:
    recorder = Recorder()
    config = Config(slice_bytes=1024, window_bytes=1024, policy="fifo")
    (worker,) = job(cluster, 1, bucket(50 * 1024, 9), bucket(1024, 0), config=config, recorder=recorder)
    recorder.start()
    for pending in [push(worker, 0, bytes(50 * 1024)), push(worker, 1, bytes(1024))]:
        pending.wait()
    assert [each.bucket for each in sends(recorder)] == [0] * 50 + [1]


@pytest.mark.parametrize("cluster", ["grpc"], indirect=True)  # a data connection's socket bounds what is on the way
@pytest.mark.parametrize("window_bytes", [1, 1500, 8192])
def test_in_flight_bytes_never_exceed_window_plus_one_slice_in_either_direction(
    cluster: Cluster, window_bytes: int
) -> None:
    here, there = [Recorder(), Recorder()], Recorder()
    config = Config(slice_bytes=1024, window_bytes=window_bytes)
    server = cluster.pserver(2, recorder=there)
    workers = together(
        *(
            functools.partial(cluster.worker, [server.address], rank, config=config, recorder=here[rank])
            for rank in range(2)
        )
    )
    declare(workers, *(bucket(30_000, priority) for priority in range(4)))
    pushed = [
        note_in_flight(recorder, {(-1, 0): worker._queues[0]}) for recorder, worker in zip(here, workers, strict=True)
    ]
    replied = note_in_flight(there, {(rank, -1): server._job._queues[rank] for rank in range(2)})
    for recorder in (*here, there):
        recorder.start()
    for _ in range(3):
        for pending in [push(w, b, np.ones(7500, np.float32)) for w in workers for b in range(4)]:
            assert set(summed(pending.wait()).tolist()) == {2}
    for in_flight in ([*pushed[0], *pushed[1]], replied):
        assert len(in_flight) == 2 * 3 * 4 * 30
        assert max(in_flight) < window_bytes + 1024


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


def test_slices_are_spread_evenly_over_pservers(cluster: Cluster) -> None:
    recorder = Recorder()
    (worker,) = job(cluster, 1, bucket(9 * 1024), bucket(400), bucket(5000), pservers=3, recorder=recorder)
    recorder.start()
    for pending in [push(worker, b, bytes(size)) for b, size in enumerate((9 * 1024, 400, 5000))]:
        pending.wait()
    per_pserver: Counter[int] = Counter()
    for each in sends(recorder):
        per_pserver[each.pserver] += each.nbytes
    assert len(per_pserver) == 3
    assert max(per_pserver.values()) - min(per_pserver.values()) <= 1024


@pytest.mark.parametrize("placement", ["round_robin", "hash"])
def test_other_placements_work_alike(cluster: Cluster, placement: Placement) -> None:
    config = Config(slice_bytes=1024, window_bytes=4096, placement=placement)
    specs = [bucket(10_000, 0, "x"), BucketSpec(("g",), "gather", 0, "uint8", 0), bucket(3000, 0, "y")]
    workers = job(cluster, 2, *specs, pservers=3, config=config)
    for pending in [push(w, b, np.ones(n, np.float32)) for w in workers for b, n in ((0, 2500), (2, 750))]:
        assert set(summed(pending.wait()).tolist()) == {2}
    for pending in [push(w, 1, b"abc") for w in workers]:
        assert list(map(bytes, pending.wait().parts or [])) == [b"abc"] * 2


def test_deterministic_sums_of_three_workers_repeat_bitwise(cluster: Cluster) -> None:
    config = Config(slice_bytes=1024, window_bytes=4096, deterministic=True)
    workers = job(cluster, 3, bucket(8000), config=config)
    random = np.random.default_rng(0)
    parts = [(random.standard_normal(2000) * 10.0 ** random.integers(-6, 6, 2000)).astype(np.float32) for _ in range(3)]
    expected = (parts[0] + parts[1]) + parts[2]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)):
        for pending in [push(workers[rank], 0, parts[rank]) for rank in order]:
            assert summed(pending.wait()).tobytes() == expected.tobytes()


# Joining


def test_ranks_follow_the_order_of_joining(cluster: Cluster) -> None:
    addresses = cluster.pservers(2, 3)
    workers = together(*[lambda: cluster.worker(addresses)] * 3)
    assert sorted(worker.rank for worker in workers) == [0, 1, 2]
    assert {worker.workers for worker in workers} == {3}


def test_pservers_may_start_later_than_workers(cluster: Cluster) -> None:
    port = jobs.unused_ports(1)
    started = threading.Event()

    def join() -> Worker:
        started.set()
        return cluster.worker([f"127.0.0.1:{port}"])

    def serve() -> None:
        from tfps.pserver.server import ParameterServer

        assert started.wait(jobs.DEADLINE_S)
        server = ParameterServer("127.0.0.1", port, workers=1)
        cluster.callback(server.stop, 0.2)

    worker, _ = together(join, serve)
    assert worker is not None
    assert worker.workers == 1


def test_no_pserver_at_an_address_is_named_within_the_timeout(cluster: Cluster) -> None:
    address = f"127.0.0.1:{jobs.unused_ports(1)}"
    start = time.monotonic()
    with pytest.raises(
        ConnectError, match=rf"pserver {address}: no answer within 1.5 s .*is tfps_pserver running there"
    ):
        cluster.worker([address], config=SHORT)
    assert time.monotonic() - start < jobs.DEADLINE_S


def test_one_of_two_pservers_unreachable_is_named_and_the_other_is_free_again(cluster: Cluster) -> None:
    good, bad = cluster.pserver(1).address, f"127.0.0.1:{jobs.unused_ports(1)}"
    with pytest.raises(ConnectError, match=f"pserver {bad}: no answer"):
        cluster.worker([good, bad], config=LONGER)
    cluster.worker([good])


def test_something_else_at_the_address_is_no_pserver(cluster: Cluster) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    other = grpc.server(ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    cluster.callback(lambda: other.stop(0).wait())
    with pytest.raises(ConnectError, match="not a tfps pserver"):
        cluster.worker([f"127.0.0.1:{port}"])


def test_a_missing_rank_is_named_within_the_timeout(cluster: Cluster) -> None:
    addresses = cluster.pservers(1, 3)
    results = attempt(*(functools.partial(cluster.worker, addresses, rank, config=LONGER) for rank in (0, 2)))
    for error in results:
        assert isinstance(error, WaitTimeoutError)
        assert "rank 1 (not joined)" in str(error)


def test_a_wrong_number_of_workers_is_refused(cluster: Cluster) -> None:
    address = cluster.pserver(2).address
    with pytest.raises(ConnectError, match=f"pserver {address}: .*--workers 2, this worker expects 3"):
        cluster.worker([address], workers=3)


def test_two_workers_of_one_rank_are_refused(cluster: Cluster) -> None:
    addresses = cluster.pservers(1, 2)
    first = cluster.raw(addresses[0], rank=0).open()
    with pytest.raises(ConnectError, match=r"two workers have rank 0: rawhost:\d+ and"):
        cluster.worker(addresses, 0)
    first.leave()


def test_a_pserver_used_by_another_job_names_its_workers(cluster: Cluster) -> None:
    addresses = cluster.pservers(2, 1)
    cluster.worker(addresses[1:], job="mnist")
    with pytest.raises(ConnectError, match=rf"pserver {addresses[1]}: .*used by|lists of pservers differ"):
        cluster.worker(addresses, job="imagenet")
    with pytest.raises(ConnectError, match=r"used by another job 'mnist' \(its workers: rank 0"):
        cluster.worker(addresses[1:], job="imagenet")


def test_settings_that_differ_are_refused(cluster: Cluster) -> None:
    addresses = cluster.pservers(1, 2)
    first = cluster.raw(addresses[0], rank=0).open()
    with pytest.raises(MismatchError, match=r"window_bytes must be the same on all workers: .* 4096, this worker 9999"):
        cluster.worker(addresses, 1, config=Config(slice_bytes=1024, window_bytes=9999, connect_timeout_s=30))
    first.leave()


@pytest.mark.parametrize("pservers", [[], ["a:1", "a:1"], ["nonsense"]])
def test_malformed_lists_of_pservers_are_refused(pservers: list[str]) -> None:
    with pytest.raises(ConfigError, match="pserver"):
        Worker(pservers)


# Declaring


def test_models_that_differ_are_named_on_every_worker(cluster: Cluster) -> None:
    workers = job(cluster, 3)
    details = [["x", "variable dense/kernel (64, 10) float32"]] * 2 + [["x", "variable dense/kernel (64, 12) float32"]]
    results = attempt(*(functools.partial(w.declare, [], details[w.rank]) for w in workers))
    for error in results:
        assert isinstance(error, MismatchError)
        assert "line 2" in str(error)
        for rank, size in enumerate((10, 10, 12)):
            assert f"rank {rank} ({socket.gethostname()}:" in str(error)
            assert f"has variable dense/kernel (64, {size}) float32" in str(error)


def test_a_variable_that_only_one_rank_has_is_named(cluster: Cluster) -> None:
    workers = job(cluster, 2)
    results = attempt(*(functools.partial(w.declare, [bucket(8)] * (1 + w.rank)) for w in workers))
    for error in results:
        assert isinstance(error, MismatchError)
        assert "has nothing" in str(error)
        assert "has bucket 'b' sum 8 bytes float32 priority 0" in str(error)


def test_a_rank_that_does_not_declare_is_named(cluster: Cluster) -> None:
    first, second = job(cluster, 2)
    first.config = SHORT  # only now: to join and to declare nothing it had time
    with pytest.raises(WaitTimeoutError, match=r"after 1 s not declared its variables: rank 1 \("):
        first.declare([bucket(8)])
    assert isinstance(jobs.Failed(second).wait(), WaitTimeoutError)


def test_a_rank_that_leaves_instead_of_declaring_is_named(cluster: Cluster) -> None:
    first, second = job(cluster, 2)
    error, _ = attempt(lambda: first.declare([bucket(8)]), second.close)
    assert isinstance(error, WorkerLostError)
    assert "rank 1" in str(error)


# Steps that do not end


def test_a_rank_that_does_not_push_is_named_after_the_timeout(cluster: Cluster) -> None:
    config = replace(jobs.CONFIG, step_timeout_s=3.0)  # enough to declare, and for slices to be on their pservers
    first, second = job(cluster, 2, bucket(5000, name="dense/kernel"), pservers=2, config=config)
    error = push(first, 0, bytes(5000)).error()
    assert isinstance(error, WaitTimeoutError)
    assert "bucket 'dense/kernel' step 0: no result within 3 s" in str(error)
    assert f"waits for rank 1 ({socket.gethostname()}:" in str(error)
    heard = jobs.Failed(second).wait()
    assert "rank 0" in str(heard)
    assert "no result within 3 s" in str(heard)


def test_a_rank_whose_data_ends_earlier_is_named(cluster: Cluster) -> None:
    first, second = job(cluster, 2, bucket(5000, name="dense/kernel"), pservers=2)
    for pending in [push(w, 0, bytes(5000)) for w in (first, second)]:
        pending.wait()
    waiting = push(first, 0, bytes(5000))
    second.close()
    error = waiting.error()
    assert isinstance(error, WorkerLostError)
    assert "rank 1" in str(error)
    assert "left before step 1 of bucket 'dense/kernel'" in str(error)
    assert "give every worker the same number of batches" in str(error)


def test_a_push_after_another_rank_has_left_fails_at_once(cluster: Cluster) -> None:
    first, second = job(cluster, 2, bucket(5000))
    second.close()
    assert first.failure is None  # a leave that nobody waits for is no error
    error = push(first, 0, bytes(5000)).error()
    assert isinstance(error, WorkerLostError)
    assert "left before step 0" in str(error)


def test_workers_that_end_one_after_the_other_are_no_error(cluster: Cluster) -> None:
    workers = job(cluster, 3, bucket(5000))
    failures = [jobs.Failed(worker) for worker in workers]
    for pending in [push(w, 0, bytes(5000)) for w in workers]:
        pending.wait()
    for worker in workers:
        worker.close()
    assert [failed.errors for failed in failures] == [[], [], []]


def test_a_pserver_accepts_the_next_job_when_all_have_left(cluster: Cluster) -> None:
    addresses = cluster.pservers(2, 2)
    for round_ in range(3):
        workers = cluster.workers(addresses, 2, job=f"job {round_}")
        declare(workers, bucket(5000))
        for pending in [push(w, 0, np.ones(1250, np.float32)) for w in workers]:
            assert set(summed(pending.wait()).tolist()) == {2}
        for worker in workers:
            worker.close()


def test_a_pserver_accepts_the_next_job_after_a_failure(cluster: Cluster) -> None:
    servers = [cluster.pserver(2) for _ in range(2)]
    addresses = [server.address for server in servers]
    workers = cluster.workers(addresses, 2)
    workers[0].fail(TfpsError("broken"))
    jobs.Failed(workers[1]).wait()
    # One pserver tells it; that the other knows is no earlier.
    jobs.poll(lambda: {server.status().job.state for server in servers} == {"failed"})
    workers = cluster.workers(addresses, 2)
    declare(workers, bucket(8))
    for pending in [push(w, 0, bytes(8)) for w in workers]:
        pending.wait()


def test_closing_answers_outstanding_pushes(cluster: Cluster) -> None:
    first, _ = job(cluster, 2, bucket(5000))
    waiting = [push(first, 0, bytes(5000)) for _ in range(3)]
    first.close()
    assert all(isinstance(pending.error(), ClosedError) for pending in waiting)
    assert all(len(pending.replies) == 1 for pending in waiting)


def test_close_ends_all_threads_of_the_worker(cluster: Cluster) -> None:
    before = set(threading.enumerate())
    (worker,) = job(cluster, 1, bucket(8), pservers=2)
    push(worker, 0, bytes(8)).wait()
    own = [t for t in set(threading.enumerate()) - before if t.name.startswith(("tfps-recv", "tfps-deadlines"))]
    assert sorted(t.name for t in own) == ["tfps-deadlines", "tfps-recv-0", "tfps-recv-1"]
    worker.close()
    assert not any(thread.is_alive() for thread in own)


def sockets() -> int:
    """How many this process has: of workers and, in these tests, of pservers."""
    found = 0
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += str(file.readlink()).startswith("socket:")
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_no_connection_outlives_its_worker(cluster: Cluster, fails: bool) -> None:
    server = cluster.pserver(2)
    before = sockets()
    for _ in range(12):  # without the end of a stream being read, every second one stays
        workers = cluster.workers([server.address], 2)
        declare(workers, bucket(8))
        for pending in [push(worker, 0, bytes(8)) for worker in workers]:
            pending.wait()
        if fails:
            workers[0].fail(TfpsError("has had enough"))
            jobs.Failed(workers[1]).wait()
        together(*(worker.close for worker in workers))
    jobs.poll(lambda: sockets() <= before)


def test_an_on_reply_that_raises_fails_the_exchange(cluster: Cluster) -> None:
    (worker,) = job(cluster, 1, bucket(8))

    def broken(_: object) -> None:
        raise KeyError("oops")

    worker.push(0, bytes(8), broken)
    assert "oops" in str(jobs.Failed(worker).wait())


# Losses


def test_a_stopped_pserver_is_named(cluster: Cluster) -> None:
    servers = [cluster.pserver(2) for _ in range(2)]
    workers = cluster.workers([server.address for server in servers], 2)
    declare(workers, bucket(5000))
    waiting = push(workers[0], 0, bytes(5000))
    servers[1].stop(jobs.DEADLINE_S)  # streams end by themselves, but perhaps not within the default
    error = waiting.error()
    assert isinstance(error, PserverLostError)
    assert str(error) == f"pserver {servers[1].address} was stopped"
    assert str(jobs.Failed(workers[1]).wait()) == str(error)


def test_a_killed_pserver_is_named(cluster: Cluster) -> None:
    with jobs.python("-m", "tfps.cli", "--host=127.0.0.1", "--port=0", "--workers=1") as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[3]
        worker = cluster.worker([address])
        worker.declare([bucket(8)])
        for _ in range(3):
            push(worker, 0, bytes(8)).wait()
        process.kill()
        error = jobs.Failed(worker).wait()
    assert isinstance(error, PserverLostError)
    assert re.match(rf"pserver {address}: (UNAVAILABLE|connection lost|ended the stream) at step 2", str(error))
    assert push(worker, 0, bytes(8)).error() is error


VICTIM = """
import sys, threading
import jobs
from tfps.exchange.interface import BucketSpec
from tfps.types import Argument
from tfps.worker.worker import Worker
from tfps.types import Argument
worker = Worker(sys.argv[1:], rank=1, config=jobs.CONFIG)
worker.declare([BucketSpec(("b",), "sum", 5000, "float32", 0)])
for _ in range(3):
    jobs.push(worker, 0, bytes(5000)).wait()
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("busy", [True, False], ids=["while others wait for it", "while nobody waits"])
def test_a_killed_worker_is_named_on_all_others(cluster: Cluster, busy: bool) -> None:
    addresses = cluster.pservers(2, 3)
    path = f"{jobs.ROOT}:{jobs.ROOT / 'tests' / 'helpers'}"
    with jobs.python("-c", VICTIM, *addresses, PYTHONPATH=path) as victim:
        others = together(*(functools.partial(cluster.worker, addresses, rank) for rank in (0, 2)))
        together(*(functools.partial(w.declare, [bucket(5000)]) for w in others))
        for _ in range(3):
            for pending in [push(w, 0, bytes(5000)) for w in others]:
                pending.wait()
        assert victim.stdout is not None
        assert victim.stdout.readline() == "ready\n"
        failures = [jobs.Failed(worker) for worker in others]
        waiting = [push(w, 0, bytes(5000)) for w in others] if busy else []
        victim.kill()
        errors = [failed.wait() for failed in failures] + [pending.error() for pending in waiting]
    for error in errors:
        assert isinstance(error, WorkerLostError)
        assert str(error).startswith(f"rank 1 ({socket.gethostname()}:{victim.pid}) died at step 2")


def test_a_worker_that_comes_back_waits_until_the_others_have_left_its_last_job(cluster: Cluster) -> None:
    addresses = cluster.pservers(2, 2)
    first, second = cluster.workers(addresses, 2)
    first.close()
    again: list[Worker] = []
    back = threading.Thread(target=lambda: again.extend(cluster.workers(addresses, 2)))
    back.start()
    second.close()
    back.join(jobs.DEADLINE_S)
    assert [worker.rank for worker in again] == [0, 1]
