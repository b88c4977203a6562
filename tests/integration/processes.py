"""Worker processes for integration tests: each runs a script beside this file, the pservers run in the test."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import preloaded
from preloaded import Process

from tfps.pserver.server import ParameterServer
from tfps.types import Json, Value

HERE = Path(__file__).resolve().parent
PYTHONPATH = os.pathsep.join(  # with this copy of tfps
    str(HERE.parent / folder) for folder in ("helpers", "programs", "models", "..")
)
TIMEOUT_S = 240.0
_started = itertools.count()


def start(script: str, *arguments: str, environment: Mapping[str, str]) -> Process:
    """One worker process; its output is collected. It imports the package beside these tests, installed or not."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": PYTHONPATH, **environment}
    return preloaded.start(next(_started) % 2, HERE / script, arguments, environment)


def worker_environment(addresses: Sequence[str], rank: int, workers: int, **more: str) -> dict[str, str]:
    """What `tfps_launch` gives to worker `rank`."""
    return {"TFPS_PSERVERS": ",".join(addresses), "TFPS_RANK": str(rank), "TFPS_WORKERS": str(workers), **more}


@contextmanager
def started(
    script: str, addresses: Sequence[str], workers: int, arguments: Sequence[Sequence[str]], **more: str
) -> Iterator[list[Process]]:
    """`workers` processes, each with its `arguments`; none survives the block."""
    processes = [
        start(script, *arguments[rank], environment=worker_environment(addresses, rank, workers, **more))
        for rank in range(workers)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@contextmanager
def pservers(count: int, workers: int) -> Iterator[list[str]]:
    """Their addresses."""
    with ExitStack() as ends:
        servers = [ParameterServer("127.0.0.1", 0, workers=workers) for _ in range(count)]
        for server in servers:
            ends.callback(server.stop)
        yield [server.address for server in servers]


def ran(
    folder: Path,
    programs: Sequence[str],
    settings: Mapping[str, str],
    workers: int = 2,
    count: int = 2,
    timeout_s: float = 550.0,
) -> list[dict[str, dict[str, Value]]]:
    """What programs of program.py, as "module.name", end with on each rank, by their names; on `count` pservers."""
    arguments = [str(folder), *programs]
    with (
        pservers(count, workers) as addresses,
        started("program.py", addresses, workers, [arguments] * workers, **settings) as running,
    ):
        outputs(running, timeout_s)
    return [pickle.loads((folder / f"results_{rank}.pickle").read_bytes()) for rank in range(workers)]


def finish(processes: Sequence[Process], timeout_s: float = TIMEOUT_S) -> list[tuple[int, str]]:
    """Exit code and output of each process."""
    results: list[tuple[int, str]] = []
    for process in processes:
        output, _ = process.communicate(timeout=timeout_s)
        assert process.returncode is not None
        results.append((process.returncode, output))
    return results


def outputs(processes: Sequence[Process], timeout_s: float = TIMEOUT_S) -> list[Json]:
    """The outputs of processes that must all end well."""
    results = finish(processes, timeout_s)
    for rank, (code, output) in enumerate(results):
        assert code == 0, f"worker {rank} ended with {code}:\n{output}"
    return [output for _, output in results]
