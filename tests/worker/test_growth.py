"""Workers beyond those of the start join a job (Config.max_workers). Through `fit`: tests/elastic/test_growth.py."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence

import jobs
import moving
import numpy as np
import pytest
from jobs import Cluster, attempt, bucket, declare, poll, push, summed, together

from tfps.config import Config
from tfps.errors import ConfigError, ConnectError, WaitTimeoutError
from tfps.worker import client
from tfps.worker.worker import Worker

GROWS = dataclasses.replace(jobs.CONFIG, min_workers=1, max_workers=4)
GRADIENT = bucket(3000, name="gradient")
ONES = np.ones(750, np.float32)


def exchange(workers: Sequence[Worker]) -> None:
    """A step of all, whose result must be of exactly these."""
    for pending in [push(worker, 0, ONES) for worker in workers]:
        reply = pending.wait()
        assert summed(reply).tolist() == [len(workers)] * 750
        assert sorted(reply.ranks) == sorted(worker.rank for worker in workers)


def admit(workers: Sequence[Worker], *joiners: Worker) -> None:
    numbers = sorted(each.rank for each in joiners)
    for each in joiners:
        each.declare([GRADIENT])

    def let_in(worker: Worker) -> Sequence[int] | None:
        poll(lambda: workers[0].joining.joiners(1) == numbers)
        return worker.joining.admit(numbers)

    joining = [functools.partial(each.joining.take_part, 1) for each in joiners]
    before = [worker.rank for worker in workers]
    found = together(*joining, *(functools.partial(let_in, worker) for worker in workers))
    assert [list(ranks or ()) for ranks in found] == [before] * len(found)


def test_workers_join_beyond_those_of_the_start_are_lost_and_replaced(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = cluster.pservers(2, 2)
    made = cluster.workers(addresses, 2, workers=2, config=GROWS)
    declare(made, GRADIENT)
    exchange(made)
    third, fourth = cluster.worker(addresses, config=GROWS), cluster.worker(addresses, 3, workers=2, config=GROWS)
    assert [(each.rank, each.joining.pending) for each in (third, fourth)] == [(2, True), (3, True)]
    exchange(made)  # who do not wait for them
    admit(made, third, fourth)
    made += [third, fourth]
    assert {worker.view.ranks for worker in made} == {(0, 1, 2, 3)}
    exchange(made)
    made.pop(2).close("SIGTERM")
    poll(lambda: "goes on with 3 of 4 workers" in caplog.text)
    made.pop(0).close("SIGTERM")
    poll(lambda: all(worker.view.ranks == (1, 3) for worker in made))
    poll(lambda: "goes on with 2 of 3 workers" in caplog.text)  # of those that there were, 2 of them at the start
    exchange(made)
    assert {loss.rank for worker in made for loss in worker.losses.found} == {0, 2}  # and nobody who never was there
    admit(made, again := cluster.worker(addresses, 2, config=GROWS))
    exchange(sorted([*made, again], key=lambda each: each.rank))


def test_a_worker_that_comes_before_the_job_has_begun_waits(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_EARLY_S", 0.05)
    addresses = cluster.pservers(2, 2)
    early = [functools.partial(cluster.worker, addresses, rank, config=GROWS) for rank in (3, 0, 1)]
    joiner, *made = together(*early)
    assert [worker.joining.pending for worker in (joiner, *made)] == [True, False, False]
    waiting = threading.Thread(target=joiner.joining.lines)
    waiting.start()
    declare(made, GRADIENT)
    assert waiting.is_alive()  # until the others have declared all that they train with
    exchange(made)
    waiting.join(jobs.DEADLINE_S)
    assert joiner.declare([GRADIENT]) == [0]
    with joiner.joining.trying_out():
        assert summed(push(joiner, 0, ONES).wait()).tolist() == [1.0] * 750
    short = dataclasses.replace(GROWS, connect_timeout_s=1.0)
    (error,) = attempt(functools.partial(cluster.worker, cluster.pservers(1, 2), 2, config=short))
    assert isinstance(error, WaitTimeoutError)
    assert "rank 2 joins the job once the 2 workers of its start have begun it (--workers); start those" in str(error)


@pytest.mark.parametrize(
    ("workers", "rank", "config", "kind", "why"),
    [
        (2, 4, GROWS, ConnectError, r"rank must be from 0 to 3 \(max_workers=4\), got 4; .* with a larger max_workers"),
        (2, 2, dataclasses.replace(GROWS, max_workers=None), ConnectError, r"start the job with max_workers"),
        (5, 0, GROWS, ConfigError, "max_workers must be at least 5, the number of workers at the start, got 4"),
    ],
)
def test_more_than_the_job_may_have_are_refused_by_name(
    cluster: Cluster, workers: int, rank: int, config: Config, kind: type[Exception], why: str
) -> None:
    with pytest.raises(kind, match=why):
        cluster.worker(cluster.pservers(1, workers), rank, config=config)


def test_a_grown_job_outlives_its_pservers(cluster: Cluster) -> None:
    grows = dataclasses.replace(moving.CONFIG, max_workers=4)
    job = moving.Job(cluster, workers=2, config=grows)
    job.step()
    job.joiner(3)
    job.step()
    job.lose(0)
    job.step()
    job.goes_on_with(job.servers[1:])
    job.leave(0)
    job.joiner(2)  # asked at the pservers of the start, it finds the others
    job.workers.sort(key=lambda worker: worker.rank)
    job.step()
    assert {worker.view.ranks for worker in job.workers} == {(1, 2, 3)}
