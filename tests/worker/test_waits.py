"""Who waits says for whom, in one line; who does not wait says nothing."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import jobs
import numpy as np
import pytest
from jobs import Cluster

from tfps.exchange.interface import BucketSpec
from tfps.pserver import server
from tfps.worker import client
from tfps.worker.client import saying

ME = f"{socket.gethostname()}:{os.getpid()}"
SPEC = BucketSpec(("dense/kernel", "dense/bias"), "sum", 4000, "float32", 0)
ONES = np.ones(1000, np.float32)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PATIENCE_S", 0.3)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What has been said so far, in the order in which it was."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Lines()
    logging.getLogger("tfps").addHandler(handler)
    yield lines
    logging.getLogger("tfps").removeHandler(handler)


def test_a_pserver_that_does_not_answer_is_named(cluster: Cluster, said: list[str]) -> None:
    port = jobs.unused_ports(1)

    def serve() -> None:
        jobs.poll(lambda: bool(said))
        cluster.pserver(1, port)

    jobs.together(lambda: cluster.worker([f"127.0.0.1:{port}"]), serve)
    why = "127.0.0.1: refused: nothing listens there"
    line = f"tfps: waits for pserver 127.0.0.1:{port}, which does not answer ({why}); is tfps_pserver running there?"
    assert said == [line]


def test_ranks_that_have_not_joined_declared_or_pushed_are_named_once_each(cluster: Cluster, said: list[str]) -> None:
    address = cluster.pserver(2).address
    come = [threading.Event() for _ in range(3)]  # rank 1 joins, declares, pushes

    def wait_for(event: threading.Event) -> None:
        assert event.wait(jobs.DEADLINE_S)

    def second() -> None:
        wait_for(come[0])
        worker = cluster.worker([address], 1)
        wait_for(come[1])
        worker.declare([SPEC])
        wait_for(come[2])
        jobs.push(worker, 0, ONES).wait()

    def first() -> None:
        worker = cluster.worker([address], 0)
        worker.declare([SPEC])
        jobs.push(worker, 0, ONES).wait()

    expected = [
        "tfps: waits for rank 1 (not joined) to join",
        f"tfps: waits for rank 1 ({ME}) to declare the same variables",
        f"tfps: waits for rank 1 ({ME}); ",
    ]

    def watch() -> None:
        for line, event in zip(expected, come, strict=True):
            jobs.poll(lambda line=line: any(each.startswith(line) for each in said))  # type: ignore[misc]
            event.set()

    jobs.together(first, second, watch)
    # Of rank 1 only: on a busy machine it may itself have to wait for rank 0.
    of_rank_1 = [line for line in said if "waits for rank 1" in line]
    assert [line.startswith(start) for line, start in zip(of_rank_1, expected, strict=True)] == [True] * 3
    assert of_rank_1[2].endswith(" s so far, step 0 of dense/kernel and 1 more")


def test_a_worker_that_still_belongs_to_an_earlier_job_is_named(cluster: Cluster, said: list[str]) -> None:
    address = cluster.pserver(2).address
    old = [cluster.raw(address, rank).open() for rank in range(2)]
    old[0].leave()  # and rank 1 does not

    def leave() -> None:
        jobs.poll(lambda: any("earlier job" in line for line in said))
        old[1].leave()

    new = [functools.partial(cluster.worker, [address], rank) for rank in range(2)]
    jobs.together(*new, leave)
    where = f"tfps: waits for pserver {address}, where an earlier job has not ended: "
    assert f"{where}rank 1 (rawhost:{os.getpid()}) is there" in said


def test_a_pserver_that_hangs_is_named(cluster: Cluster, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_ASK_TIMEOUT_S", 0.5)
    with jobs.python("-m", "tfps.pserver.cli", "--host=127.0.0.1", "--port=0", "--workers=1") as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[3]
        worker = cluster.worker([address])
        worker.declare([SPEC])
        process.send_signal(signal.SIGSTOP)
        jobs.poll(lambda: _is_stopped(process.pid))
        pending = jobs.push(worker, 0, ONES)
        jobs.poll(lambda: any("does not answer" in line for line in said))
        process.send_signal(signal.SIGCONT)
        pending.wait()
        worker.close()
    assert any(line.startswith(f"tfps: waits for pserver {address}, which does not answer; ") for line in said)


def _is_stopped(pid: int) -> bool:
    """Whether all threads of a process stand still; on a busy machine some still run after the signal."""
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def test_the_same_rank_is_not_named_again_at_the_next_step(cluster: Cluster, said: list[str]) -> None:
    address = cluster.pserver(2).address
    workers = cluster.workers([address], 2)
    jobs.together(*(functools.partial(worker.declare, [SPEC]) for worker in workers))
    waits, rank_1 = workers[0]._waits, f"tfps: waits for rank 1 ({ME})"
    for _ in range(2):
        pending = jobs.push(workers[0], 0, ONES)
        for _ in range(2):  # when the second look begins the first has said what it had to say
            asked_s = waits._asked_s
            jobs.poll(lambda asked_s=asked_s: waits._asked_s != asked_s)  # type: ignore[misc]
        jobs.poll(lambda: any(line.startswith(f"{rank_1}; ") for line in said))
        jobs.push(workers[1], 0, ONES).wait()
        pending.wait()
    # Once, or again after something else: on a busy machine slices may be on their way for long enough to be named.
    named = [line.partition("; ")[0] for line in said if " s so far, " in line]
    assert all(one != rank_1 or next_one != rank_1 for one, next_one in itertools.pairwise(named))


def test_a_quick_block_says_nothing_and_a_failing_question_breaks_nothing(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def whom() -> str:
        asked.set()
        raise RuntimeError("no idea")

    monkeypatch.setattr(client, "PATIENCE_S", jobs.DEADLINE_S)  # longer than any machine takes for nothing
    with saying(lambda: "nobody"):
        pass
    monkeypatch.setattr(client, "PATIENCE_S", 0.01)
    with saying(whom):
        assert asked.wait(jobs.DEADLINE_S)
    assert said == []


def test_a_rank_that_compiles_is_named_so_as_long_as_it_does(cluster: Cluster, said: list[str]) -> None:
    address = cluster.pserver(2).address
    workers = cluster.workers([address], 2)
    jobs.together(*(functools.partial(worker.declare, [SPEC]) for worker in workers))
    pending, rank_1 = jobs.push(workers[0], 0, ONES), f"tfps: waits for rank 1 ({ME})"
    workers[1].peers.tell_compiling(True)
    jobs.poll(lambda: any(line.startswith(f"{rank_1}, which compiles; ") for line in said))
    told = len(said)
    workers[1].peers.tell_compiling(False)
    jobs.poll(lambda: any(line.startswith(f"{rank_1}; ") for line in said[told:]))
    jobs.push(workers[1], 0, ONES).wait()
    pending.wait()


def test_an_older_pserver_is_told_nothing_and_nothing_fails(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.delitem(server._JOB_CALLS, "Busy")
    (worker,) = jobs.job(cluster, 1, SPEC)
    worker.peers.tell_compiling(True)
    jobs.push(worker, 0, ONES).wait()
    assert said == []
