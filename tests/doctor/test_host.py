"""This host: open files, memory, memory to share."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

from tfps.config import Config
from tfps.doctor.host import available_bytes, container_available_bytes, memory, open_files, shared_memory
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


@pytest.mark.parametrize(
    ("limit", "used", "statistics"),
    [
        ("memory.max", "memory.current", "anon 300\ninactive_file 500\nactive_file 100\n"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "inactive_file 7\ntotal_inactive_file 500\n",
        ),
    ],
)
def test_cached_files_of_a_container_count_as_free(limit: str, used: str, statistics: str, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("1000\n")
    (tmp_path / used).write_text("900\n")
    assert container_available_bytes(tmp_path) == 100
    (tmp_path / used).with_name("memory.stat").write_text(statistics)
    assert container_available_bytes(tmp_path) == 600
    (tmp_path / used).write_text("400\n")  # read a moment earlier than the statistics
    assert container_available_bytes(tmp_path) == 1000


def test_a_container_without_a_limit_has_what_its_host_has(tmp_path: Path) -> None:
    assert container_available_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("900\n")
    assert container_available_bytes(tmp_path) is None


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
