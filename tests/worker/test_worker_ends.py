"""Workers at their end, and at that of others: who is to blame is named, nobody waits, and nothing is left."""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest
from forwarding import Forwarder
from jobs import Cluster, bucket, declare, job, push, summed, together

from tfps.errors import ClosedError, MismatchError, PserverLostError, TfpsError, WaitTimeoutError, WorkerLostError
from tfps.protos import tfps_pb2 as pb
from tfps.wire.control import failure_of
from tfps.worker.worker import Worker

# Steps that do not end


def test_a_rank_that_does_not_push_is_named_after_the_timeout(cluster: Cluster) -> None:
    config = replace(jobs.CONFIG, step_timeout_s=60.0)
    first, second = job(cluster, 2, bucket(5000, name="dense/kernel"), pservers=2, config=config)
    waits = push(first, 0, bytes(5000))
    jobs.overdue(first, missing=1)
    error = waits.error(WaitTimeoutError, "bucket 'dense/kernel' step 0: no result within 60 s")
    assert f"waits for rank 1 ({socket.gethostname()}:" in str(error)
    heard = jobs.Failed(second).wait()
    assert "rank 0" in str(heard)
    assert "no result within 60 s" in str(heard)


def test_a_rank_whose_data_ends_earlier_is_named(cluster: Cluster) -> None:
    first, second = job(cluster, 2, bucket(5000, name="dense/kernel"), pservers=2)
    for pending in [push(w, 0, bytes(5000)) for w in (first, second)]:
        pending.wait()
    waiting = push(first, 0, bytes(5000))
    second.close()
    error = waiting.error(WorkerLostError, "rank 1")
    assert "left before step 1 of bucket 'dense/kernel'" in str(error)
    assert "give every worker the same number of batches" in str(error)


CALLS: dict[str, Callable[[Worker], object]] = {
    "Declare": lambda worker: worker.declare([bucket(5000)]),
    "Put": lambda worker: worker.state.write(0, 0, 0, bytes(8)),
    "Get": lambda worker: worker.state.read(0, 0, 0, 8),
    "Tune": lambda worker: worker.tune(4096, 8192),
    "Rest": lambda worker: worker.peers.quiesce(),
    "Take": lambda worker: worker.peers.fetch_add("counter"),
    "Waiting": lambda worker: worker.peers.is_awaited(0),
    "Trace": lambda worker: worker.captures.start(),
}


@pytest.mark.parametrize("cluster", ["tcp"], indirect=True)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_breaks_says_why_the_job_failed(
    call: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfps.worker.worker._REASON_S", jobs.DEADLINE_S)
    server = cluster.pserver(2)
    between = Forwarder(server.port)
    cluster.callback(between.close)
    config = replace(jobs.CONFIG, transport="tcp")  # its slices do not go through the forwarder
    other = cluster.raw(server.address, 1, config=config).open()
    declared = functools.partial(other.declare, timeout_s=jobs.DEADLINE_S)
    joined = functools.partial(cluster.worker, [f"127.0.0.1:{between.port}"], 0, config=config)
    worker = next(each for each in jobs.attempt(declared, joined) if isinstance(each, Worker))
    sums = pb.Bucket(names=["b"], kind="sum", nbytes=5000, dtype="float32")
    together(lambda: worker.declare([bucket(5000)]), lambda: other.declare(sums, number=1))
    if call != "Declare":
        between.close()

    def cut_and_fail() -> None:
        if call == "Declare":
            jobs.poll(lambda: len(server._job.declarations.all) == 3)  # it waits for the other
            between.close()
        request = pb.LeaveRequest(
            incarnation=other.incarnation, rank=1, failure=failure_of(MismatchError("the workers differ"))
        )
        other.pserver.call("Leave", request, jobs.DEADLINE_S)

    error, _ = jobs.attempt(functools.partial(CALLS[call], worker), cut_and_fail)
    assert isinstance(error, MismatchError)
    assert str(error) == "the workers differ"


def test_why_a_rank_left_is_quoted_to_those_that_wait_for_it_and_to_nobody_else(cluster: Cluster) -> None:
    first, second = job(cluster, 2, bucket(5000), pservers=2)
    second.close("OSError: no space")
    assert first.failure is None
    error = push(first, 0, bytes(5000)).error(WorkerLostError)
    assert re.search(r"rank 1 \(.*\) left before step 0 of .* wait: it ended with OSError: no space", str(error))


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
    jobs.poll(lambda: {server.status().state for server in servers} == {"failed"})
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


@jobs.OVER_ALL
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
    error = waiting.error(PserverLostError)
    assert str(error) == f"pserver {servers[1].address} was stopped"
    assert str(jobs.Failed(workers[1]).wait()) == str(error)


def test_a_killed_pserver_is_named(cluster: Cluster) -> None:
    with jobs.python("-m", "tfps.pserver.cli", "--host=127.0.0.1", "--port=0", "--workers=1") as process:
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


@jobs.OVER_ALL
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
