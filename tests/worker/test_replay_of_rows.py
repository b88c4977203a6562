"""Jobs with tables outlive their pservers: these write snapshots, and workers keep their gradients since then."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path

import moving
import numpy as np
import pytest
from jobs import Cluster, Failed, Pending, poll, together
from table_jobs import IDS, SCALARS, TABLE, declared, described

from tfps.config import Config, Security
from tfps.errors import ConfigError, PserverLostError, TfpsError, WorkerLostError
from tfps.exchange.interface import Wait
from tfps.exchange.requests import Assign, Load, Lookup, RowUpdate, SavedRows
from tfps.exchange.update_spec import UpdateSpec
from tfps.pserver.rendezvous import offer
from tfps.recovery.exchange import ElasticExchange
from tfps.tables.spec import TableSpec
from tfps.tables.table import Table
from tfps.types import Argument, Array
from tfps.worker.tables import WorkerTables


def config(folder: Path | None, every: int = 3) -> Config:
    if folder is None:
        return moving.CONFIG
    return dataclasses.replace(moving.CONFIG, snapshot_steps=every, snapshot_folder=str(folder))


SPEC = described()


class Training(moving.Job):
    """Workers that train a table, and what it should be."""

    def __init__(self, cluster: Cluster, config: Config, spec: TableSpec = SPEC, pservers: int = 2) -> None:
        super().__init__(cluster, pservers=pservers, config=config)
        self.table, self.number, self.steps = Table(spec), TABLE, 0
        self.declare([declared("user", spec)])
        self.prefetched: list[tuple[Array, Wait | None]] = []

    def draw(self, count: int | None = None) -> Array:
        size = int(self.random.integers(0, 30)) if count is None else count
        return self.random.choice(IDS, size, replace=False)

    def ask(self, worker: ElasticExchange, ids: Array, step: int, **options: Argument) -> Pending:
        pending = Pending()
        worker.tables.lookup(Lookup(self.number, step, ids, **options), pending)
        return pending

    def prefetch(self) -> None:
        """All ask for the rows of the next step."""
        ids = [self.draw() for _ in self.workers]
        asked = [
            (worker, Lookup(self.number, self.steps + 1, each, trains=True))
            for worker, each in zip(self.workers, ids, strict=True)
        ]
        self.prefetched = [(each.ids, worker.tables.prefetch(each)) for worker, each in asked]

    def look_up(self) -> list[Array]:
        """All read rows as they should be; returns their ids."""
        if not self.prefetched:
            self.prefetched = [(self.draw(), None) for _ in self.workers]
        found, self.prefetched = self.prefetched, []
        for worker, (ids, wait) in zip(self.workers, found, strict=True):
            if wait is None:
                pending = self.ask(worker, ids, self.steps, trains=True, complete=True)
            else:
                wait(pending := Pending())
                self.ask(worker, ids[:0], self.steps, trains=True, complete=True)
            self.check_rows(pending, ids)
        return [ids for ids, _ in found]

    def check_rows(self, pending: Pending, ids: Array) -> None:
        rows = np.asarray(pending.wait().sum).view(np.float32).reshape(-1, 3)
        np.testing.assert_array_equal(rows, self.table.lookup(ids))

    def add(self, worker: ElasticExchange, ids: Array, gradients: Array) -> Pending:
        pending = Pending()
        worker.tables.apply(RowUpdate(self.number, self.steps, ids, gradients, SCALARS.pack()), pending)
        return pending

    def begin_step(self, workers: int = 3) -> tuple[list[Pending], list[tuple[Array, Array]]]:
        """A step to which the first `workers` have added, and what all add."""
        found = self.look_up()
        parts = [(ids, self.random.normal(size=(len(ids), 3)).astype(np.float32)) for ids in found]
        pushed = zip(self.workers[:workers], parts, strict=False)
        return [self.add(worker, *part) for worker, part in pushed], parts

    def end_step(self, begun: tuple[list[Pending], list[tuple[Array, Array]]]) -> None:
        added, parts = begun
        rest = list(zip(self.workers, parts, strict=True))[len(added) :]
        for pending in [*added, *(self.add(worker, *part) for worker, part in rest)]:
            pending.wait()
        self.table.update(parts, SCALARS, self.steps)
        self.steps += 1

    def train(self, steps: int, *, prefetch: bool = False) -> None:
        for _ in range(steps):
            begun = self.begin_step(2 if prefetch else 3)
            if prefetch:
                self.prefetch()
            self.end_step(begun)

    def put(self, ids: Array, rows: Array, identity: str) -> None:
        """All replace rows."""
        request = Assign(self.number, self.steps, ids, rows, identity)
        together(*(functools.partial(worker.tables.assign, request) for worker in self.workers))
        self.table.assign(ids, rows)

    def check_all(self) -> None:
        """All workers read all rows as they should be."""
        for worker in self.workers:
            self.check_rows(self.ask(worker, IDS, self.steps, trains=False), IDS)

    def kept(self) -> list[int]:
        """How many steps of gradients each worker keeps."""
        found = [worker.core.buckets[self.number].replay for worker in self.workers]
        return [len(each._log) for each in found if each is not None]


@pytest.mark.parametrize(("every", "steps"), [(1, 2), (3, 0), (3, 1), (3, 3), (3, 5)])
def test_training_goes_on_where_it_was(cluster: Cluster, tmp_path: Path, every: int, steps: int) -> None:
    job = Training(cluster, config(tmp_path, every))
    job.train(steps)
    job.lose(0)
    job.check_all()
    job.train(2)
    job.servers[0] = cluster.pserver(3)
    job.lose_to(1, 0)
    job.train(2 * every + 1, prefetch=True)
    job.check_all()


@pytest.mark.parametrize("added", [0, 2])
def test_a_step_in_flight_is_done_once(cluster: Cluster, tmp_path: Path, added: int) -> None:
    job = Training(cluster, config(tmp_path))
    job.train(4)
    step = job.begin_step(added)
    job.prefetch()  # waits for that step, or is answered by pservers that are lost then
    job.lose(1)
    job.end_step(step)
    job.train(4, prefetch=True)
    job.check_all()


def test_rows_that_were_asked_for_come_from_the_next_pservers(cluster: Cluster, tmp_path: Path) -> None:
    job = Training(cluster, config(tmp_path))
    job.train(4)
    ids = job.draw(20)
    waiting = [job.ask(worker, ids, job.steps + 1, trains=False) for worker in job.workers]
    job.lose(0)
    job.train(1)
    for pending in waiting:
        job.check_rows(pending, ids)


def test_the_only_pserver_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    job = Training(cluster, config(tmp_path), pservers=1)
    job.train(5)
    job.servers[0].stop(0)
    again = cluster.pserver(3, job.servers[0].port)
    job.train(2)
    job.check_all()
    job.goes_on_with([again])


def test_replaced_rows_are_in_a_snapshot(cluster: Cluster, tmp_path: Path) -> None:
    """Before the first step and between steps: one pserver is lost at once, another one joins."""
    job = Training(cluster, config(tmp_path))
    for number in range(3):
        job.put(np.sort(job.draw(20)), np.full((20, 3), 1.0 + number, np.float32), f"{number}")
        job.lose(0)
        job.check_all()
        job.train(2 * number)
        job.servers = [job.servers[1], cluster.pserver(3)]
        offer(job.servers[0].address, job.servers[1].address, 3, Security())
        poll(lambda: all(len(worker.info.links()) == 2 for worker in job.workers))
        job.check_all()


def test_changes_are_written_and_what_is_not_needed_goes(cluster: Cluster, tmp_path: Path) -> None:
    job = Training(cluster, config(tmp_path, every=1))
    for _ in range(40):
        job.train(1)
        assert len(list(tmp_path.glob("*/*"))) < 15
    assert max(job.kept()) <= 2
    job.lose(0)
    job.check_all()
    for worker in job.workers:
        worker.close()
    poll(lambda: list(tmp_path.iterdir()) == [])
    assert list(tmp_path.rglob("*.gone.0.npz")) == []


def test_a_table_that_gets_another_optimizer_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    job = Training(cluster, config(tmp_path))
    job.train(4)
    sgd = UpdateSpec("sgd", (("momentum", 0.0), ("nesterov", 0.0)), (), (3,), (False,))
    spec = dataclasses.replace(SPEC, update=sgd)
    job.declare([declared("user", spec, replaces=TABLE)])
    job.table.change(spec)
    job.number = TABLE + 1
    job.train(2)
    job.lose(0)
    job.check_all()
    job.train(2)
    job.check_all()


def test_workers_that_are_left_go_on_and_so_does_who_joined(cluster: Cluster, tmp_path: Path) -> None:
    job = Training(cluster, config(tmp_path, every=10), pservers=3)
    job.train(2)
    job.leave(0)
    job.train(2)  # the first reply without it, and then a snapshot
    job.lose(1)
    job.check_all()
    job.joiner(0, [*job.specs, declared("user")])
    job.workers.sort(key=lambda worker: worker.rank)
    job.train(2)
    job.lose(0)
    job.check_all()
    job.train(2, prefetch=True)
    job.check_all()


def test_rows_that_only_some_have_replaced_end_the_job_by_name(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lowest rank has not had a snapshot written when a pserver is lost."""
    job = Training(cluster, config(tmp_path))
    job.train(4)

    def have_replaced(worker: ElasticExchange) -> bool:
        kept = worker.core.buckets[TABLE].replay
        return kept is not None and 4 in kept.snapshots and kept.snapshots[4].assigned == 1

    def lose(self: WorkerTables, *arguments: Argument) -> None:
        poll(lambda: all(map(have_replaced, job.workers[1:])))
        job.lose(0)
        raise PserverLostError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(WorkerTables, "save", lose)
        rows = np.ones((len(IDS), 3), np.float32)
        with pytest.raises(WorkerLostError, match="nobody has all that a lost pserver kept of 'user'"):
            job.put(IDS, rows, "1")


