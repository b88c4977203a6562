"""Processes on one host find each other without a word of the user."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import jobs
import mpi
import psutil
import pytest

from tfps.errors import ConnectError, WaitTimeoutError
from tfps.launch import meet_on_host
from tfps.launch.ranks import Ranks

NEEDS_LINUX = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
pytestmark = NEEDS_LINUX
RANKS = Ranks("mpirun (PMI)", "PMI_RANK", 1, 2, 1, 2, "somebody's")


@pytest.fixture
def start() -> Iterator[ExitStack]:
    """Ends all processes that enter it."""
    with ExitStack() as stack:
        yield stack


def member(start: ExitStack, rank: int, workers: int, **more: str) -> subprocess.Popen[str]:
    process = start.enter_context(mpi.believing(rank, workers, **more))
    start.callback(process.kill)
    return process


def test_all_find_the_pserver_of_rank_0_and_it_ends_with_them(start: ExitStack) -> None:
    processes = [member(start, rank, 3) for rank in range(3)]
    results = [process.communicate(timeout=jobs.DEADLINE_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], results
    found = [mpi.members(out)[0] for out, _ in results]
    jobs_names = {name for *_, name in found}
    assert [words[:3] for words in found] == [[str(rank), "3", "1"] for rank in range(3)]
    assert len(jobs_names) == 1
    (name,) = jobs_names
    jobs.poll(lambda: mpi.no_pserver_has(lambda pserver: pserver.cmdline(), name))


def test_who_does_not_come_is_named_and_no_pserver_is_left(start: ExitStack) -> None:
    process = member(start, 0, 4, LIMIT_S="0.2")
    _, errors = process.communicate(timeout=jobs.DEADLINE_S)
    assert errors.strip().endswith(
        "rank 0: 3 of the 4 processes of mpirun (PMI) did not create a tfps.Strategy within 0.2 s (connect_timeout_s): "
        "rank 1, 2, 3"
    )
    jobs.poll(lambda: mpi.no_pserver_has(lambda pserver: [pserver.environ().get("LIMIT_S", "")], "0.2"))


def test_without_rank_0_the_error_says_so() -> None:
    with pytest.raises(WaitTimeoutError, match=r"rank 0 of the 2 processes of mpirun .* within 0\.3 s .* is rank 1"):
        meet_on_host.meet(RANKS, "", 0.3)


def test_a_second_rank_0_is_refused() -> None:
    first = Ranks("mpirun (PMI)", "PMI_RANK", 0, 2, 0, 2, "taken")
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(meet_on_host.socket_name(first))
        with pytest.raises(ConnectError, match="cannot listen for the others, another process with rank 0 does"):
            meet_on_host.meet(first, "", 0.3)


def test_jobs_and_their_starts_have_names_of_their_own() -> None:
    other = Ranks("mpirun (PMI)", "PMI_RANK", 1, 2, 1, 2, "another's")
    assert meet_on_host.socket_name(RANKS) == meet_on_host.socket_name(RANKS)
    assert meet_on_host.socket_name(RANKS) != meet_on_host.socket_name(other)


def test_a_killed_rank_0_leaves_nothing(start: ExitStack) -> None:
    process = member(start, 0, 2, LIMIT_S="300")
    own = psutil.Process(process.pid)
    jobs.poll(lambda: bool(own.children()))
    (pserver,) = own.children()
    process.send_signal(signal.SIGKILL)
    jobs.poll(lambda: not pserver.is_running() or pserver.status() == psutil.STATUS_ZOMBIE)
