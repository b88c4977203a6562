"""Worker processes for integration tests: each runs a script beside this file, the pservers run in the test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PYTHONPATH = os.pathsep.join([str(HERE.parent / "helpers"), str(HERE.parent.parent)])  # and this copy of tfps
TIMEOUT_S = 240.0


def start(script: str, *arguments: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """One worker process; its output is collected. It imports the package beside these tests, installed or not."""
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *arguments],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": PYTHONPATH, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def worker_environment(addresses: Sequence[str], rank: int, workers: int, **more: str) -> dict[str, str]:
    """What `tfps_launch` gives to worker `rank`."""
    return {"TFPS_PSERVERS": ",".join(addresses), "TFPS_RANK": str(rank), "TFPS_WORKERS": str(workers), **more}


@contextmanager
def started(
    script: str, addresses: Sequence[str], workers: int, arguments: Sequence[Sequence[str]], **more: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """`workers` processes, each with its `arguments`; none survives the block."""
    processes = [
        start(script, *arguments[rank], environment=worker_environment(addresses, rank, workers, **more))
        for rank in range(workers)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.communicate()


def finish(processes: Sequence[subprocess.Popen[str]], timeout_s: float = TIMEOUT_S) -> list[tuple[int, str]]:
    """Exit code and output of each process."""
    results: list[tuple[int, str]] = []
    for process in processes:
        output, _ = process.communicate(timeout=timeout_s)
        results.append((process.returncode, output))
    return results


def outputs(processes: Sequence[subprocess.Popen[str]], timeout_s: float = TIMEOUT_S) -> list[Any]:
    """The outputs of processes that must all end well."""
    results = finish(processes, timeout_s)
    for rank, (code, output) in enumerate(results):
        assert code == 0, f"worker {rank} ended with {code}:\n{output}"
    return [output for _, output in results]
