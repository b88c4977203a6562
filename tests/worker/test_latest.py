"""Jobs of mode "async" outlive pservers: workers write the latest parameters, and snapshots of slots."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jobs
import moving
import numpy as np
import pytest
from jobs import Cluster, Pending, poll, summed, together
from moving import ITEMS, refused

from tfps.config import Config, Security
from tfps.errors import WorkerLostError
from tfps.exchange.interface import BucketSpec
from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.pserver.rendezvous import offer
from tfps.recovery.exchange import ElasticExchange
from tfps.types import Array
from tfps.worker.client import PserverClient

RATE, MOMENTUM = np.float32(0.25), np.float32(0.5)
PLAIN = UpdateSpec("sgd", (("momentum", 0.0), ("nesterov", 0.0)), (), (ITEMS,), (False,))
SGD = UpdateSpec("sgd", (("momentum", 0.5), ("nesterov", 0.0)), (("momentum", 0.0),), (ITEMS,), (False,))
MODEL = 3  # the number of the bucket that pservers update
WORKERS = 3


def config(every: int, staleness: int | None) -> Config:
    return dataclasses.replace(
        moving.CONFIG, deterministic=False, mode="async", update="server", staleness=staleness, snapshot_steps=every
    )


class Training(moving.Job):
    """Workers that train a model, and what it should be: one pushes after the other, so that their order is known."""

    def __init__(
        self, cluster: Cluster, every: int = 1, staleness: int | None = None, update: UpdateSpec = SGD
    ) -> None:
        super().__init__(cluster, pservers=2, config=config(every, staleness))
        self.declare([BucketSpec(("a",), "sum", 4 * ITEMS, "float32", 0, update=update)])
        self.every, self.has_slots = every, update is SGD
        self.parameters: Array = self.random.normal(size=ITEMS).astype(np.float32)
        self.slots: Array = np.zeros(ITEMS, np.float32)
        self.seen = [self.parameters] * WORKERS  # by rank: the parameters that it got last
        self.snapshots = [self.slots] * WORKERS  # and the slots of its snapshot
        self.pushes = [0] * WORKERS  # since all have assigned values

    def push(self, worker: ElasticExchange, gradient: Array, mark: int = 0) -> Pending:
        """As `bring` in runtime/remote.py."""
        if wrote := mark > 0 and worker.rank == worker.view.ranks[0]:
            worker.state.write(MODEL, 0, 0, self.parameters)
        reply = Pending()
        worker.push(MODEL, gradient, reply, step_scalars=StepScalars(mark, (0.0, float(RATE)), wrote).pack())
        return reply

    def gradient(self) -> Array:
        return self.random.normal(size=ITEMS).astype(np.float32)

    def _update(self, gradient: Array) -> None:
        if self.has_slots:
            self.slots = self.slots * MOMENTUM - gradient * RATE
            self.parameters = self.parameters + self.slots
        else:
            self.parameters = self.parameters - gradient * RATE

    def assign(self) -> list[tuple[Pending, Array]]:
        """All programs assign new parameters; what they push then."""
        self.parameters = self.parameters + np.float32(1)
        return [(self.push(worker, each, mark=7), each) for worker in self.workers for each in [self.gradient()]]

    def end_assigning(self, pushed: Sequence[tuple[Pending, Array]]) -> None:
        """All get what their pushes, applied in rank order, come to."""
        for _, gradient in pushed:
            self._update(gradient)
        for rank, (pending, _) in enumerate(pushed):
            np.testing.assert_array_equal(summed(pending.wait()), self.parameters)
            self.seen[rank], self.pushes[rank] = self.parameters, 0

    def train(self, *ranks: int) -> None:
        """These make a step, one after the other."""
        for rank in ranks:
            if self.pushes[rank] == 0 or self.every == 1:
                self.snapshots[rank] = self.slots
            gradient = self.gradient()
            self._update(gradient)
            (worker,) = (each for each in self.workers if each.rank == rank)
            np.testing.assert_array_equal(summed(self.push(worker, gradient).wait()), self.parameters)
            self.seen[rank], self.pushes[rank] = self.parameters, self.pushes[rank] + 1

    def parts(self, of: Sequence[Array]) -> Array:
        """An array of which each worker that is left has a part."""
        ranks = [worker.rank for worker in self.workers]
        ends = [ITEMS * place // len(ranks) for place in range(len(ranks) + 1)]
        return np.concatenate([of[rank][ends[place] : ends[place + 1]] for place, rank in enumerate(ranks)])

    def lose_state(self, *numbers: int) -> None:
        """Pservers end; what is left is of each rank's last reply and snapshot."""
        self.lose(*numbers)
        self.parameters, self.slots = self.parts(self.seen), self.parts(self.snapshots)

    def leave(self, place: int) -> None:
        super().leave(place)
        self.pushes = [0] * WORKERS  # they take new snapshots before their next ones

    def check(self) -> None:  # type: ignore[override]
        for worker in self.workers:
            for array, expected in enumerate([self.parameters, self.slots][: 1 + self.has_slots]):
                found = worker.state.read(MODEL, array, 0, 4 * ITEMS).view(np.float32)
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("every", "update"), [(1, SGD), (100, SGD), (1, PLAIN)], ids=str)
def test_training_goes_on_with_the_latest_that_each_worker_has(
    cluster: Cluster, every: int, update: UpdateSpec
) -> None:
    job = Training(cluster, every, update=update)
    job.end_assigning(job.assign())
    job.train(0, 1, 2, 2, 0, 1, 0)
    job.lose_state(0)
    job.check()
    job.train(1, 2, 0, 0)
    job.servers[0] = cluster.pserver(WORKERS)
    job.lose_to(1, 0)
    job.parameters, job.slots = (worker_state(job, array) for array in (0, min(1, int(job.has_slots))))
    job.train(2, 1, 0)
    job.check()


