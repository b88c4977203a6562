"""Workers that take the places of lost ones: who takes part is the same for all, whatever happens meanwhile."""

from __future__ import annotations

import dataclasses
import functools
import threading
import uuid

import jobs
import numpy as np
import pytest
from jobs import Cluster, Failed, RawWorker, bucket, poll, push, summed, together

from tfps.config import Config
from tfps.errors import WorkerLostError
from tfps.protos import tfps_pb2 as pb
from tfps.types import Argument
from tfps.wire.control import bucket_message
from tfps.worker.worker import Worker

GOES_ON = dataclasses.replace(jobs.CONFIG, min_workers=1)
SPECS, GRADIENT = [bucket(2048, name="a gradient of two slices")], 0
ONES = np.ones(512, np.float32)


class Job:
    """Three workers on two pservers, of which all but the first are lost and come back as joiners."""

    def __init__(self, cluster: Cluster, lost: list[int], config: Config = GOES_ON) -> None:
        self.cluster, self.config = cluster, config
        self.servers = [cluster.pserver(3) for _ in range(2)]
        self.addresses = [server.address for server in self.servers]
        self.workers = dict(enumerate(cluster.workers(self.addresses, 3, config=config)))
        jobs.declare(list(self.workers.values()), *SPECS)
        for rank in lost:
            self.workers.pop(rank).close("SIGTERM")
            for each in self.workers.values():
                poll(functools.partial(lambda worker, lost: lost not in worker.view.ranks, each, rank))
        self.joiners = {rank: self.joiner(rank) for rank in lost}

    def joiner(self, rank: int) -> Worker:
        worker = self.cluster.worker(self.addresses, rank, config=self.config)
        assert worker.joining.pending
        worker.declare(SPECS)
        return worker

    def admit(self, ranks: list[int]) -> None:
        """The others let them take part, as they do at the beginning of an epoch."""
        admitting = [functools.partial(each.joining.admit, ranks) for each in self.workers.values()]
        joining = [functools.partial(self.joiners[rank].joining.take_part, 1) for rank in ranks]
        together(*admitting, *joining)


def test_who_joins_knows_those_who_have_joined_since_it_came(cluster: Cluster) -> None:
    job = Job(cluster, [1, 2])
    job.admit([1])
    job.workers[1] = job.joiners.pop(1)
    for each in [push(worker, GRADIENT, ONES) for worker in job.workers.values()]:
        assert summed(each.wait()).tolist() == [2.0] * 512
    assert not job.workers[1].losses.found, "rank 2 was lost before it came"
    job.admit([2])
    assert job.joiners[2].view.ranks == (0, 1, 2)


def test_who_dies_while_it_is_admitted_takes_no_part(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(cluster, [1])
    admit = type(job.workers[0].client).admit

    def answers_late(self: Argument, *arguments: Argument) -> Argument:
        reply = admit(self, *arguments)
        job.joiners[1].close("SIGTERM")
        poll(lambda: all(list(server.status().present) == [0, 2] for server in job.servers))
        poll(lambda: all(1 not in present for present in worker.presence.present))
        return reply

    worker = job.workers[0]
    monkeypatch.setattr(type(worker.client), "admit", answers_late)
    together(*(functools.partial(each.joining.admit, [1]) for each in job.workers.values()))
    assert [each.view.ranks for each in job.workers.values()] == [(0, 2)] * 2


@pytest.fixture
def replaced(cluster: Cluster) -> tuple[Job, RawWorker]:
    """Rank 2 is a new process; and the one that had its place, which does not know that it has been lost."""
    config = GOES_ON
    job = Job.__new__(Job)
    job.cluster, job.config, job.servers = cluster, config, [cluster.pserver(3)]
    job.addresses = [job.servers[0].address]

    def member(rank: int) -> Worker | RawWorker:
        if rank < 2:
            worker = cluster.worker(job.addresses, rank, config=config)
            worker.declare(SPECS)
            return worker
        uid = uuid.uuid4().hex
        raw = cluster.raw(job.addresses[0], rank, config=config, uid=uid)
        raw.pserver.sign(uid)
        return raw.open().declare().declare(*map(bucket_message, SPECS), number=1)

    first, second, old = together(*(functools.partial(member, rank) for rank in range(3)))
    assert isinstance(first, Worker)
    assert isinstance(second, Worker)
    assert isinstance(old, RawWorker)
    job.workers = {0: first, 1: second}
    assert job.servers[0]._job.elastic.lose(2, "has been silent for 5.0 s")
    job.joiners = {2: job.joiner(2)}
    job.admit([2])
    return job, old


def test_a_lost_worker_that_wakes_does_not_take_its_successor_out(replaced: tuple[Job, RawWorker]) -> None:
    job, old = replaced
    old.leave()
    for name, request in (
        ("Ready", pb.ReadyRequest(training=1)),
        ("Declare", pb.DeclareRequest(number=2)),
        ("Take", pb.TakeRequest(counter="c")),
    ):
        request.incarnation, request.rank = old.incarnation, 2
        with pytest.raises(WorkerLostError, match=r"went on without this one: rank 2 .* has its place"):
            old.pserver.call(name, request, jobs.DEADLINE_S)
    everybody = [*job.workers.values(), job.joiners[2]]
    failed = [Failed(each) for each in everybody]
    for each in [push(worker, GRADIENT, ONES) for worker in everybody]:
        assert summed(each.wait()).tolist() == [3.0] * 512
    assert [each.view.ranks for each in everybody] == [(0, 1, 2)] * 3
    assert not [each.errors for each in failed if each.errors]


@pytest.mark.parametrize("declared", [0, 1])
def test_who_dies_between_the_pservers_as_the_job_begins_is_lost_on_all(cluster: Cluster, declared: int) -> None:
    """All have joined as the first pserver sees it; so many of the others have told the second one when one dies."""
    first, second = (cluster.pserver(3) for _ in range(2))

    def member(rank: int) -> list[RawWorker]:
        raws = [cluster.raw(first.address, rank, config=GOES_ON, pservers=2)]
        more = {"pservers": 2, "pserver_index": 1, "incarnation": raws[0].incarnation}
        raws.append(cluster.raw(second.address, rank, config=GOES_ON, **more))
        return [each.open() for each in raws]

    members = [member(rank) for rank in range(3)]
    together(*(each[0].declare for each in members))
    begin = [functools.partial(each[1].declare, timeout_s=10.0) for each in members[:2]]
    waiting = [threading.Thread(target=call) for call in begin[:declared]]
    for each in waiting:
        each.start()
    poll(lambda: len(second._job.declarations.all) == bool(declared))
    for raw in members[2]:
        raw.data.close() if raw.over_tcp else raw.pulling.cancel()
    poll(lambda: all(len(each.status().members) == 2 for each in (first, second)))
    together(*begin[declared:])
    for each in waiting:
        each.join()
    assert [list(each.status().present) for each in (first, second)] == [[0, 1]] * 2


def test_who_comes_before_its_silent_predecessor_is_lost_waits_for_its_place(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfps.pserver.elastic.SILENT_S", 2.5)  # else the test takes longer
    server = cluster.pserver(2)

    def member(rank: int) -> Worker | RawWorker:
        if rank == 0:
            return cluster.worker([server.address], rank, config=GOES_ON)
        return cluster.raw(server.address, rank, config=GOES_ON).open().declare()  # it sends no heartbeats

    together(functools.partial(member, 0), functools.partial(member, 1))
    assert cluster.worker([server.address], 1, config=GOES_ON).joining.pending
    assert "has been silent for" in server.status().changes[0]
