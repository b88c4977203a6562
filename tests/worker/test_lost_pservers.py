"""Workers go on when pservers are lost, bitwise as if none had been (Config.min_workers)."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Sequence

import jobs
import numpy as np
import pytest
from jobs import Cluster, Failed, bucket, poll, push, summed
from moving import CONFIG, GRADIENT, ITEMS, SPECS, TOTAL, WORDS, Job, deafening, lose_an_answer, unawaited
from rich.console import Console

from tfps.config import Security
from tfps.errors import (
    ClosedError,
    ConfigError,
    ConnectError,
    ProtocolError,
    PserverLostError,
    UnsupportedError,
    WorkerLostError,
)
from tfps.exchange.interface import Reply
from tfps.protos import tfps_pb2 as pb
from tfps.pserver import rendezvous
from tfps.pserver.console import Watcher, table
from tfps.pserver.rendezvous import offer
from tfps.pserver.server import ParameterServer
from tfps.recovery import core
from tfps.recovery.journal import packed
from tfps.recovery.machine import Phase
from tfps.recovery.reconfiguration import Reconfiguration
from tfps.recovery.rendezvous import meet
from tfps.types import Argument
from tfps.worker.worker import Worker


@pytest.fixture(autouse=True)
def telling_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_TOLD_BYTES", 1)  # workers keep as little as they may


@jobs.OVER_ALL
@pytest.mark.parametrize("which", [[0], [1, 2]])
def test_a_job_goes_on_without_pservers_that_end(cluster: Cluster, which: list[int]) -> None:
    job = Job(cluster)
    job.step()
    values = [np.full(ITEMS, 1 + worker.rank, np.float32) for worker in job.workers]
    first = push(job.workers[0], GRADIENT, values[0])  # the others have not begun this round
    for index in which:
        job.servers[index].stop(0)
    rest = zip(job.workers[1:], values[1:], strict=True)
    for pending in [first, *(push(worker, GRADIENT, each) for worker, each in rest)]:
        np.testing.assert_array_equal(summed(pending.wait()), sum(values))
    for number in (TOTAL, WORDS):
        for pending in [push(worker, number, None) for worker in job.workers]:
            pending.wait()
    job.step()
    job.goes_on_with([server for index, server in enumerate(job.servers) if index not in which])


@pytest.mark.parametrize("codec", ["none", "int8", "onebit"])
@pytest.mark.parametrize("deaf_ranks", [[0], [1, 2]])
def test_who_lacks_a_result_gets_it_from_one_who_has_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, deaf_ranks: list[int], codec: str
) -> None:
    job, deaf = Job(cluster, codec=codec), deafening(monkeypatch)
    for pending, _ in job.begin(GRADIENT):
        pending.wait()
    for rank in deaf_ranks:
        deaf(job.workers[rank])
    pushed = [[pending for pending, _ in job.begin(number)] for number in (GRADIENT, TOTAL)]
    pushed.append([push(worker, WORDS, f"rank {worker.rank}".encode()) for worker in job.workers])
    known = next(rank for rank in range(3) if rank not in deaf_ranks)
    for each in pushed:
        each[known].wait()
    after = push(job.workers[known], GRADIENT, np.ones(ITEMS, np.float32))  # who has it is one round ahead
    job.servers[1].stop(0)
    for each in pushed[:2]:
        results = [summed(pending.wait()).tobytes() for pending in each]
        assert results == [results[known]] * 3
    for pending in pushed[2]:
        parts = pending.wait().parts
        assert parts is not None
        assert [bytes(part) for part in parts.values()] == [b"rank 0", b"rank 1", b"rank 2"]
    others = [push(w, GRADIENT, np.ones(ITEMS, np.float32)) for w in job.workers if w.rank != known]
    assert len({summed(pending.wait()).tobytes() for pending in (after, *others)}) == 1
    job.goes_on_with([job.servers[0], job.servers[2]])


def test_a_result_is_kept_until_all_ranks_have_it(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    job, deaf = Job(cluster, pservers=1), deafening(monkeypatch)

    def kept(number: int, ranks: Sequence[int] = range(3)) -> list[bool]:
        return [job.workers[rank].core.buckets[number].last.sum is not None for rank in ranks]

    job.step()
    job.check(job.begin(GRADIENT))
    poll(lambda: not any(kept(GRADIENT) + kept(TOTAL)))
    deaf(job.workers[2])
    members = job.servers[0]._job._state.roster.members
    for number in (GRADIENT, WORDS):  # with the second reply comes what has been announced after the first
        pushed = [push(worker, number, None) for worker in job.workers]
        for pending in pushed[:2]:
            pending.wait()
        poll(lambda: all(members[rank].received[GRADIENT] == 3 for rank in (0, 1)))
    assert all(kept(GRADIENT, [0, 1]))
    with pytest.raises(ProtocolError, match="lacks a result that the others had some steps before"):
        packed(Reply(ranks=(0, 1)))


def test_a_declaration_that_only_some_have_made_is_made_by_all(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last pserver's answer does not reach two of the workers."""
    job = Job(cluster)
    lose_an_answer(monkeypatch)
    job.declare([bucket(4 * ITEMS, name="more")], ["a detail"])
    job.check(job.begin(3))
    job.step()
    lose_an_answer(monkeypatch)
    job.declare([], ["a line for joining workers"])
    job.step()
    assert len({worker.core.worker.client.declarations for worker in job.workers}) == 1
    job.lose(0)
    job.workers.pop().close("it ends early")
    addresses = [server.address for server in job.servers]
    assert job.worker(addresses, 2).joining.lines() == ["a line for joining workers"]


