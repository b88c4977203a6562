"""Workers that join a job under way: who may, and what they find there. Through `fit`: tests/elastic/test_joined.py."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jobs
import numpy as np
import pytest
from jobs import Cluster, Failed, Pending, attempt, bucket, declare, poll, push, summed, together

from tfps.config import Config
from tfps.errors import ConnectError, JoinError, MismatchError, WaitTimeoutError, WorkerLostError
from tfps.exchange.interface import BucketSpec
from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.protos import tfps_pb2 as pb
from tfps.pserver import elastic
from tfps.wire.send_queue import SILENT_S
from tfps.worker.worker import Worker

GOES_ON = dataclasses.replace(jobs.CONFIG, min_workers=1)
GRADIENT = bucket(3000, name="gradient")
TOTAL = dataclasses.replace(bucket(8, name="total"), occasional=True)
WORDS = BucketSpec(("words",), "gather", 0, "uint8", 0)
ONES = np.ones(750, np.float32)


class Job:
    """Three workers, of whom the last one is lost after two steps."""

    def __init__(self, cluster: Cluster, pservers: int = 2, config: Config = GOES_ON) -> None:
        self.config = config
        self.cluster, self.addresses = cluster, cluster.pservers(pservers, 3)
        made = cluster.workers(self.addresses, 3, config=config)
        together(*(functools.partial(worker.declare, [], ["a line for joining workers"]) for worker in made))
        declare(made, GRADIENT, TOTAL)
        declare(made, WORDS)
        self.workers, lost = made[:2], made[2]
        for _ in range(2):
            for pending in [push(worker, 0, ONES) for worker in made]:
                assert summed(pending.wait()).tolist() == [3.0] * 750
        lost.close("SIGTERM")
        self.exchange(self.workers)

    def exchange(self, workers: Sequence[Worker]) -> None:
        """One step of all; every result must be of exactly these."""
        steps = [[push(worker, 0, ONES), push(worker, 1, ONES[:2]), push(worker, 2, b"x")] for worker in workers]
        for gradient, total, words in steps:
            assert summed(gradient.wait()).tolist() == [len(workers)] * 750
            assert summed(total.wait()).tolist() == [len(workers)] * 2
            assert words.wait().parts == {worker.rank: b"x" for worker in workers}

    def joiner(self, rank: int | None = None) -> Worker:
        return self.cluster.worker(self.addresses, rank, config=self.config)

    def admit(self, *joiners: Worker) -> list[list[int]]:
        """What all of them return."""
        first = self.workers[0]
        joining = [functools.partial(each.joining.take_part, 1) for each in joiners]

        def admit(worker: Worker) -> Sequence[int] | None:
            poll(lambda: first.joining.joiners(1) == sorted(each.rank for each in joiners))
            return worker.joining.admit(sorted(each.rank for each in joiners))

        found = together(*joining, *(functools.partial(admit, worker) for worker in self.workers))
        return [list(ranks or ()) for ranks in found]


@pytest.fixture
def under_way(cluster: Cluster) -> Job:
    return Job(cluster)


@pytest.mark.parametrize("rank", [2, None])
def test_a_joining_worker_gets_a_free_number_and_takes_part_when_all_let_it(under_way: Job, rank: int | None) -> None:
    joiner = under_way.joiner(rank)
    assert (joiner.rank, joiner.joining.pending) == (2, True)
    assert joiner.joining.lines() == ["a line for joining workers"]
    assert joiner.declare([WORDS]) == [2]  # in another order than the others
    assert joiner.declare([GRADIENT, TOTAL]) == [0, 1]
    under_way.exchange(under_way.workers)  # who do not wait for it
    assert under_way.admit(joiner) == [[0, 1]] * 3
    assert not joiner.joining.pending
    for worker in (*under_way.workers, joiner):
        assert worker.view.ranks == (0, 1, 2)
    for _ in range(2):
        under_way.exchange([*under_way.workers, joiner])
    assert declare([*under_way.workers, joiner], bucket(4, name="later")) == [3]


def test_a_capture_says_who_joins_meanwhile(under_way: Job) -> None:
    first = under_way.workers[0]
    first.captures.start()
    joiner = under_way.joiner()
    joiner.declare([GRADIENT, TOTAL, WORDS])
    under_way.admit(joiner)
    under_way.exchange([*under_way.workers, joiner])
    capture = first.captures.stop([], "run", (), {})
    before, now = capture.views
    assert (before.ranks, before.reason) == ((0, 1), "")
    assert (now.ranks, now.reason, now.note) == ((0, 1, 2), "rank 2 takes part from now on", "")
    assert now.generation == before.generation + 1 == first.view.generation
    ((span, _),) = capture.changes
    assert span.rank == 2
    assert [process.number for process in capture.workers] == [0, 1, 2]


def test_until_then_what_it_exchanges_comes_back_unchanged(under_way: Job) -> None:
    joiner = under_way.joiner()
    assert joiner.declare([TOTAL, WORDS][:1]) == [1]
    total = push(joiner, 1, ONES[:2]).wait()
    assert (summed(total).tolist(), list(total.ranks)) == ([1.0, 1.0], [2])
    with pytest.raises(JoinError, match=r"rank 2: a worker can join a job under way in model.fit only"):
        push(joiner, 0, ONES).wait()
    with joiner.joining.trying_out():
        assert summed(push(joiner, 0, ONES).wait()).tolist() == [1.0] * 750


def test_a_joining_worker_does_not_mind_how_buckets_are_cut_that_it_does_not_know_yet(under_way: Job) -> None:
    joiner, late = under_way.joiner(), bucket(6000, name="declared later")
    (number,) = {ids[0] for ids in together(*(functools.partial(each.declare, [late]) for each in under_way.workers))}
    for _ in range(2):
        for pending in [push(worker, number, np.ones(1500, np.float32)) for worker in under_way.workers]:
            pending.wait()
    under_way.workers[0].tune(512, 4096)
    poll(lambda: joiner.info.slice_bytes == 512)
    assert under_way.admit(joiner) == [[0, 1]] * 3
    for _ in range(3):  # it is cut so from the step after next on
        for pending in [push(worker, number, np.ones(1500, np.float32)) for worker in (*under_way.workers, joiner)]:
            assert summed(pending.wait()).tolist() == [3.0] * 1500
    assert len(joiner._buckets[number].cutting.slices) == 12


@pytest.mark.parametrize("wrong", ["does nothing", "declares something else", "leaves because it differs"])
def test_a_joining_worker_on_trial_that_does_nothing_or_differs_ends_alone(cluster: Cluster, wrong: str) -> None:
    """Who has been let in, and has not taken a step yet, cannot hold or end the others."""
    job = Job(cluster, config=dataclasses.replace(GOES_ON, step_timeout_s=20))  # 2 of which it may hold them
    joiner = job.joiner()
    joiner.declare([GRADIENT, TOTAL, WORDS])
    assert job.admit(joiner) == [[0, 1]] * 3
    if wrong == "declares something else":
        others = [functools.partial(worker.declare, [bucket(4, name="theirs")]) for worker in job.workers]
        assert attempt(*others, lambda: joiner.declare([bucket(8, name="own")]))[:2] == [[3], [3]]
        for pending in [push(worker, 3, ONES[:1]) for worker in job.workers]:
            assert summed(pending.wait()).tolist() == [2.0]
    elif wrong == "leaves because it differs":
        joiner.fail(MismatchError("it differs"))
    steps = [[push(worker, 0, ONES), push(worker, 2, b"x")] for worker in job.workers]
    for gradient, words in steps:
        assert summed(gradient.wait()).tolist() == [2.0] * 750
        assert words.wait().parts == {worker.rank: b"x" for worker in job.workers}
    poll(lambda: joiner.failure is not None)
    assert isinstance(joiner.failure, MismatchError if wrong.startswith("leaves") else JoinError), joiner.failure
    assert job.workers[0].view.ranks == (0, 1)


def test_a_joining_worker_whom_nobody_can_let_in_any_more_ends(under_way: Job) -> None:
    failed = Failed(under_way.joiner())
    for worker in under_way.workers:
        worker.close()
    failed.wait(WorkerLostError, ", the last of the job, has left")


def test_two_joining_workers_at_once_and_one_that_dies_before(cluster: Cluster) -> None:
    job = Job(cluster, pservers=1)
    job.workers[1].close("SIGTERM")
    job.workers.pop()
    dies, first, second = job.joiner(1), None, None
    dies.declare([GRADIENT, TOTAL])
    dies.close()
    poll(lambda: job.workers[0].joining.joiners(1) == [])
    first, second = job.joiner(), job.joiner()
    assert sorted([first.rank, second.rank]) == [1, 2]
    assert job.admit(first, second) == [[0]] * 3
    job.exchange([job.workers[0], *sorted((first, second), key=lambda each: each.rank)])


def test_a_joining_worker_that_is_gone_when_the_others_let_it_does_not_take_part(under_way: Job) -> None:
    joiner = under_way.joiner()
    joiner.close()
    assert together(*(functools.partial(worker.joining.admit, [2]) for worker in under_way.workers)) == [None, None]
    under_way.exchange(under_way.workers)


def test_a_worker_that_joins_a_training_that_is_over_learns_it(under_way: Job) -> None:
    joiner = under_way.joiner()
    assert under_way.workers[0].joining.joiners(2) == []  # the others are in their second
    assert joiner.joining.take_part(1) is None
    assert joiner.joining.pending


def test_a_joining_worker_waits_for_a_while_only(cluster: Cluster) -> None:
    config = dataclasses.replace(GOES_ON, rejoin_timeout_s=0.1)
    job = Job(cluster, config=config)
    joiner = cluster.worker(job.addresses, config=config)
    with pytest.raises(
        WaitTimeoutError, match=r"rank 2: the other workers have come to no .* within 0.1 s; TFPS_REJOIN"
    ):
        joiner.joining.take_part(1)


def test_another_program_is_refused_and_the_others_go_on(under_way: Job) -> None:
    joiner = under_way.joiner()
    with pytest.raises(
        JoinError, match=r"rank 2 joins a job under way, and declares what that has not declared"
    ) as refused:
        joiner.declare([bucket(12, name="another model")])
    joiner.fail(refused.value)
    joiner.close()
    status = under_way.workers[0]._pservers[0].call("Status", pb.StatusRequest(details=True), jobs.DEADLINE_S)
    assert f"which has not taken part yet, has left: {refused.value}" in status.changes[-1]
    assert ("Join", "JoinError", 1) in [(each.where, each.error, each.count) for each in status.errors]
    under_way.exchange(under_way.workers)


def test_a_full_job_takes_nobody(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "_NOTICED_S", 0.5 - SILENT_S)  # else a joining worker waits until nobody can be silent
    made = cluster.workers(cluster.pservers(1, 2), 2, config=GOES_ON)
    address = [made[0]._pservers[0].address]
    for rank, why in ((None, "all 2 ranks of the job are taken"), (1, "two workers have rank 1")):
        (error,) = attempt(functools.partial(cluster.worker, address, rank, config=GOES_ON))
        assert isinstance(error, ConnectError)
        assert why in str(error)


def test_what_cannot_be_joined_is_named(cluster: Cluster) -> None:
    config = dataclasses.replace(GOES_ON, mode="diloco")
    addresses = cluster.pservers(1, 2)
    made = cluster.workers(addresses, 2, config=config)
    made[1].close("SIGTERM")
    (error,) = attempt(functools.partial(cluster.worker, addresses, config=config))
    assert isinstance(error, JoinError)
    assert "with mode='sync' only" in str(error)


SGD = UpdateSpec("sgd", (("momentum", 0.5), ("nesterov", 0.0)), (("momentum", 0.0),), (750,), (False,))
PARAMETERS = dataclasses.replace(bucket(3000, name="parameters"), update=SGD)


def updated(workers: Sequence[Worker], step: int, mark: int = 0) -> list[Pending]:
    """A step of the parameters, with gradients of ones."""
    replies = [Pending() for _ in workers]
    for worker, reply in zip(workers, replies, strict=True):
        wrote = mark > 0 and worker.rank == worker.view.ranks[0]
        worker.push(3, ONES, reply, step_scalars=StepScalars(mark, (float(step), 0.25), wrote).pack())
    return replies


@pytest.fixture
def updating(cluster: Cluster) -> Job:
    """A job whose pservers have parameters, after one step of the two workers that are left."""
    job = Job(cluster, config=dataclasses.replace(GOES_ON, update="server"))
    declare(job.workers, PARAMETERS)
    job.workers[0].state.write(3, 0, 0, np.zeros(750, np.float32))
    for reply in updated(job.workers, 0, mark=1):
        assert summed(reply.wait()).tolist() == [-0.5] * 750
    return job


def test_pservers_keep_parameters_and_slots_while_a_worker_joins(updating: Job) -> None:
    joiner = updating.joiner()
    assert joiner.declare([PARAMETERS]) == [3]
    with joiner.joining.trying_out():
        (alone,) = updated([joiner], 0)
    assert summed(alone.wait()).tolist() == [1.0] * 750  # what it has pushed
    updating.admit(joiner)
    for reply in updated([*updating.workers, joiner], 1):
        assert summed(reply.wait()).tolist() == [-0.5 - 0.25 - 0.75] * 750


def has_come(asking: Worker, worker: Worker) -> bool:
    """Whether others wait for other ranks than `worker` on all pservers, each of which has a part of the parameters."""
    request = pb.WaitingRequest(**asking.client.me, bucket=3)
    replies = [each.call("Waiting", request, jobs.DEADLINE_S) for each in asking.client.pservers]
    me = f"rank {worker.rank} "
    return all(each.missing and not any(rank.startswith(me) for rank in each.missing) for each in replies)


@pytest.mark.parametrize("first", ["the joining worker", "another one"])
def test_a_joining_worker_with_other_step_scalars_ends_alone(updating: Job, first: str) -> None:
    joiner = updating.joiner()
    joiner.declare([PARAMETERS])
    updating.admit(joiner)
    together = [*updating.workers, joiner]
    if first == "the joining worker":
        together.reverse()
    replies: list[Pending] = []
    for worker in together:
        rate = 0.5 if worker is joiner else 0.25
        replies.append(Pending())
        worker.push(3, ONES, replies[-1], step_scalars=StepScalars(0, (1.0, rate), wrote=False).pack())
        if worker is together[0]:
            poll(functools.partial(has_come, updating.workers[0], worker))
    found = [summed(r.wait()).tolist() for worker, r in zip(together, replies, strict=True) if worker is not joiner]
    assert found[0] == found[1]
    # Its gradient counts, as that of any lost worker, where it has come.
    assert set(found[0]) <= ({-1.5} if first == "the joining worker" else {-1.25, -1.5})
    poll(lambda: joiner.failure is not None)
    assert isinstance(joiner.failure, JoinError), joiner.failure
    assert updating.workers[0].view.ranks == (0, 1)


def test_who_joins_as_the_first_writes_what_all_have_assigned(updating: Job) -> None:
    updating.workers[0].close("SIGTERM")
    (left,) = updating.workers = updating.workers[1:]
    poll(lambda: left.view.ranks == (1,))
    updated([left], 1)[0].wait()
    joiner = updating.joiner(0)
    assert joiner.declare([PARAMETERS]) == [3]
    updating.admit(joiner)
    (waits,) = updated([left], 2, mark=1)
    joiner.close("SIGTERM")  # before it has written anything
    waits.error(WorkerLostError, "a worker was lost before it had written what all ranks have assigned")
