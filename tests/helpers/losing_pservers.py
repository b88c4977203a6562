"""Three workers train while pservers are lost."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import jobs
import processes

from tfps.types import Argument, Json

ELASTIC = Path(__file__).resolve().parents[1] / "elastic"
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
TIMEOUT_S = 240.0


@contextlib.contextmanager
def pserver(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process, and its address."""
    serve = ("-m", "tfps.pserver.cli", "--host=127.0.0.1", "--workers=3", "--quiet", *options)
    with jobs.python(*serve) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[3]


def trained(folder: Path, kind: str, faults_of: dict[int, list[Argument]], more: dict[str, str]) -> dict[int, Json]:
    """What three workers with three pservers end with. The last of a fault are the numbers of pservers that get it."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(pserver("--port=0")) for _ in range(int(more.get("PSERVERS", 3)))]
        environment = {
            "TFPS_MIN_WORKERS": "1",
            "TFPS_SLICE_BYTES": "2048",
            "TFPS_DETERMINISTIC": "1",
            "PYTHONPATH": f"{ELASTIC}{os.pathsep}{processes.PYTHONPATH}",
            **more,
        }
        tasks = []
        for rank in range(3):
            fault = list(faults_of.get(rank, ()))
            if fault:
                fault[-1] = [servers[number][0].pid for number in fault[-1]]
            tasks.append([str(folder), kind, json.dumps(fault or None)])
        addresses = [address for _, address in servers]
        with processes.started("../elastic/lossy.py", addresses, 3, tasks, **environment) as started:
            if "--join" in more:  # another one, once the first is gone
                servers[1][0].wait(TIMEOUT_S)
                stack.enter_context(pserver("--port=0", f"--join={addresses[0]}"))
            if "at its address" in more:
                servers[0][0].wait(TIMEOUT_S)
                stack.enter_context(pserver(f"--port={addresses[0].rpartition(':')[2]}"))
            ended = processes.finish(started, TIMEOUT_S)
    assert [code for code, _ in ended] == [0, 0, 0], "\n".join(output for _, output in ended)
    assert not faults_of or all("the workers meet, to go on with the pservers" in output for _, output in ended)
    return {rank: pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in range(3)}


def same(found: dict[int, Json], expected: Sequence[Json]) -> bool:
    """Whether all ranks have these weights, bit for bit, and have lost nothing."""
    for rank in range(3):
        assert [w.tobytes() for w in found[rank]["weights"]] == [w.tobytes() for w in found[0]["weights"]]
        assert (found[rank]["losses"], list(found[rank]["ranks"])) == ([], [0, 1, 2])
    return [w.tobytes() for w in found[0]["weights"]] == [w.tobytes() for w in expected]