def test_the_only_pserver_comes_back_at_its_address(cluster: Cluster) -> None:
    job = Job(cluster, pservers=1)
    job.step()
    pushed = job.begin(GRADIENT, 2)
    job.servers[0].stop(0)
    server = cluster.pserver(3, job.servers[0].port)
    last = push(job.workers[2], GRADIENT, np.ones(ITEMS, np.float32))
    total = sum(values for _, values in pushed) + 1
    for pending in (*(pending for pending, _ in pushed), last):
        np.testing.assert_array_equal(summed(pending.wait()), total)
    job.goes_on_with([server])


def test_a_pserver_that_joins_takes_its_part(cluster: Cluster) -> None:
    job = Job(cluster, pservers=1)
    job.step()
    more = cluster.pserver(3)
    offer(job.servers[0].address, more.address, 3, Security())
    for _ in range(3):
        job.step()
    poll(lambda: len(job.workers[0].info.links()) == 2)
    job.step()
    job.goes_on_with([job.servers[0], more])
    assert all(server.status().shard_bytes == 4 * ITEMS for server in (job.servers[0], more))
    job.servers[0].stop(0)
    job.step()
    job.goes_on_with([more])


def test_a_pserver_joins_only_where_it_can(cluster: Cluster) -> None:
    idle, other = cluster.pserver(3), cluster.pserver(2)
    with pytest.raises(ConnectError, match="no job is under way there"):
        offer(idle.address, "127.0.0.1:1", 3, Security(), 0)
    with pytest.raises(ConfigError, match=r"--workers 2.*with 3; start both"):
        offer(idle.address, "127.0.0.1:1", 2, Security(), 0)
    with pytest.raises(PserverLostError, match=r"127\.0\.0\.1:1 \(--join\): pserver"):
        offer("127.0.0.1:1", other.address, 2, Security(), 0)
    jobs.job(cluster, 2, bucket(8))
    address = jobs.job(cluster, 1, bucket(8))[0].info.links()[0].pserver
    with pytest.raises(UnsupportedError, match="that updates on workers in mode='sync', or has snapshot_steps"):
        offer(address, "127.0.0.1:1", 1, Security(), 0)


