"""Updates by the mean over those who push (`MEAN`): weights, and ranks that are lost."""

from __future__ import annotations

import dataclasses

import jobs
import numpy as np
import pytest
from jobs import Cluster, Pending, declare, poll, summed

from tfps.exchange.interface import BucketSpec
from tfps.exchange.update_spec import MEAN, StepScalars, UpdateSpec
from tfps.types import Array
from tfps.worker.worker import Worker

ITEMS = 512  # in two slices
RULE = (("momentum", 0.0), ("nesterov", 0.0), (MEAN, 1.0))
SPEC = BucketSpec(("w",), "sum", 4 * ITEMS, "float32", 0, update=UpdateSpec("sgd", RULE, (), (ITEMS,), (False,)))


def begin(cluster: Cluster) -> list[Worker]:
    """Three workers; the parameters are 0."""
    config = dataclasses.replace(jobs.CONFIG, min_workers=1, deterministic=True)
    workers = cluster.workers(cluster.pservers(2, 3), 3, config=config)
    declare(workers, SPEC)
    workers[0].state.write(0, 0, 0, np.zeros(ITEMS, np.float32))
    return workers


def pushed(worker: Worker, part: float, weight: float = 1.0) -> Pending:
    """Pushes a third of a change, with the learning rate 1."""
    pending = Pending()
    scalars = StepScalars(0, (0.0, 1.0, weight)).pack()
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
