"""Processes that mpirun starts, or that believe so."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Collection
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from launching import ROOT

END_S = 280.0  # for mpirun to end
MPIRUNS = {"Open MPI": "mpirun.openmpi", "MPICH": "mpirun.mpich"}  # as Debian calls them
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# Creates no strategy, which needs TensorFlow, but joins the job like one.
MEMBER = """
import os, sys
from tfps.config import Config
from tfps.errors import TfpsError
from tfps.launch.rendezvous import rendezvous
from tfps.launch.cluster_spec import locate
from tfps.worker.worker import Worker
ranks = locate(None).others
try:
    variables = rendezvous(ranks, os.environ.get("TFPS_TOKEN_FILE", ""), float(os.environ.get("LIMIT_S", 60)))
except TfpsError as error:
    sys.exit(f"rank {ranks.rank}: {error}")
os.environ.update(variables)
pservers = variables["TFPS_PSERVERS"].split(",")
worker = Worker(pservers, rank=ranks.rank, workers=ranks.workers, job=variables["TFPS_JOB"], config=Config())
# In one piece: processes share the output.
sys.stdout.write(f"member {worker.rank} {worker.view.workers} {len(pservers)} {variables['TFPS_JOB']}\\n")
worker.close()
"""


def missing(mpi: str, *, mpi4py: bool = False) -> str:
    """What is not installed, for the reason of a skip; "": nothing."""
    lacking = [MPIRUNS[mpi]] * (shutil.which(MPIRUNS[mpi]) is None)
    lacking += ["mpi4py"] * (mpi4py and find_spec("mpi4py") is None)
    return f"needs {' and '.join(lacking)}" if lacking else ""


def needs(mpi: str, *, mpi4py: bool = False) -> pytest.MarkDecorator:
    """Skips a test where `mpi` is not installed."""
    lacking = missing(mpi, mpi4py=mpi4py)
    return pytest.mark.skipif(bool(lacking), reason=lacking)


def environment(**more: str) -> dict[str, str]:
    """Without the variables of a job that the tests themselves may be part of."""
    ours = ("OMPI_", "PMI_", "PMIX_", "SLURM", "TFPS_", "MPI_")
    outside = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**outside, **AS_ROOT, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **more}


def mpirun(mpi: str, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs mpirun to its end; `more`: variables of its environment."""
    options = ["--oversubscribe"] if mpi == "Open MPI" else []
    return subprocess.run(
        [MPIRUNS[mpi], *options, *map(str, arguments)],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )


def two_hosts(folder: Path, *, with_names: bool = False) -> list[object]:
    """Options by which Open MPI takes this machine for two hosts of two processes each.

    Args:
        with_names: the second one has a name of its own, which nobody can resolve (needs root).
    """
    # Both have the same files in shared memory: MPI must use sockets.
    return [
        *("--mca", "plm_rsh_agent", _agent(folder, with_names=with_names), "--mca", "btl", "self,tcp"),
        *("-H", f"{socket.gethostname()}:2,other:2", "-n", 4),
    ]


def variables_for_hosts(folder: Path) -> dict[str, str]:
    """Variables by which Open MPI takes this machine for any host, and lets it have more processes than cores."""
    options = {"plm_rsh_agent": str(_agent(folder)), "btl": "self,tcp", "rmaps_base_oversubscribe": "1"}
    own = {f"OMPI_MCA_{name}": value for name, value in options.items()}
    return {**AS_ROOT, **own}


def _agent(folder: Path, *, with_names: bool = False) -> Path:
    """What stands for ssh."""
    agent = folder / "agent"
    command = 'unshare --uts sh -c "hostname other; $*"' if with_names else 'sh -c "$*"'
    agent.write_text(f"#!/bin/sh\nshift\nexec {command}\n")
    agent.chmod(0o755)
    return agent


def believing(rank: int, workers: int, **more: str) -> subprocess.Popen[str]:
    """A member that has the variables that MPICH's mpirun would give it."""
    variables = {"PMI_RANK": str(rank), "PMI_SIZE": str(workers), "MPI_LOCALNRANKS": str(workers), **more}
    return subprocess.Popen(
        [sys.executable, "-c", MEMBER],
        env=environment(MPI_LOCALRANKID=str(rank), **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def members(output: str) -> list[list[str]]:
    """What each of them has printed: rank, workers, pservers, job."""
    return sorted(line.split()[1:] for line in output.splitlines() if line.startswith("member "))


def no_pserver_has(words: Callable[[psutil.Process], Collection[str]], word: str) -> bool:
    """Whether no pserver that a member has started, of this test or another, has `word` among those."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it may end meanwhile
            if "--while-needed" in process.cmdline() and word in words(process):
                return False
    return True