def test_a_worker_and_a_pserver_are_lost_together(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with their host; the others meet, and do not wait for it any more."""
    job = Job(cluster)
    job.step()
    unawaited(monkeypatch).add(2)
    meet, wakes = Reconfiguration._meet, threading.Event()

    def sleeps(self: Reconfiguration, *arguments: Argument) -> pb.Decision:
        if self._core.rank == 2:
            wakes.wait(jobs.DEADLINE_S)
        return meet(self, *arguments)

    monkeypatch.setattr(Reconfiguration, "_meet", sleeps)
    pushed = job.begin(GRADIENT, 2)
    job.servers[2].stop(0)
    for pending, _ in pushed:
        np.testing.assert_array_equal(summed(pending.wait()), pushed[0][1] + pushed[1][1])
        assert sorted(pending.replies[0].ranks) == [0, 1]
    late = job.workers.pop()
    for number in (TOTAL, WORDS):
        for pending in [push(worker, number, None) for worker in job.workers]:
            pending.wait()
    job.step()
    job.goes_on_with(job.servers[:2])
    assert {worker.view.ranks for worker in job.workers} == {(0, 1)}
    monkeypatch.undo()
    failed = Failed(late)
    wakes.set()
    assert isinstance(failed.wait(), WorkerLostError)
    assert "went on without this one" in str(failed.wait())


def shown(server: ParameterServer) -> str:
    """What `tfps_pserver --status` shows."""
    watcher = Watcher(server.address)
    with contextlib.closing(watcher):
        look = watcher.look(0.01)
    assert look is not None
    console = Console(width=300)
    with console.capture() as captured:
        console.print(table(look))
    return captured.get()


def test_a_pserver_shows_for_whom_workers_wait_that_have_lost_another_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, comes, writes = Job(cluster, pservers=2), threading.Event(), threading.Event()
    meet, resume_lines = Reconfiguration._meet, Worker.resume_lines
    unawaited(monkeypatch)

    def meets(self: Reconfiguration, *arguments: Argument) -> pb.Decision:
        assert self._core.rank != 2 or comes.wait(jobs.DEADLINE_S)
        return meet(self, *arguments)

    def resumes(worker: Worker, lines: Sequence[str]) -> None:
        assert worker.rank != 2 or writes.wait(jobs.DEADLINE_S)
        resume_lines(worker, lines)

    monkeypatch.setattr(Reconfiguration, "_meet", meets)
    monkeypatch.setattr(Worker, "resume_lines", resumes)
    left, lost = job.servers
    lost.stop(0)
    poll(lambda: re.search(r"\nrendezvous: .*; rank 0, 1 here, waits for rank 2 *\n", shown(left)) is not None)
    comes.set()
    poll(lambda: "\nrestoring: waits for rank 2 (" in shown(left))
    writes.set()
    job.step()
    assert "job running: 3 of 3 workers" in shown(left)


def test_workers_that_cannot_go_on_at_an_idle_pserver_do_not_make_it_one_of_their_job(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone reaches it, as it was started again; rank 1 may have gone on elsewhere. However often it asks."""
    monkeypatch.setattr(rendezvous, "_GRACE_S", 0.5)
    server = cluster.pserver(2)
    for _ in range(2):
        report = pb.Report(ranks=[0, 1], reason="pserver 10.0.0.1:7070 was stopped")
        with pytest.raises(WorkerLostError, match="ranks 1 may go on elsewhere, with a pserver that does not answer"):
            meet(["127.0.0.1:1", server.address], Security(), "uid", "incarnation", 0, 2, report)


def test_without_any_pserver_the_job_ends_by_name(cluster: Cluster) -> None:
    job = Job(cluster, pservers=1, config=dataclasses.replace(CONFIG, rejoin_timeout_s=0.5))
    failed = [Failed(worker) for worker in job.workers]
    pushed = job.begin(GRADIENT, 2)
    job.servers[0].stop(0)
    for each in failed:
        assert "could not go on with other pservers within 0.5 s (rejoin_timeout_s): no pserver of" in str(each.wait())
    assert isinstance(pushed[0][0].error(), PserverLostError)
    with pytest.raises(PserverLostError, match="rejoin_timeout_s"):
        job.workers[0].declare(SPECS)


def test_who_closes_while_workers_meet_ends_at_once(cluster: Cluster) -> None:
    job = Job(cluster, pservers=1)
    pending, *_ = job.begin(GRADIENT, 2)
    job.servers[0].stop(0)
    poll(lambda: job.workers[0].core.phase is Phase.RENDEZVOUS)
    for worker in job.workers:
        worker.close()
    assert isinstance(pending[0].error(), (ClosedError, PserverLostError))
