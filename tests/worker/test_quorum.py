"""Updates by the mean over those who push (`MEAN`): weights, ranks that are lost, and those that a quorum skips."""

from __future__ import annotations

import dataclasses
import queue

import jobs
import numpy as np
import pytest
from jobs import Cluster, Pending, declare, poll, summed

from tfps.exchange.interface import BucketSpec
from tfps.exchange.update_spec import MEAN, StepScalars, UpdateSpec
from tfps.types import Argument, Array
from tfps.worker import client
from tfps.worker.worker import Worker

ITEMS = 512  # in two slices
RULE = (("momentum", 0.0), ("nesterov", 0.0), (MEAN, 1.0))
SPEC = BucketSpec(("w",), "sum", 4 * ITEMS, "float32", 0, update=UpdateSpec("sgd", RULE, (), (ITEMS,), (False,)))


def begin(cluster: Cluster, count: int = 3, **settings: Argument) -> list[Worker]:
    """Workers with parameters that are 0."""
    config = dataclasses.replace(jobs.CONFIG, min_workers=1, deterministic=True, **settings)
    workers = cluster.workers(cluster.pservers(2, count), count, config=config)
    declare(workers, SPEC)
    workers[0].state.write(0, 0, 0, np.zeros(ITEMS, np.float32))
    return workers


def pushed(worker: Worker, part: float, weight: float = 1.0, mark: int = 0) -> Pending:
    """Pushes a third of a change, with the learning rate 1."""
    pending = Pending()
    scalars = StepScalars(mark, (0.0, 1.0, weight), wrote=bool(mark) and worker.rank == 0).pack()
    worker.push(0, np.full(ITEMS, part, np.float32), pending, step_scalars=scalars)
    return pending


def values(pending: Pending) -> Array:
    return np.unique(summed(pending.wait()))


def test_with_equal_weights_nothing_is_computed_but_the_sum(cluster: Cluster) -> None:
    parts = np.array([0.1, 0.7, 0.3], np.float32)
    pending = [pushed(worker, float(part)) for worker, part in zip(begin(cluster), parts, strict=True)]
    for each in pending:
        assert values(each) == -((parts[0] + parts[1]) + parts[2])


@pytest.mark.parametrize(("weights", "mean"), [((1.0, 0.5, 0.5), 4.5), ((1.0, 0.0, 0.5), 4.0), ((0.0, 0.0, 0.0), 0.0)])
def test_parts_count_by_their_weights(cluster: Cluster, weights: tuple[float, ...], mean: float) -> None:
    changes = [3.0, 6.0, 6.0]
    pending = [
        pushed(worker, weight * change / 3, weight)
        for worker, weight, change in zip(begin(cluster), weights, changes, strict=True)
    ]
    for each in pending:
        assert values(each) == -mean


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_rank_that_is_lost_is_not_in_the_mean(cluster: Cluster, lost: int) -> None:
    workers = begin(cluster)
    for each in [pushed(worker, 1.0) for worker in workers]:
        assert values(each) == -3.0
    changes = [3.0, 6.0, 12.0]
    left = [worker for worker in workers if worker.rank != lost]
    pending = [pushed(worker, changes[worker.rank] / 3) for worker in left]
    workers[lost].close("SIGTERM")
    mean = (sum(changes) - changes[lost]) / 2
    for each in pending:
        assert values(each) == -3.0 - mean
    poll(lambda: all(len(worker.view.ranks) == 2 for worker in left))
    for each in [pushed(worker, 1.0) for worker in left]:
        assert values(each) == -3.0 - mean - 3.0


QUORUM: dict[str, Argument] = {"mode": "local", "quorum": 2 / 3}


class Told:
    """What a worker hears of a quorum that waits for it."""

    def __init__(self, worker: Worker) -> None:
        self.all: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        worker.peers.on_awaited = lambda *what: self.all.put(what)

    def next(self) -> tuple[int, int]:
        return self.all.get(timeout=jobs.DEADLINE_S)


def test_a_quorum_goes_on_with_the_mean_of_those_who_have_pushed(cluster: Cluster) -> None:
    first, second, late = workers = begin(cluster, **QUORUM)
    told, skipped = Told(late), Pending()
    pending = [pushed(first, 1.0), pushed(second, 2.0)]
    assert told.next() == (0, 0)
    assert late.skip([0], 0, lambda bucket, reply: skipped(reply))
    for each in (*pending, skipped):
        assert values(each) == -4.5
    assert not late.skip([0], 0, lambda bucket, reply: None)  # it has taken part
    pending = [pushed(late, 8.0, 2.0), pushed(first, 1.0), pushed(second, 2.0)]  # 4.0 with the weight 2
    for each in pending:
        assert values(each) == -4.5 - 3 * 11.0 / 4
    assert all(len(worker.view.ranks) == 3 for worker in workers)


def test_who_has_pushed_or_is_about_to_cannot_be_skipped(cluster: Cluster) -> None:
    first, second, late = begin(cluster, **QUORUM)
    told = Told(late)
    pending = [pushed(first, 1.0), pushed(second, 1.0)]
    told.next()
    pending.append(pushed(late, 1.0))
    assert not late.skip([0], 0, lambda bucket, reply: None)
    for each in pending:
        assert values(each) == -3.0
    pending = [pushed(late, 1.0), pushed(late, 1.0)]  # the second one waits for the reply to the first one
    assert not late.skip([0], 2, lambda bucket, reply: None)


def test_all_are_waited_for_while_they_bring_what_their_programs_have_assigned(cluster: Cluster) -> None:
    first, second, late = begin(cluster, **QUORUM)
    told = Told(late)
    pending = [pushed(first, 1.0, mark=7), pushed(second, 1.0, mark=7)]
    poll(lambda: len(client._others(0, first.client._missing(first._pservers[0], 60.0, bucket=0))) == 1)
    pending.append(pushed(late, 1.0, mark=7))
    for each in pending:
        each.wait()
    pushed(first, 1.0)
    pushed(second, 1.0)
    assert told.next() == (0, 1)


def test_a_loss_may_make_a_quorum(cluster: Cluster) -> None:
    first, second, _, late, lost = begin(cluster, 5, mode="local", quorum=0.5)
    told = Told(late)
    pending = [pushed(first, 1.0), pushed(second, 1.0)]
    poll(lambda: len(first.client._missing(first._pservers[0], 60.0, bucket=0)) == 3)
    assert told.all.empty()
    lost.close("SIGTERM")
    assert told.next() == (0, 0)
    assert not any(each.replied for each in pending)
