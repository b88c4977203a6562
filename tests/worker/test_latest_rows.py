"""Jobs with tables in mode "async" outlive their pservers: rows go on as they were in the last snapshot."""

from __future__ import annotations

import dataclasses
import functools
import threading
from pathlib import Path

import jobs
import moving
import numpy as np
import pytest
from jobs import Cluster, Pending, poll, together
from table_jobs import IDS, SCALARS, TABLE, declared, described

from tfps.config import Config, Security
from tfps.exchange.requests import Assign, Lookup, RowUpdate
from tfps.pserver.rendezvous import offer
from tfps.recovery.exchange import ElasticExchange
from tfps.recovery.machine import Effect, Event, Phase
from tfps.recovery.reconfiguration import Reconfiguration
from tfps.tables.table import Table
from tfps.types import Argument, Array

WORKERS = 3
SPEC = described()


def config(folder: Path, every: int, staleness: int | None = None) -> Config:
    return dataclasses.replace(
        moving.CONFIG,
        deterministic=False,
        mode="async",
        update="server",
        staleness=staleness,
        snapshot_steps=every,
        snapshot_folder=str(folder),
    )


class Training(moving.Job):
    """Workers that train a table, one after the other, so that their order is known; and what it should be."""

    def __init__(self, cluster: Cluster, config: Config, pservers: int = 2) -> None:
        super().__init__(cluster, pservers=pservers, config=config)
        assert config.snapshot_steps is not None
        self.every = config.snapshot_steps
        self.table, self.saved, self.left = Table(SPEC), Table(SPEC), 0
        self.steps = dict.fromkeys(range(WORKERS), 0)
        self.declare([declared("user")])

    def draw(self) -> Array:
        return self.random.choice(IDS, int(self.random.integers(1, 30)), replace=False)

    def ask(self, worker: ElasticExchange, ids: Array, **options: Argument) -> Pending:
        pending = Pending()
        worker.tables.lookup(Lookup(TABLE, self.steps[worker.rank], ids, **options), pending)
        return pending

    def add(self, worker: ElasticExchange, ids: Array, gradients: Array) -> Pending:
        pending, step = Pending(), self.steps[worker.rank]
        self.steps[worker.rank] += 1
        worker.tables.apply(RowUpdate(TABLE, step, ids, gradients, SCALARS.pack()), pending)
        return pending

    def save(self) -> None:
        """A snapshot has been taken."""
        self.saved, self.left = copy_of(self.table), self.every

    def train(self, *ranks: int, look_up: bool = True) -> None:
        for rank in ranks:
            worker = next(each for each in self.workers if each.rank == rank)
            ids = self.draw()
            if look_up:
                self.check_rows(self.ask(worker, ids, trains=True, complete=True), ids)
            gradients = self.random.normal(size=(len(ids), 3)).astype(np.float32)
            if rank == self.workers[0].rank:
                if not self.left:
                    self.save()
                self.left -= 1
            self.add(worker, ids, gradients).wait()
            self.table.update([(ids, gradients)], SCALARS, 0)

    def goes_back(self) -> None:
        """Rows are those of the last snapshot, and the first rank takes one before it goes on."""
        self.table, self.left = copy_of(self.saved), 0

    def check_rows(self, pending: Pending, ids: Array) -> None:
        rows = np.asarray(pending.wait().sum).view(np.float32).reshape(-1, 3)
        np.testing.assert_array_equal(rows, self.table.lookup(ids))

    def check_all(self) -> None:
        for worker in self.workers:
            self.check_rows(self.ask(worker, IDS, trains=False), IDS)


def copy_of(table: Table) -> Table:
    """Another one with the same rows and slots."""
    other = Table(SPEC)
    for chunk in table.chunks():
        other.restore(chunk)
    return other


@pytest.mark.parametrize(("steps", "every", "staleness"), [(0, 1, None), (2, 1, 2), (2, 3, 2), (4, 3, None)])
def test_rows_go_on_as_in_the_last_snapshot(
    cluster: Cluster, tmp_path: Path, steps: int, every: int, staleness: int | None
) -> None:
    job = Training(cluster, config(tmp_path, every, staleness))
    for _ in range(steps):
        job.train(0, 1, 2)
    job.lose(0)
    job.goes_back()
    job.check_all()
    job.train(1, 0, 2, 2, 1, 0)
    job.servers[0] = cluster.pserver(WORKERS)
    job.lose_to(1, 0)
    job.goes_back()
    job.check_all()
    for _ in range(every + 1):
        job.train(0, 2, 1)
    job.check_all()