def worker_state(job: Training, array: int) -> Array:
    return job.workers[0].state.read(MODEL, array, 0, 4 * ITEMS).view(np.float32)


def test_who_is_left_keeps_all_after_its_next_step(cluster: Cluster) -> None:
    job = Training(cluster, every=100)
    job.end_assigning(job.assign())
    job.train(0, 1, 2)
    job.leave(1)
    job.train(2, 0, 2)
    job.lose_state(0)
    job.check()
    job.train(0, 2)
    job.check()


def test_before_the_first_values_nothing_is_lost(cluster: Cluster) -> None:
    job = Training(cluster)
    job.lose(0)
    job.end_assigning(job.assign())
    job.train(0, 1, 2)
    job.check()


def test_values_that_only_some_have_assigned_are_assigned_once(cluster: Cluster) -> None:
    job = Training(cluster, every=100)
    job.end_assigning(job.assign())
    job.train(0, 1, 2)
    workers, job.workers = job.workers, job.workers[:1]
    some = job.assign()
    job.workers = workers
    job.lose(1)
    some += [(job.push(worker, each, mark=7), each) for worker in workers[1:] for each in [job.gradient()]]
    job.slots = job.parts(job.snapshots)
    job.end_assigning(some)
    job.train(2, 1, 0)
    job.check()


def test_a_gradient_in_flight_counts_at_most_once(cluster: Cluster) -> None:
    """It has been applied, and others have seen it; its worker has no answer, as it is too far ahead."""
    job = Training(cluster, staleness=0, update=PLAIN)
    job.end_assigning(job.assign())
    gradient = job.gradient()
    ahead = job.push(job.workers[0], gradient)
    poll(lambda: worker_state(job, 0).tobytes() != job.parameters.tobytes())
    assert not ahead.replied
    job.lose_state(0)
    # Of a new job nobody is ahead: it only reads.
    np.testing.assert_array_equal(summed(ahead.wait()), job.parameters)


def test_values_of_a_worker_that_is_lost_before_it_has_written_them_end_the_job_by_name(cluster: Cluster) -> None:
    job = Training(cluster)
    job.end_assigning(job.assign())
    pushed = [job.push(worker, job.gradient(), mark=7) for worker in job.workers[1:]]  # rank 0 is to write
    job.workers[0].close("SIGTERM")
    for pending in pushed:
        assert "before it had written what all ranks have assigned" in str(pending.error())