def test_a_snapshot_that_cannot_be_written_ends_the_job_by_name(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = Training(cluster, config(tmp_path / "file"))
    with pytest.raises(TfpsError, match=r"snapshot of table 'user'.*snapshot_folder.*could not be written to .*/file"):
        job.train(4)


def test_snapshots_that_are_gone_end_the_job_on_every_rank(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one rank finds out first: the others do not go on without it."""
    job = Training(cluster, config(tmp_path / "snapshots"))
    job.train(2)
    failed, load = [Failed(worker) for worker in job.workers], WorkerTables.load

    def wait_for_rank_1(self: WorkerTables, request: Load) -> SavedRows:
        if self._client.membership.rank != 1:
            poll(lambda: bool(failed[1].errors))
        return load(self, request)

    monkeypatch.setattr(WorkerTables, "load", wait_for_rank_1)
    shutil.rmtree(tmp_path / "snapshots")
    job.servers[0].stop(0)
    for each in failed:
        each.wait(ConfigError, "must have shards of the table")


def test_without_a_folder_a_lost_pserver_ends_the_job(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Training(cluster, config(None))
    assert "rows of table 'user' alone" in caplog.text
    job.train(1)
    job.servers[0].stop(0)
    with pytest.raises(PserverLostError):
        job.train(2)
