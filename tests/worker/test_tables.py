from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence
from pathlib import Path

import jobs
import numpy as np
import pytest
from jobs import CONFIG, Cluster, Pending, declare, poll
from table_jobs import SCALARS, declared, described, ids_of

from tfps.errors import ConfigError, MismatchError, ProtocolError, WaitTimeoutError
from tfps.exchange.interface import Exchange, Reply
from tfps.exchange.requests import Assign, Load, Lookup, RowUpdate, Save
from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.pserver import server
from tfps.pserver.table_slice import TableSlice
from tfps.tables import messages
from tfps.tables.spec import TableSpec
from tfps.tables.table import Table
from tfps.types import Argument, Array
from tfps.worker.embedded import EmbeddedExchange

SGD = UpdateSpec("sgd", (("momentum", 0.0), ("nesterov", 0.0)), (), (3,), (False,))
bucket = functools.partial(declared, "user")


def asked(exchange: Exchange, ids: Array, step: int, *, trains: bool = False, complete: bool = False) -> Pending:
    pending = Pending()
    exchange.tables.lookup(Lookup(0, step, ids, trains, complete), pending)
    return pending


def rows_of(reply: Reply) -> Array:
    return np.asarray(reply.sum).view(np.float32).reshape(-1, 3)


def added(exchange: Exchange, ids: Array, gradients: Array, step: int, scalars: StepScalars = SCALARS) -> Pending:
    pending = Pending()
    exchange.tables.apply(RowUpdate(0, step, ids, gradients, scalars.pack()), pending)
    return pending


def random_steps(steps: int, ranks: int) -> list[list[tuple[Array, Array]]]:
    """Ids and gradients of each step and rank; one rank has none now and then."""
    random, found = np.random.default_rng(3), []
    for step in range(steps):
        parts = []
        for rank in range(ranks):
            count = 0 if (step + rank) % 5 == 4 else int(random.integers(1, 40))
            ids = random.choice(np.arange(-30, 30) * 2**57, count, replace=False)
            parts.append((ids, random.normal(size=(count, 3)).astype(np.float32)))
        found.append(parts)
    return found


def expected(steps: Sequence[Sequence[tuple[Array, Array]]], spec: TableSpec) -> Table:
    table = Table(spec)
    for step, parts in enumerate(steps):
        table.update(parts, SCALARS, step)
    return table


EVERY = np.arange(-32, 32) * 2**57