def test_a_pserver_lost_with_values_that_some_only_have_ends_the_job_by_name(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Training(cluster)
    job.end_assigning(job.assign())
    job.train(0, 1, 2)
    deafen = moving.deafening(monkeypatch)
    deafen(job.workers[2])
    pushed = job.assign()
    for pending, _ in pushed[:2]:
        pending.wait()
    job.lose(0)
    for worker in job.workers:
        error = refused(functools.partial(job.push, worker, np.zeros(ITEMS, np.float32)))
        assert isinstance(error, WorkerLostError)
        assert "nobody has all that a lost pserver kept of 'a'" in str(error)


def test_a_pserver_lost_while_ranks_read_at_a_barrier_leaves_all_with_the_same(cluster: Cluster) -> None:
    job = Training(cluster)
    job.end_assigning(job.assign())
    job.train(0, 1, 2, 2, 1, 0, 2, 1, 2)
    for worker in job.workers:
        worker.peers.quiesce()
    for pending, _ in job.begin(moving.TOTAL):
        pending.wait()
    read = [summed(jobs.push(job.workers[0], MODEL, None).wait()).copy()]
    job.lose(0)
    read += [summed(jobs.push(worker, MODEL, None).wait()) for worker in job.workers[1:]]
    for values in read:
        np.testing.assert_array_equal(values, job.parameters)


@pytest.mark.parametrize("case", ["first steps", "after new values"])
def test_a_pserver_joins_once_all_ranks_have_what_is_kept(cluster: Cluster, case: str) -> None:
    job = Training(cluster)
    job.end_assigning(job.assign())
    job.train(0)
    if case == "after new values":
        job.train(1, 2, 0, 1, 2)
        job.end_assigning(job.assign())
        job.train(0)
    job.servers.append(cluster.pserver(WORKERS))
    offer(job.servers[0].address, job.servers[-1].address, WORKERS, Security())
    elastic = job.servers[0]._job.elastic
    poll(lambda: (asked := elastic.admission) is not None and 0 in asked.called)  # it has what it needs
    assert all(len(worker.info.links()) == 2 for worker in job.workers)

    def joined() -> bool:
        # Whether a gradient is in flight then, which only reads, is chance: values are not compared.
        for worker in job.workers:
            job.push(worker, job.gradient()).wait()
        return all(len(worker.info.links()) == 3 for worker in job.workers)

    poll(joined)


def test_values_that_were_assigned_without_a_lost_worker_are_those_of_before(cluster: Cluster) -> None:
    job = Training(cluster)
    job.end_assigning(job.assign())
    job.train(0, 1, 2)
    lost = job.workers.pop()
    waiting = job.assign()
    lost.close("SIGTERM")
    job.end_assigning(waiting)
    again = [job.push(worker, job.gradient(), mark=9) for worker in job.workers]  # other values than before
    for pending in again:
        pending.wait()


def test_a_counter_gives_each_number_once(cluster: Cluster) -> None:
    job = Training(cluster)
    drawn = [worker.peers.fetch_add("batches") for worker in job.workers[:2] for _ in range(3)]
    for lost in (0, 1):
        job.lose(lost)
        drawn += together(*(functools.partial(worker.peers.fetch_add, "batches") for worker in job.workers))
        job.servers[lost] = cluster.pserver(WORKERS)
        if not lost:
            offer(job.servers[1].address, job.servers[0].address, WORKERS, Security())
            poll(lambda: all(len(worker.info.links()) == 2 for worker in job.workers))
    assert sorted(drawn) == list(range(12))


def test_who_waits_for_all_others_holds_nobody_up(cluster: Cluster) -> None:
    job = Training(cluster, staleness=0, update=PLAIN)
    job.end_assigning(job.assign())
    job.workers[2].peers.quiesce()
    job.lose_state(0)
    for _ in range(3):
        pushed = [job.push(worker, job.gradient()) for worker in job.workers[:2]]
        for pending in pushed:
            pending.wait()


def test_who_has_met_all_others_is_waited_for_again(cluster: Cluster) -> None:
    job = Training(cluster, staleness=0, update=PLAIN)
    job.end_assigning(job.assign())
    for worker in job.workers:
        worker.peers.quiesce()
    for pending, _ in job.begin(moving.TOTAL):  # they meet
        pending.wait()
    job.lose_state(0)
    gradient = job.gradient()
    ahead = job.push(job.workers[0], gradient)
    job._update(gradient)
    poll(lambda: worker_state(job, 0).tobytes() == job.parameters.tobytes())
    job.push(job.workers[1], job.gradient())
    poll(lambda: worker_state(job, 0).tobytes() != job.parameters.tobytes())
    assert not ahead.replied
    job.push(job.workers[2], job.gradient())
    ahead.wait()


def test_a_number_drawn_while_a_pserver_is_lost_is_nobody_elses(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pserver has given it, and the worker gets it when all have gone on."""
    job, fetch_add = Training(cluster), PserverClient.fetch_add
    drawn = [worker.peers.fetch_add("batches") for worker in job.workers for _ in range(2)]
    given, goes_on = threading.Event(), threading.Event()

    def slow(client: PserverClient, counter: str) -> int:
        number = fetch_add(client, counter)
        if client.membership.rank == 0 and not given.is_set():
            given.set()
            assert goes_on.wait(jobs.DEADLINE_S)
        return number

    monkeypatch.setattr(PserverClient, "fetch_add", slow)
    with ThreadPoolExecutor() as pool:
        late = pool.submit(job.workers[0].peers.fetch_add, "batches")
        assert given.wait(jobs.DEADLINE_S)
        job.lose(1)
        goes_on.set()
        drawn.append(late.result(jobs.DEADLINE_S))
    drawn += together(*(functools.partial(worker.peers.fetch_add, "batches") for worker in job.workers))
    assert len(set(drawn)) == len(drawn)