def test_ranks_that_have_stepped_apart_go_on(cluster: Cluster, tmp_path: Path) -> None:
    job = Training(cluster, config(tmp_path, every=2))
    job.train(*[0] * 5, 1, *[2] * 3)
    job.lose(1)
    job.goes_back()
    job.check_all()
    job.train(*[1] * 4, *[0] * 3, *[2] * 7)
    job.check_all()
    job.servers[1] = cluster.pserver(WORKERS)
    job.lose_to(0, 1)
    job.goes_back()
    job.train(1, 2, 0, 2, 1, 1)
    job.check_all()


def test_gradients_in_flight_are_answered_and_no_step_counts_twice(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their replies have not come when a pserver is lost: nobody waits for ever, and what was in flight is lost."""
    job = Training(cluster, config(tmp_path, every=2))
    job.train(0, 1, 2, 0, 1, 2)
    deafen = moving.deafening(monkeypatch)
    for worker in job.workers:
        deafen(worker)
    ids = job.draw()
    pushed = [job.add(worker, ids, np.ones((len(ids), 3), np.float32)) for worker in job.workers[1:]]
    asked = [job.ask(worker, IDS, trains=False) for worker in job.workers]
    job.lose(0)
    job.goes_back()
    for pending in pushed:
        pending.wait()
    for pending in asked:
        job.check_rows(pending, IDS)
    job.train(2, 0, 1, 1, 0, 2)
    job.check_all()


def test_a_gradient_that_comes_as_its_pserver_is_lost_is_a_step_of_its_rank(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session has failed, and refuses it; the next one has not begun."""
    job = Training(cluster, config(tmp_path, every=2))
    job.train(0, 1, 2, 0, 1, 2)
    do, goes_on = Reconfiguration._do, threading.Event()

    def held(self: Reconfiguration, item: Event | Effect) -> None:
        assert goes_on.wait(jobs.DEADLINE_S)
        do(self, item)

    monkeypatch.setattr(Reconfiguration, "_do", held)
    job.servers[0].stop(0)
    poll(lambda: all(worker.core.phase is Phase.RENDEZVOUS for worker in job.workers))
    ids = job.draw()
    pushed = [job.add(worker, ids, np.ones((len(ids), 3), np.float32)) for worker in job.workers[1:]]
    goes_on.set()
    for pending in pushed:
        pending.wait()
    job.goes_back()
    job.train(2, 0, 1, 1, 0, 2)
    job.check_all()


def test_replaced_rows_are_in_a_snapshot(cluster: Cluster, tmp_path: Path) -> None:
    job = Training(cluster, config(tmp_path, every=50))
    for number in range(3):
        ids = np.sort(job.draw())
        rows = np.full((len(ids), 3), 1.0 + number, np.float32)
        calls = [
            functools.partial(each.tables.assign, Assign(TABLE, job.steps[each.rank], ids, rows, f"{number}"))
            for each in job.workers
        ]
        together(*calls)
        job.table.assign(ids, rows)
        job.save()
        job.train(*range(WORKERS))
        job.lose(0)
        job.goes_back()
        job.check_all()
        job.train(*range(WORKERS))
        job.servers[0] = cluster.pserver(WORKERS)
        job.lose_to(1, 0)
        job.goes_back()
        job.check_all()
        job.servers = [job.servers[0], cluster.pserver(WORKERS)]
        offer(job.servers[0].address, job.servers[1].address, WORKERS, Security())
        poll(lambda: all(len(worker.info.links()) == 2 for worker in job.workers))
        job.goes_back()
        job.check_all()


def test_the_next_rank_takes_snapshots_once_the_first_has_left(cluster: Cluster, tmp_path: Path) -> None:
    job = Training(cluster, config(tmp_path, every=2))
    job.train(0, 1, 2)
    job.leave(0)
    job.left = 0
    job.train(1, 2, 1, 2, 1, 2)
    job.lose(1)
    job.goes_back()
    job.check_all()
    job.train(2, 1)
    job.check_all()
