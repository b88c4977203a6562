"""This host: open files, memory, memory to share."""

from __future__ import annotations

import resource
import sys

import pytest

from tfps.config import Config
from tfps.doctor.host import available_bytes, memory, open_files, shared_memory
from tfps.wire.memory import machine_bytes

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="of Linux")


@pytest.mark.parametrize(
    ("limit", "peers", "status"),
    [(1024, 4, "ok"), (1023, 4, "warning"), (143, 4, "failed"), (144, 4, "warning"), (1024, 300, "failed")],
)
def test_open_files_suffice_for_so_many_peers(limit: int, peers: int, status: str) -> None:
    check = open_files(peers, limit)
    assert check.status == status
    assert check.values == {"limit": limit, "least": 128 + 4 * peers}
    assert status == "ok" or "ulimit -n" in check.advice


def test_a_limit_below_what_many_peers_need_says_how_many() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        check = open_files(1000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert check.advice == "a process may open 512 files and needs 4128 for 1000 peers: ulimit -n 8192"


@on_linux
def test_memory_is_what_is_left_of_what_there_is() -> None:
    left = available_bytes()
    assert left is not None
    assert 0 < left <= machine_bytes()
    assert memory().values["total_bytes"] == machine_bytes()


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfps.doctor.host.available_bytes", lambda: 2**29)
    check = memory()
    assert (check.status, check.problem) == ("warning", "low")
    assert check.advice.startswith("only 0.5 GiB of memory is free")


@on_linux
def test_this_host_has_memory_to_share_unless_it_is_turned_off() -> None:
    assert shared_memory(Config()).status == "ok"
    assert shared_memory(Config(shared_memory=False)).status == "skipped"


def test_a_system_without_memfd_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create", raising=False)
    check = shared_memory(Config())
    assert check.status == "warning"
    assert "memfd_create is for Linux" in check.advice
