"""What happens while workers go on with other pservers: more is lost, somebody comes or ends."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent import futures

import jobs
import numpy as np
import pytest
from jobs import Cluster, Pending, attempt, bucket, poll, push, summed
from moving import GRADIENT, ITEMS, TOTAL, Job, deafening

from tfps.exchange.interface import Payload
from tfps.pserver import rendezvous
from tfps.recovery import exchange
from tfps.types import Argument
from tfps.worker import worker as worker_module
from tfps.worker.bucket import PushedBucket
from tfps.worker.pushes import Pushes
from tfps.worker.worker import Worker

BEFORE = bucket(4 * ITEMS, name="declared before a joining worker came")
ONES = np.ones(ITEMS, np.float32)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_GRACE_S", 1.0)
    monkeypatch.setattr(worker_module, "_REJOIN_S", 1.0)


def test_nobody_lacks_a_result_whose_donor_dies_while_it_gives_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, redeliver, deaf = Job(cluster), Pushes.redeliver, deafening(monkeypatch)
    job.step()
    deaf(job.workers[2])
    pushed = job.begin(GRADIENT)
    known = [summed(pending.wait()).tobytes() for pending, _ in pushed[:2]]

    def dies(pushes: Pushes, number: int, donor: int, result: Payload | None, on_reply: Argument) -> None:
        new = job.workers[0].core.next
        if donor == 0 and new is not None and new.pushes is pushes:
            return new.close("it dies")
        return redeliver(pushes, number, donor, result, on_reply)

    monkeypatch.setattr(Pushes, "redeliver", dies)
    monkeypatch.setattr(exchange, "MOST_CONNECT_S", 0.5)  # its own thread is not dead, and waits without end
    job.servers[1].stop(0)
    assert [summed(pushed[2][0].wait()).tobytes()] == known[1:]
    poll(lambda: job.workers[1].view.ranks == (1, 2))


def test_what_a_codec_holds_back_stays_as_it_was(cluster: Cluster) -> None:
    job = Job(cluster, codec="onebit")
    for _ in range(3):
        for pending, _ in job.begin(GRADIENT):
            pending.wait()
    before = [worker.core.worker._buckets[GRADIENT].residual for worker in job.workers]
    assert all(each is not None and each.any() for each in before)
    job.lose(1)
    for worker, residual in zip(job.workers, before, strict=True):
        np.testing.assert_array_equal(worker.core.worker._buckets[GRADIENT].residual, residual)


@pytest.mark.parametrize("deaf_rank", [0, 1])
def test_a_residual_that_is_collected_counts_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, deaf_rank: int
) -> None:
    """Also if this rank gets the sum from another one."""
    job, deaf = Job(cluster, codec="onebit"), deafening(monkeypatch)
    for pending, _ in job.begin(GRADIENT):
        pending.wait()
    deaf(job.workers[deaf_rank])
    pushed = [Pending() for _ in job.workers]
    for worker, pending in zip(job.workers, pushed, strict=True):
        worker.state.collect_residual(GRADIENT, pending)
    pushed[2].wait()
    job.lose(1)
    total = summed(pushed[deaf_rank].wait())
    first, *others = (worker.core.worker._buckets[GRADIENT].residual for worker in job.workers)
    np.testing.assert_array_equal(first, total)
    assert not any(each.any() for each in others if each is not None)


def test_rounds_that_were_pushed_again_are_counted_alike_by_a_joining_worker(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies between two slices of a total, whose reply is partial."""
    job, frames = Job(cluster), PushedBucket.frames
    job.step()
    doomed = job.workers[2].core.worker._buckets[TOTAL]

    def first(self: PushedBucket, *arguments: Argument) -> list[Argument]:
        found = list(frames(self, *arguments))
        return found[:2] if self is doomed else found

    monkeypatch.setattr(PushedBucket, "frames", first)
    before = job.received(2)
    pushed = job.begin(TOTAL)
    poll(lambda: job.received(2) == before + 2)
    job.workers.pop().close("it dies")
    job.check(pushed[:2])
    job.joiner(2)
    pushed = job.begin(TOTAL, 2)
    job.servers[1].stop(0)
    pushed.append((push(job.workers[2], TOTAL, ONES), ONES))
    job.check(pushed)


def test_a_joining_worker_that_comes_while_the_job_begins_anew_knows_what_that_has_declared(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, resume_lines, held, goes_on = Job(cluster), Worker.resume_lines, threading.Event(), threading.Event()
    job.declare([], ["what joining workers need"])
    job.leave(2)

    def late(worker: Worker, lines: Sequence[str]) -> None:
        held.set()
        assert goes_on.wait(jobs.DEADLINE_S)
        resume_lines(worker, lines)

    monkeypatch.setattr(Worker, "resume_lines", late)
    job.servers[1].stop(0)
    assert held.wait(jobs.DEADLINE_S)
    addresses = [server.address for server in job.servers]
    with futures.ThreadPoolExecutor() as pool:
        known = pool.submit(lambda: list(job.worker(addresses, 2).joining.lines()))
        futures.wait([known], timeout=0.5)  # it might not wait
        goes_on.set()
        assert known.result(jobs.DEADLINE_S) == ["what joining workers need"]


@pytest.mark.parametrize("then", ["a worker leaves", "another pserver is lost"])
def test_a_joining_worker_to_a_job_that_has_moved_is_like_the_others(cluster: Cluster, then: str) -> None:
    job = Job(cluster)
    for _ in range(3):  # the view has changed more often than the joining worker sees
        job.workers.pop().close("it ends early")
        job.joiner(2)
    job.declare([BEFORE])
    job.workers.pop().close("it ends early")
    job.lose(0)
    new = job.joiner(2)
    job.step()
    if then == "a worker leaves":
        job.workers.pop(0).close("it ends early")
    else:
        job.lose(1)
    job.step()
    assert new.declare([BEFORE]) == [3], "the others have declared it"
    job.check(job.begin(3))


def test_a_pserver_that_has_another_job_meanwhile_is_none_of_this_one(cluster: Cluster) -> None:
    job = Job(cluster)
    job.lose(0)
    back = cluster.pserver(1, job.servers[0].port)
    cluster.worker([back.address], 0).declare([bucket(8)])
    job.lose(1)
    job.step()
    job.goes_on_with([job.servers[2]])


def test_ranks_that_come_to_an_admission_before_and_after_a_loss_admit_the_same(cluster: Cluster) -> None:
    job = Job(cluster)
    job.workers.pop().close("it ends early")
    new = job.worker([server.address for server in job.servers], 2)
    new.declare(job.specs)
    threading.Thread(target=lambda: attempt(functools.partial(new.joining.take_part, 1)), daemon=True).start()
    poll(lambda: job.workers[0].joining.joiners(1) == [2])
    found: list[object] = []
    first = threading.Thread(target=lambda: found.extend(attempt(lambda: job.workers[0].joining.admit([2]))))
    first.start()
    poll(lambda: (admission := job.servers[0]._job.elastic.admission) is not None and admission.called == {0})
    job.lose(0)
    found += attempt(lambda: job.workers[1].joining.admit([2]))
    first.join(jobs.DEADLINE_S)
    assert found in ([None, None], [[0, 1], [0, 1]])
