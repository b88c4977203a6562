"""How the benchmark of memory finds a peak, and what it makes of it."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading

import pytest

from tools import children
from tools.benchmarks import memory as benchmark
from tools.peer_runs import PEERS
from tools.peers import PeerError

BLOCK_BYTES = 64 << 20


def test_memory_is_what_a_process_has_touched() -> None:
    before = children.memory_bytes(os.getpid())
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        untouched = children.memory_bytes(os.getpid())
        block.write(bytes(BLOCK_BYTES))
        touched = children.memory_bytes(os.getpid())
    assert untouched - before < BLOCK_BYTES / 2
    assert touched - before > BLOCK_BYTES / 2


def test_a_process_that_has_ended_has_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert children.memory_bytes(process.pid) == 0


def test_a_peak_stays_when_what_is_read_falls_again() -> None:
    values, read = iter([3, 7]), threading.Event()

    def next_value() -> int:
        value = next(values, 1)
        if value == 1:
            read.set()
        return value

    with children.Peak(next_value, 1e-3) as peak:
        assert read.wait(10)
    assert peak.value == 7


def test_a_system_that_is_counted_twice_and_one_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(peer: str, *_: object, **__: object) -> dict[str, float]:
        if peer == "horovod":
            raise PeerError("no")
        return {"peak_bytes": 1.5e9}

    monkeypatch.setattr(benchmark, "measure", measure)
    monkeypatch.setitem(PEERS, "horovod", PEERS["alone"])  # as if it were installed
    found = benchmark.run(quick=True)
    assert found.headline["alone, twice (GB)"] == 3.0
    assert found.headline["tfps (GB)"] == 1.5
    assert "Horovod (GB)" not in found.headline
    assert [one["failed"] for one in found.runs if one["kind"] == "Horovod"] == ["no"]
