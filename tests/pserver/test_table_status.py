"""What a pserver says of its tables: the Status call, Prometheus' view of it, and the console's."""

from __future__ import annotations

import dataclasses
import urllib.request

import jobs
import numpy as np
import pytest
from jobs import Cluster
from prometheus_client.parser import text_string_to_metric_families
from table_jobs import DIM, SCALARS, added, asked, declared, described, ids_of

from tfps.protos import tfps_pb2 as pb
from tfps.pserver.console import Look, TableRates, table_rates
from tfps.pserver.console import table as shown
from tfps.pserver.metrics import MetricsServer
from tfps.pserver.server import ParameterServer
from tfps.pserver.table_slice import TableSlice
from tfps.tables.messages import encode_ids, encode_push
from tfps.tables.rounds import Traffic
from tfps.tables.table import Table

ADMITS = described(admit_after=2, max_rows=6, expire_after=3)


def scraped(server: ParameterServer, cluster: Cluster) -> dict[tuple[str, str], float]:
    """Of each sample with the label `table`: name and label, and the value."""
    metrics = MetricsServer(server, "127.0.0.1", 0)
    cluster.callback(metrics.stop)
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=jobs.DEADLINE_S) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    samples = [sample for family in families for sample in family.samples]
    assert len({(one.name, *sorted(one.labels.items())) for one in samples}) == len(samples)
    return {(one.name, one.labels["table"]): one.value for one in samples if "table" in one.labels}


def test_a_status_says_what_each_table_has_and_what_became_of_what_was_asked_and_added(cluster: Cluster) -> None:
    server = cluster.pserver(2)
    first, second = workers = cluster.workers([server.address], 2)
    jobs.declare(workers, declared("user", ADMITS), declared("item"))
    reference, per_step = Table(ADMITS), list[int]()
    steps: list[list[tuple[int, ...]]] = [
        [(1, 2, 3), (3, 4)],
        [(1, 2, 3), (3, 4)],
        [(5, 6), (6, 7)],
        [(5, 6, 7), (8, 9)],
        [(5,), (8, 9)],
        [(6,), ()],
    ]
    for step, parts in enumerate(steps):
        for worker, ids in zip(workers, parts, strict=True):
            asked(worker, 0, ids_of(*ids), step).wait()
        done = [added(worker, 0, ids_of(*ids), step) for worker, ids in zip(workers, parts, strict=True)]
        for pending in done:
            pending.wait()
        reference.update([(ids_of(*ids), np.ones((len(ids), DIM), np.float32)) for ids in parts], SCALARS, step)
        per_step.append(len({each for ids in parts for each in ids}))
    found = reference.stats()
    assert min(found) > 0, "or the test says nothing of it"
    rows = sum(len(ids) for parts in steps for ids in parts)
    traffic = Traffic(rows, 0, rows, len(steps), sum(per_step))
    user = pb.TableStatus(bucket=0, name="user", **found._asdict(), **dataclasses.asdict(traffic))
    assert list(server.status().tables) == [
        user,
        pb.TableStatus(bucket=1, name="item", memory_bytes=Table(described()).stats().memory_bytes),
    ]
    samples = scraped(server, cluster)
    for field in pb.TableStatus.DESCRIPTOR.fields:
        if field.name not in ("bucket", "name"):
            total = "" if field.name in ("rows", "memory_bytes") else "_total"
            assert samples[f"tfps_table_{field.name}{total}", "user"] == getattr(user, field.name)
    rates = table_rates(None, user)
    assert rates.updated_rows_per_update == np.mean(per_step)
    assert rates.admitted == 1 - found.refused_rows / sum(per_step)
    # A step later the table shows what is new alone.
    before = server.status()
    asked(second, 0, ids_of(5, 6, 100), 6).wait()
    added(first, 0, ids_of(5, 6, 7), 6)
    added(second, 0, ids_of(5, 6, 100), 6).wait()
    now = Look(server.address, before, server.status())
    (_, rates), _ = now.tables()
    assert rates == TableRates(3, 0.0, 6, 4, 0.75)
    (told, _) = now.as_json()["job"]["tables"]
    assert (told["rows"], told["asked_rows"], told["admitted"]) == (server.status().tables[0].rows, rows + 3, 0.75)


def test_rows_that_came_before_the_step_before_was_applied_are_counted_and_shown(cluster: Cluster) -> None:
    from rich.console import Console

    server = cluster.pserver(2)
    workers = first, second = cluster.workers([server.address], 2)
    jobs.declare(workers, declared("[/user]"))
    asked(first, 0, ids_of(1, 2), 0).wait()
    asked(second, 0, ids_of(2), 0).wait()
    early, mixed = asked(first, 0, ids_of(3, 4, 5), 1), asked(second, 0, ids_of(1, 6), 1)
    early.wait()
    jobs.poll(lambda: server.status().tables[0].early_rows == 4)
    added(first, 0, ids_of(1, 2), 0)
    added(second, 0, ids_of(2), 0)
    mixed.wait()
    status = server.status()
    console = Console(width=200)
    with console.capture() as captured:
        console.print(shown(Look(server.address, status, status)))
    (line,) = [line for line in captured.get().splitlines() if "[/user]" in line]
    assert line.split()[-9:] == ["8", "50%", "3", "2", "2", "0", "0", "0", "100%"]


