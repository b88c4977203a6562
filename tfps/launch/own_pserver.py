"""What the processes that mpirun or srun has started tell each other, and the pservers that they start.

Tested in tests/launch/test_meeting.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tfps.errors import ConnectError
from tfps.launch.job import READY, START_S, Job
from tfps.launch.secret import lasting_secret_file

_kept: list[object] = []  # pservers, which last as long as this process


@dataclass(frozen=True)
class Found:
    """What rank 0 tells all.

    Args:
        token: of the job; "": each process knows a file that has it.
        pservers: their addresses; empty in a first message, which pservers are started by.
    """

    job: str
    token: str = field(repr=False)
    pservers: tuple[str, ...] = ()

    @classmethod
    def new(cls, workers: int, token_file: str) -> Found:
        """What there is before there are pservers."""
        return cls(Job.named("mpi", workers).name, "" if token_file else secrets.token_urlsafe(32))

    def at(self, *pservers: str) -> Found:
        return replace(self, pservers=pservers)

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps([self.job, self.token, *self.pservers]).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Found:
        """Reads what `line` has written."""
        job, token, *pservers = json.loads(line)
        return cls(job, token, tuple(pservers))


def start_pserver(found: Found, workers: int, token_file: str, *, on_one_host: bool) -> str:
    """Starts a pserver, which ends with the last worker after this process has ended; returns its address.

    Raises:
        ConnectError: it did not start.
    """
    job = Job(found.job, workers, token_file=lasting_secret_file(found.token) if found.token else token_file)
    arguments = job.pserver_arguments("127.0.0.1" if on_one_host else "")
    # Certificates are for hosts that somebody has chosen.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TFPS_TLS_")}
    with _on_all_cpus():
        pserver = subprocess.Popen(
            [sys.executable, "-m", "tfps.cli", *arguments, "--while-needed", "--quiet"],
            env={**environment, **job.pserver_variables()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for workers
        )
    _kept.append(pserver)
    return _address(pserver)


@contextlib.contextmanager
def _on_all_cpus() -> Iterator[None]:
    """What this thread starts may use every CPU that the machine, or its container, allows (Linux).

    Open MPI binds a process to a core, and what that starts inherits it: a pserver would share the core of its worker.
    Who else binds processes, as Slurm or taskset, means all that they start.
    """
    if not hasattr(os, "sched_setaffinity") or "OMPI_COMM_WORLD_SIZE" not in os.environ:
        yield
        return
    own = os.sched_getaffinity(0)  # of this thread only
    with contextlib.suppress(OSError):  # forbidden: the pserver is slower then, but works
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, own)


def _address(pserver: subprocess.Popen[bytes]) -> str:
    if pserver.stdout is None:
        raise ConnectError("a pserver was started without an output")
    said, deadline = b"", time.monotonic() + START_S
    with selectors.DefaultSelector() as selector:
        selector.register(pserver.stdout, selectors.EVENT_READ)
        while b"\n" not in said and (left := deadline - time.monotonic()) > 0:
            if selector.select(left):
                more = os.read(pserver.stdout.fileno(), 4096)
                if not more:
                    raise ConnectError(
                        f"the pserver of this host did not start, it ended with exit code {pserver.wait()}; what it "
                        "says is above"
                    )
                said += more
    ready = READY.match(said.decode(errors="replace"))
    if ready is None:
        pserver.kill()
        raise ConnectError(f"the pserver of this host was not ready within {START_S:g} s")
    return ready["address"]