@pytest.mark.parametrize(
    ("workers", "pservers", "transport"),
    [(1, 1, "tcp"), (2, 1, "grpc"), (2, 3, "tcp"), (3, 2, "shared memory"), (2, 2, "both")],
)
def test_rows_are_those_of_one_table_whoever_owns_them(
    workers: int,
    pservers: int,
    transport: jobs.Transport,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs.use(transport, monkeypatch)
    monkeypatch.setattr(messages, "_ROWS_BYTES", 60)  # five rows in a frame
    members = jobs.job(cluster, workers, bucket(), pservers=pservers)
    steps = random_steps(12, workers)
    reference = Table(described())
    for step, parts in enumerate(steps):
        asks = [
            asked(worker, ids, step, trains=True, complete=True)
            for worker, (ids, _) in zip(members, parts, strict=True)
        ]
        for pending, (ids, _) in zip(asks, parts, strict=True):
            np.testing.assert_array_equal(rows_of(pending.wait()), reference.lookup(ids))
        for worker, (ids, gradients) in zip(members, parts, strict=True):
            added(worker, ids, gradients, step)
        reference.update(parts, SCALARS, step)
    for worker in members:
        np.testing.assert_array_equal(rows_of(asked(worker, EVERY, len(steps)).wait()), reference.lookup(EVERY))


def test_a_single_process_has_the_same_rows() -> None:
    exchange = EmbeddedExchange()
    exchange.declare([bucket()])
    steps = random_steps(5, 1)
    for step, ((ids, gradients),) in enumerate(steps):
        added(exchange, ids, gradients, step).wait()
    found = rows_of(asked(exchange, EVERY, 5).wait())
    np.testing.assert_array_equal(found, expected(steps, described()).lookup(EVERY))


def slices(cluster: Cluster, server: Argument) -> TableSlice:
    found: TableSlice = server._job.rounds.bucket(0).slices[0]
    return found


def test_rows_of_the_next_step_wait_until_all_ranks_have_added(cluster: Cluster) -> None:
    first, second = jobs.job(cluster, 2, bucket())
    ones = np.ones((1, 3), np.float32)
    added(first, ids_of(4), ones, 0)
    pending = asked(first, ids_of(4), 1)
    # What comes later on the same stream has been taken: the question was not answered.
    assert asked(first, ids_of(4), 0).wait().sum is not None
    assert not pending.replied
    added(second, ids_of(), np.empty((0, 3), np.float32), 0)
    reference = expected([[(ids_of(4), ones)]], described())
    np.testing.assert_array_equal(rows_of(pending.wait()), reference.lookup(ids_of(4)))


def test_rows_that_a_step_does_not_touch_come_before_its_gradients(cluster: Cluster) -> None:
    server = cluster.pserver(2)
    first, second = cluster.workers([server.address], 2)
    declare([first, second], bucket())
    table = Table(described())
    asked(first, ids_of(1, 2), 0, trains=True, complete=True).wait()
    early, mixed = asked(first, ids_of(5, 6), 1), asked(first, ids_of(2, 3, 9), 1)
    assert asked(first, ids_of(1), 0).wait().error is None
    assert not early.replied  # the second may touch any
    asked(second, ids_of(3), 0, trains=True, complete=True).wait()
    np.testing.assert_array_equal(rows_of(early.wait()), table.lookup(ids_of(5, 6)))
    assert not mixed.replied
    assert slices(cluster, server).rounds.traffic.early_rows == 3  # 5, 6, and 9 of the mixed ones
    ones = np.ones((2, 3), np.float32)
    added(first, ids_of(1, 2), ones, 0)
    added(second, ids_of(3), ones[:1], 0)
    table.update([(ids_of(1, 2), ones), (ids_of(3), ones[:1])], SCALARS, 0)
    np.testing.assert_array_equal(rows_of(mixed.wait()), table.lookup(ids_of(2, 3, 9)))


def test_gradients_of_rows_that_were_not_asked_for_are_refused_after_others_relied_on_that(cluster: Cluster) -> None:
    (worker,) = jobs.job(cluster, 1, bucket())
    asked(worker, ids_of(1), 0, trains=True, complete=True).wait()
    error = added(worker, ids_of(2), np.ones((1, 3), np.float32), 0).error(ProtocolError, "2")
    assert "asked" in str(error)


def test_each_gradient_counts_by_itself_where_workers_step_apart(cluster: Cluster) -> None:
    config = dataclasses.replace(CONFIG, mode="async", update="server")
    first, second = jobs.job(cluster, 2, bucket(), config=config)
    ones = np.ones((1, 3), np.float32)
    table = Table(described())
    for step in range(3):
        added(first, ids_of(4), ones, step).wait()
        table.update([(ids_of(4), ones)], SCALARS, step)
        np.testing.assert_array_equal(rows_of(asked(first, ids_of(4), step + 1).wait()), table.lookup(ids_of(4)))
    np.testing.assert_array_equal(rows_of(asked(second, ids_of(4), 0).wait()), table.lookup(ids_of(4)))


def test_a_rank_that_is_too_far_ahead_waits_for_rows(cluster: Cluster) -> None:
    config = dataclasses.replace(CONFIG, mode="async", update="server", staleness=1)
    first, second = jobs.job(cluster, 2, bucket(), config=config)
    ones = np.ones((1, 3), np.float32)
    for step in range(2):
        added(first, ids_of(4), ones, step).wait()
    pending = asked(first, ids_of(4), 2)
    assert asked(second, ids_of(4), 0).wait().error is None
    assert not pending.replied
    added(second, ids_of(4), ones, 0)
    assert pending.wait().error is None


def test_others_go_on_without_a_lost_rank(cluster: Cluster) -> None:
    config = dataclasses.replace(CONFIG, min_workers=1)
    first, second = jobs.job(cluster, 2, bucket(), pservers=2, config=config)
    ones = np.ones((2, 3), np.float32)
    done = added(first, ids_of(4, 5), ones, 0)
    assert not done.replied
    second.close("an end")
    done.wait()
    reference = expected([[(ids_of(4, 5), ones)]], described())
    np.testing.assert_array_equal(rows_of(asked(first, ids_of(4, 5), 1).wait()), reference.lookup(ids_of(4, 5)))


def test_ranks_that_update_otherwise_are_told_so(cluster: Cluster) -> None:
    first, second = jobs.job(cluster, 2, bucket())
    ones = np.ones((1, 3), np.float32)
    pending = added(first, ids_of(1), ones, 0)
    added(second, ids_of(1), ones, 0, StepScalars(0, (0.0, 0.25)))
    error = pending.error(MismatchError, "'user'")
    assert "learning_rate" in str(error)


def test_an_id_out_of_range_fails_the_job_by_name(cluster: Cluster) -> None:
    (worker,) = jobs.job(cluster, 1, bucket(described(rows=10)))
    asked(worker, ids_of(3, 10), 0).error(ProtocolError, "10")


def test_a_table_that_may_not_fit_is_refused_when_it_is_declared(cluster: Cluster) -> None:
    server = cluster.pserver(1, max_memory=2**20)
    worker = cluster.worker([server.address])
    with pytest.raises(ConfigError, match="max-memory"):
        worker.declare([bucket(described(max_rows=100_000))])


def test_an_error_names_the_rank_that_rows_wait_for(cluster: Cluster) -> None:
    config = dataclasses.replace(CONFIG, step_timeout_s=1.0)
    first, _ = jobs.job(cluster, 2, bucket(), config=config)
    error = added(first, ids_of(1), np.ones((1, 3), np.float32), 0).error(WaitTimeoutError, "'user'")
    assert "rank 1" in str(error)


def test_a_table_with_another_rule_keeps_its_rows(cluster: Cluster) -> None:
    members = jobs.job(cluster, 2, bucket(), pservers=2)
    steps = random_steps(4, 2)
    for step, parts in enumerate(steps):
        for worker, (ids, gradients) in zip(members, parts, strict=True):
            added(worker, ids, gradients, step)
    reference = expected(steps, described())
    for worker in members:
        asked(worker, EVERY, 4).wait()
    assert declare(members, bucket(described(update=SGD), replaces=0)) == [1]
    reference.change(described(update=SGD))
    ones = np.ones((len(EVERY), 3), np.float32)
    for worker in members:
        worker.tables.apply(RowUpdate(1, 4, EVERY, ones, SCALARS.pack()), Pending())
    reference.update([(EVERY, ones), (EVERY, ones)], SCALARS, 4)
    pending = Pending()
    members[0].tables.lookup(Lookup(1, 5, EVERY), pending)
    np.testing.assert_array_equal(rows_of(pending.wait()), reference.lookup(EVERY))


@pytest.mark.parametrize("pservers", [1, 3])
def test_saved_rows_come_back_on_any_number_of_pservers(pservers: int, cluster: Cluster, tmp_path: Path) -> None:
    members = jobs.job(cluster, 2, bucket(), pservers=2)
    steps = random_steps(8, 2)
    for step, parts in enumerate(steps[:5]):
        for worker, (ids, gradients) in zip(members, parts, strict=True):
            added(worker, ids, gradients, step)
    full = members[0].tables.save(Save(0, 5, str(tmp_path / "full"), "user"))
    for step, parts in enumerate(steps[5:], 5):
        for worker, (ids, gradients) in zip(members, parts, strict=True):
            added(worker, ids, gradients, step)
    more = members[0].tables.save(Save(0, 8, str(tmp_path / "more"), "user", full.step))
    assert full.full
    assert not more.full
    reference = expected(steps, described())
    (worker,) = jobs.job(cluster, 1, bucket(), pservers=pservers)
    added(worker, ids_of(99), np.ones((1, 3), np.float32), 0).wait()
    folders = [str(tmp_path / "full"), str(tmp_path / "more")]
    restored = worker.tables.load(Load(0, 1, folders, "user", "an id"))
    assert restored.rows == reference.stats().rows
    np.testing.assert_array_equal(rows_of(asked(worker, EVERY, 1).wait()), reference.lookup(EVERY))
    ones = np.ones((len(EVERY), 3), np.float32)
    added(worker, EVERY, ones, 1)
    reference.update([(EVERY, ones)], SCALARS, 8)
    np.testing.assert_array_equal(rows_of(asked(worker, EVERY, 2).wait()), reference.lookup(EVERY))


def test_rows_are_replaced_once_all_ranks_do_so(cluster: Cluster, tmp_path: Path) -> None:
    first, second = jobs.job(cluster, 2, bucket(), config=dataclasses.replace(CONFIG, step_timeout_s=2.0))
    ones = np.ones((1, 3), np.float32)
    for worker in (first, second):
        added(worker, ids_of(4), ones, 0)
    first.tables.save(Save(0, 1, str(tmp_path), "user"))
    saved = rows_of(asked(first, ids_of(4), 1).wait())
    load, put = Load(0, 1, [str(tmp_path)], "user", "an id"), Assign(0, 1, ids_of(4), ones, "put")
    with pytest.raises(WaitTimeoutError, match="rank 1"):
        first.tables.assign(put)
    np.testing.assert_array_equal(rows_of(asked(second, ids_of(4), 1).wait()), saved)
    for _ in range(2):  # what has been restored may be restored again
        both = first.tables, second.tables
        jobs.together(*(lambda each=each: each.assign(put) for each in both))
        np.testing.assert_array_equal(rows_of(asked(second, ids_of(4), 1).wait()), ones)
        jobs.together(*(lambda each=each: each.load(load) for each in both))
        np.testing.assert_array_equal(rows_of(asked(first, ids_of(4), 1).wait()), saved)


def test_who_replaces_rows_waits_for_the_others_as_long_as_the_job_says(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pserver = cluster.pserver(2)
    first, second = cluster.workers([pserver.address], 2)
    declare([first, second], bucket())
    monkeypatch.setattr(server, "_MAX_WAIT_S", 0.0)  # of other calls
    put = Assign(0, 0, ids_of(4), np.ones((1, 3), np.float32), "put")
    waiting = threading.Thread(target=first.tables.assign, args=[put])
    waiting.start()
    tables = [each for _, each in pserver._job._state.shard.slices() if isinstance(each, TableSlice)]
    poll(lambda: not waiting.is_alive() or any(each._replacing for each in tables))
    assert waiting.is_alive()
    second.tables.assign(put)
    waiting.join()
    np.testing.assert_array_equal(rows_of(asked(second, ids_of(4), 0).wait()), np.ones((1, 3)))


def test_one_rank_restores_alone_what_others_wait_for(cluster: Cluster, tmp_path: Path) -> None:
    first, second = jobs.job(cluster, 2, bucket())
    ones = np.ones((1, 3), np.float32)
    for worker in (first, second):
        added(worker, ids_of(4), ones, 0)
    first.tables.save(Save(0, 1, str(tmp_path), "user"))
    restored = first.tables.load(Load(0, 1, [str(tmp_path)], "user", "an id", alone=True))
    assert restored.rows == 1


def test_gradients_that_come_while_rows_are_saved_are_applied_after_that(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    worker = cluster.worker([server.address])
    declare([worker], bucket())
    rounds, ones = server._job.rounds, np.ones((1, 3), np.float32)
    with rounds.saved_table(0, 0, 0, 1.0):
        done = added(worker, ids_of(4), ones, 0)
        before = rows_of(asked(worker, ids_of(4), 0).wait())
        assert not done.replied
    done.wait()
    assert (rows_of(asked(worker, ids_of(4), 1).wait()) != before).any()
    with pytest.raises(WaitTimeoutError, match="step 2"), rounds.saved_table(0, 0, 2, 0.01):
        pass