def test_what_members_send_and_get_counts_rows_and_a_late_rank_has_the_wait_for_its_gradients(cluster: Cluster) -> None:
    server = cluster.pserver(2)
    workers = cluster.workers([server.address], 2)
    jobs.declare(workers, declared("user"))
    for worker in workers:  # the first step, which counts for no wait
        asked(worker, 0, ids_of(), 0).wait()
    for pushed_first in [added(worker, 0, ids_of(), 0) for worker in workers]:
        pushed_first.wait()
    before = server.status().members
    assert [member.wait_s for member in before] == [0, 0]
    ids = [ids_of(1, 2, 900), ids_of(4)]
    for worker, own in zip(workers, ids, strict=True):
        asked(worker, 0, own, 1).wait()
    asked(workers[1], 0, ids_of(), 4)  # ahead, and without ids
    first = added(workers[1], 0, ids[1], 1)
    jobs.poll(lambda: server.status().tables[0].gradient_rows == 1)
    slice_ = server._job._state.shard.buckets[0].slices[0]
    assert isinstance(slice_, TableSlice)
    with slice_.lock:
        slice_.rounds._steps[1].added[1].came_ns -= 10**12  # as if it had come so much earlier
    assert [member.awaited_slices for member in server.status().members] == [1, 0]
    added(workers[0], 0, ids[0], 1).wait()
    first.wait()
    members = server.status().members
    assert (1000 <= members[0].wait_s < 1500, members[1].wait_s) == (True, 0)
    for old, member, own in zip(before, members, ids, strict=True):
        gradients = np.ones((len(own), DIM), np.float32)
        pushed = len(encode_ids(own)) + len(encode_push(SCALARS.pack(), own, gradients, None))
        assert member.received_bytes - old.received_bytes == pushed + (len(encode_ids(ids_of())) if member.rank else 0)
        more = member.received_slices - old.received_slices, member.sent_slices - old.sent_slices
        assert more == (2 + member.rank, 2)
        assert (member.sent_bytes - old.sent_bytes, member.step) == (4 * DIM * len(own), 1)


def test_where_workers_step_apart_each_step_of_a_rank_is_an_update_and_none_is_late(cluster: Cluster) -> None:
    server = cluster.pserver(2)
    config = dataclasses.replace(jobs.CONFIG, mode="async", update="server")
    workers = first, second = cluster.workers([server.address], 2, config=config)
    jobs.declare(workers, declared("user"))
    for worker, steps in ((first, 2), (second, 1)):
        for step in range(steps):
            added(worker, 0, ids_of(1, 2), step).wait()
    status = server.status()
    (table,) = status.tables
    assert (table.rows, table.updates, table.gradient_rows, table.updated_rows) == (2, 3, 6, 6)
    assert [member.wait_s for member in status.members] == [0, 0]


def test_a_table_of_two_buckets_counts_once_and_tables_of_one_name_are_told_apart(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    (worker,) = cluster.workers([server.address], 1)
    worker.declare([declared("user"), declared("user")])
    asked(worker, 0, ids_of(1), 0).wait()
    added(worker, 0, ids_of(1), 0).wait()
    worker.declare([declared("user", described(admit_after=1), replaces=0)])
    asked(worker, 2, ids_of(1), 1).wait()
    status = server.status()
    assert (status.buckets, status.slices) == (3, 2)
    assert [(table.bucket, table.rows, table.asked_rows) for table in status.tables] == [(2, 1, 2), (1, 0, 0)]
    samples = scraped(server, cluster)
    assert samples["tfps_table_asked_rows_total", "user"] == 2
    assert samples["tfps_table_asked_rows_total", "user (bucket 1)"] == 0


@pytest.mark.parametrize("tables", [2, 3])
def test_no_job_makes_more_series_than_there_may_be(
    tables: int, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfps.pserver.metrics._MOST_TABLES", 1)
    server = cluster.pserver(1)
    (worker,) = cluster.workers([server.address], 1)
    worker.declare([declared(f"{number}" + "x" * 1000) for number in range(tables)])
    for number in range(tables):
        asked(worker, number, ids_of(1, 2), 0).wait()
    found = {label: value for (name, label), value in scraped(server, cluster).items() if "asked" in name}
    assert found == {"0" + "x" * 199: 2, "other tables": 2 * (tables - 1)}
