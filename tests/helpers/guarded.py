"""Pservers that have a job token, and what those have who know it."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jobs

from tfps.config import Config
from tfps.exchange.interface import BucketSpec
from tfps.pserver.data_port import DataPort
from tfps.pserver.server import ParameterServer
from tfps.types import Argument
from tfps.worker.worker import Worker

SECRET, OTHER = "the-token-of-this-job-0123456789", "the-token-of-another-0123456789x"
SUM = BucketSpec(("b",), "sum", 40_000, "float32", 0)


def settings(path: str, **more: Argument) -> Config:
    """Of a worker whose job token is in the file `path`."""
    own: dict[str, Argument] = {"slice_bytes": 1024, "shared_memory": False, "token_file": path}
    return Config(**{**own, "connect_timeout_s": jobs.DEADLINE_S, "step_timeout_s": jobs.DEADLINE_S, **more})


def data(server: ParameterServer) -> DataPort:
    assert server._data is not None
    return server._data


def still_sums(worker: Worker) -> None:
    """The job goes on."""
    assert jobs.push(worker, 0, bytes(40_000)).wait().error is None


@contextlib.contextmanager
def serving(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A pserver as a process: its address."""
    with jobs.python("-m", "tfps.pserver.cli", "--port=0", "--host=127.0.0.1", *options) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[3], process


def peak_bytes(process: subprocess.Popen[str]) -> int:
    """The most memory that it has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
