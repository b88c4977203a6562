"""Jobs whose pservers update outlive these: workers keep snapshots, and their pushes since then."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Collection

import moving
import numpy as np
import pytest
from jobs import Cluster, Pending, poll, summed
from moving import ITEMS, refused

from tfps.config import Config
from tfps.errors import WorkerLostError
from tfps.exchange.interface import BucketSpec
from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.recovery import machine
from tfps.recovery.exchange import ElasticExchange
from tfps.recovery.machine import Phase
from tfps.recovery.reconfiguration import Reconfiguration
from tfps.types import Array

RATE, MOMENTUM = np.float32(0.25), np.float32(0.5)
SGD = UpdateSpec("sgd", (("momentum", 0.5), ("nesterov", 0.0)), (("momentum", 0.0),), (ITEMS,), (False,))
MODEL = [3, 4]  # the numbers of two buckets that pservers update
SPECS = [BucketSpec((name,), "sum", 4 * ITEMS, "float32", 0, update=SGD) for name in "ab"]


def config(every: int) -> Config:
    return dataclasses.replace(moving.CONFIG, update="server", snapshot_steps=every)


class Training(moving.Job):
    """Workers that train a model, and what it should be."""

    def __init__(self, cluster: Cluster, every: int = 3, pservers: int = 2) -> None:
        super().__init__(cluster, pservers=pservers, config=config(every))
        self.declare(SPECS)
        self.parameters: dict[int, Array] = {n: self.random.normal(size=ITEMS).astype(np.float32) for n in MODEL}
        self.slots: dict[int, Array] = {number: np.zeros(ITEMS, np.float32) for number in MODEL}
        self.steps, self.assigned = 0, True

    def assign(self) -> None:
        """All programs assign new parameters."""
        for each in self.parameters.values():
            each += np.float32(1)
        self.assigned = True

    def push(self, worker: ElasticExchange, number: int, gradient: Array) -> Pending:
        """As `bring` in runtime/remote.py."""
        if wrote := self.assigned and worker.rank == worker.view.ranks[0]:
            worker.state.write(number, 0, 0, self.parameters[number])
        reply, mark = Pending(), 7 if self.assigned else 0
        scalars = StepScalars(mark, (float(self.steps), float(RATE)), wrote)
        worker.push(number, gradient, reply, step_scalars=scalars.pack())
        return reply

    def begin_step(self, workers: int = 3) -> list[list[tuple[Pending, Array]]]:
        """A step of the model that the first `workers` have pushed."""
        found = []
        for number in MODEL:
            gradients = [self.random.normal(size=ITEMS).astype(np.float32) for _ in self.workers]
            pushed = zip(self.workers[:workers], gradients, strict=False)
            found.append([(self.push(worker, number, each), each) for worker, each in pushed])
        return found

    def end_step(self, pushed: list[list[tuple[Pending, Array]]]) -> None:
        """All workers get what one process has."""
        for number, each in zip(MODEL, pushed, strict=True):
            total = functools.reduce(np.add, [gradient for _, gradient in each])
            self.slots[number] = self.slots[number] * MOMENTUM - total * RATE
            self.parameters[number] = self.parameters[number] + self.slots[number]
            for pending, _ in each:
                np.testing.assert_array_equal(summed(pending.wait()), self.parameters[number])
        self.steps, self.assigned = self.steps + 1, False

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.end_step(self.begin_step())

    def check_slots(self) -> None:
        for worker in self.workers:
            for number in MODEL:
                slots = worker.state.read(number, 1, 0, 4 * ITEMS).view(np.float32)
                np.testing.assert_array_equal(slots, self.slots[number])

    def kept(self) -> list[int]:
        """How many pushes each worker keeps of the first bucket."""
        found = [worker.core.buckets[MODEL[0]].replay for worker in self.workers]
        return [len(each._log) for each in found if each is not None]


def hold_replay(
    monkeypatch: pytest.MonkeyPatch, ranks: Collection[int], numbers: Collection[int] = MODEL
) -> threading.Event:
    """Until the event is set, these ranks give other pservers nothing of what they have kept of these buckets."""
    may, give = threading.Event(), Reconfiguration._give

    def held(self: Reconfiguration, session: int, number: int) -> None:
        if self._core.rank in ranks and number in numbers and not may.wait(0.01):
            self._core.to_do.put(machine.Give(session, number))  # after what else is to be done
        else:
            give(self, session, number)

    monkeypatch.setattr(Reconfiguration, "_give", held)
    return may


@pytest.mark.parametrize(("every", "steps"), [(1, 2), (3, 0), (3, 1), (3, 5)])
def test_training_goes_on_where_it_was(cluster: Cluster, every: int, steps: int) -> None:
    job = Training(cluster, every)
    job.train(steps)
    job.lose(0)
    if steps:
        job.check_slots()
    job.train(2)
    job.servers[0] = cluster.pserver(3)
    job.lose_to(1, 0)
    job.train(2 * every + 1)
    job.check_slots()


@pytest.mark.parametrize("pushed", [1, 2])
def test_a_step_in_flight_is_done_once(cluster: Cluster, pushed: int) -> None:
    job = Training(cluster)
    job.train(4)
    step = job.begin_step(pushed)
    job.lose(1)
    for number, each in zip(MODEL, step, strict=True):
        for worker in job.workers[pushed:]:
            gradient = job.random.normal(size=ITEMS).astype(np.float32)
            each.append((job.push(worker, number, gradient), gradient))
    job.end_step(step)
    job.train(1)
    job.check_slots()


def test_a_push_that_comes_meanwhile_waits_for_those_before_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Training(cluster, every=1)
    job.train(1)
    slow, may = job.workers[1], hold_replay(monkeypatch, {1})
    job.lose(0)
    others = [worker.core.buckets[number].replay for worker in job.workers if worker is not slow for number in MODEL]
    poll(lambda: all(kept is not None and kept.given for kept in others))  # the last step, again
    step = job.begin_step()
    may.set()
    job.end_step(step)
    job.check_slots()


def test_pushes_that_are_ahead_when_the_last_bucket_has_caught_up_are_given(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank has not pushed yet: the others have two pushes each under way, of a bucket that caught up before."""
    job = Training(cluster, every=50)
    job.train(2)
    (first, last), nothing = MODEL, np.zeros(ITEMS, np.float32)
    may = hold_replay(monkeypatch, range(3), {last})
    job.lose(0)
    poll(lambda: not any(worker.core.buckets[first].needs_replay for worker in job.workers))
    pushed = [job.push(worker, first, nothing) for worker in job.workers[:2] for _ in range(2)]
    may.set()
    poll(lambda: all(worker.core.phase is Phase.RUNNING for worker in job.workers))
    pushed += [job.push(job.workers[2], first, nothing) for _ in range(2)]
    results = [summed(pending.wait()).tobytes() for pending in pushed]
    assert results == results[:2] * 3


def test_what_all_have_assigned_is_written_again_where_it_was(cluster: Cluster) -> None:
    job = Training(cluster, every=4)
    job.train(2)
    job.assign()
    job.train(1)
    job.lose(0)
    job.check_slots()
    job.train(2)


def test_no_more_is_kept_than_asked_for(cluster: Cluster) -> None:
    job = Training(cluster, every=3)
    for _ in range(8):
        job.train(1)
        assert max(job.kept()) <= 3 + 1


def test_who_is_first_now_writes_what_all_assign(cluster: Cluster) -> None:
    job = Training(cluster, every=50)
    job.train(2)
    job.leave(0)
    job.assign()
    job.train(2)
    job.check_slots()


@pytest.mark.parametrize(("before", "after"), [(2, 2), (0, 0), (0, 2)])
def test_a_joining_worker_has_its_part_after_its_first_step(cluster: Cluster, before: int, after: int) -> None:
    """And nothing of the part of the lost worker whose number it has."""
    job = Training(cluster, every=50)
    job.train(3)
    job.leave(0)
    job.train(before)
    job.joiner(0, [*job.specs, *SPECS])
    job.workers.sort(key=lambda worker: worker.rank)  # the order of additions
    job.train(after)
    job.lose(0)
    job.check_slots()
    job.train(2)
    job.check_slots()


def test_a_worker_and_a_pserver_together_end_the_job_by_name(cluster: Cluster) -> None:
    job = Training(cluster, every=50)
    job.train(3)
    job.leave(0)
    job.lose(0)
    with pytest.raises(WorkerLostError, match="nobody has all that a lost pserver kept of 'a'"):
        job.workers[0].state.read(MODEL[0], 1, 0, 4)

    for worker in job.workers:
        error = refused(functools.partial(job.push, worker, MODEL[0], np.zeros(ITEMS, np.float32)))
        assert isinstance(error, WorkerLostError)


def test_a_worker_whose_program_ends_gives_what_it_has_kept(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Training(cluster, every=50)
    job.train(3)
    may = hold_replay(monkeypatch, {2})
    job.lose(0)
    last = job.workers.pop()
    closing = threading.Thread(target=last.close)
    closing.start()
    may.set()
    closing.join()
    job.check_slots()
