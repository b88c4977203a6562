"""Rendezvous of the processes that mpirun or srun has started, which start pservers of their own (docs/design.md)."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import secrets
import select
import socket
import struct
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tfps.errors import ConfigError, ConnectError, WaitTimeoutError
from tfps.launch.cluster_spec import Ranks
from tfps.launch.job import READY, START_S, Job, families, lasting_secret_file
from tfps.types import Communicator, Json

_LOOK_S = 0.02  # between two looks for a message, and how long Ctrl-C may go unnoticed
_MAX_BYTES = 65536  # of a message through a socket
_ABIS = {"OMPI_COMM_WORLD_RANK": "openmpi", "PMI_RANK": "mpich"}
_TAG = 7701  # which a program's own messages hardly have
_kept: list[object] = []  # pservers, which last as long as this process


def rendezvous(ranks: Ranks, token_file: str, timeout_s: float) -> dict[str, str]:
    """Returns the variables by which a worker finds the others (`tfps.config.Launch`), as `tfps_launch` sets them.

    Without a `token_file` on each host, rank 0 makes a token. All must come within `timeout_s`. Raises ConnectError if
    a pserver did not start, a process has ended meanwhile, or somebody else answers.
    """
    instead = (
        f"start `tfps_pserver --workers {ranks.workers or 'N'}` yourself and set TFPS_PSERVERS=HOST:PORT,...; or set "
        "TFPS_WORKERS=1 if each process is to train alone"
    )
    if ranks.workers is None:
        raise ConfigError(
            f"{ranks.variable}={ranks.rank} says that {ranks.source} has started this process with others, but not how "
            f"many; {instead}"
        )
    if not sys.platform.startswith("linux"):
        raise ConfigError(f"the processes of {ranks.source} find each other on Linux only; {instead}")
    if not ranks.on_one_host and not ranks.has_mpi:
        raise ConfigError(
            f"srun has started {ranks.workers} processes on several nodes, and no pservers are named: start "
            f"`tfps_launch --slurm` once instead, without srun; or {instead}"
        )
    try:
        link = HostLink(ranks, timeout_s) if ranks.on_one_host else MpiLink(ranks, timeout_s)
    except ConfigError as error:
        raise ConfigError(
            f"{ranks.source} has started {ranks.workers} processes, not all of them on this host, and no pservers "
            f"are named. {error}; or {instead}"
        ) from None
    with contextlib.closing(link):
        take_part = _lead if ranks.rank == 0 else _follow
        return take_part(link, ranks, token_file).worker_variables(ranks.rank)


def _lead(link: Link, ranks: Ranks, token_file: str) -> Job:
    """Rank 0's part."""
    others = range(1, ranks.workers or 1)
    token = "" if token_file else secrets.token_urlsafe(32)
    job = Job.named("mpi", len(others) + 1, lasting_secret_file(token) if token else token_file)
    offers = [start_pserver(job, ranks.on_one_host)] if ranks.local_rank in (0, None) else []  # others are on their way
    places = link.receive(others)
    starters = first_of_hosts({0: _place(ranks), **places}) - {0}
    if not offers and not starters:
        offers.append(start_pserver(job, ranks.on_one_host))
    for rank in others:
        link.send(rank, [job.name, token, rank in starters])
    offers += link.receive(sorted(starters)).values()
    # Hosts of a job know each other by name, as mpirun does. Where one does not, as in containers, none is trusted.
    by_name = not ranks.on_one_host and all(families(name) for _, name in offers)
    job = job.at([f"{name}:{address.rpartition(':')[2]}" if by_name else address for address, name in offers])
    for rank in others:
        link.send(rank, job.pservers)
    link.flush()
    return job


def _follow(link: Link, ranks: Ranks, token_file: str) -> Job:
    """The part of all other ranks."""
    link.send(0, _place(ranks))
    name, token, starts = link.receive([0])[0]
    job = Job(name, ranks.workers or 1, token_file=lasting_secret_file(token) if token else token_file)
    if starts:
        link.send(0, start_pserver(job, ranks.on_one_host))
    return job.at(link.receive([0])[0])


def _place(ranks: Ranks) -> list[Json]:
    """The place of a process among those of its host, if known, and what only its host is called."""
    host = socket.gethostname()
    with contextlib.suppress(OSError):  # some containers hide it
        host += Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
    return [ranks.local_rank, host]


def first_of_hosts(places: Mapping[int, Json]) -> set[int]:
    """The ranks that are the first on their hosts."""
    unknown = {host: rank for rank, (local_rank, host) in sorted(places.items(), reverse=True) if local_rank is None}
    return {*unknown.values(), *(rank for rank, (local_rank, _) in places.items() if local_rank == 0)}


class Link(ABC):
    """Messages (what JSON can have) between rank 0 and each of the others, with a deadline. For one thread."""

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        self._ranks, self._timeout_s = ranks, timeout_s
        # The others give up later: rank 0 knows who is missing, and says so first.
        self._end_s = time.monotonic() + timeout_s * (1.0 if ranks.rank == 0 else 1.25)

    @abstractmethod
    def send(self, rank: int, message: Json) -> None:
        """Returns at once."""

    @abstractmethod
    def look(self, rank: int) -> Json | None:
        """The next message from `rank`, if it has arrived."""

    def receive(self, ranks: Iterable[int]) -> dict[int, Json]:
        """One message from each of `ranks`, in their order."""
        found: dict[int, Json] = dict.fromkeys(ranks)

        def missing() -> list[int]:
            for rank, message in found.items():
                if message is None:
                    found[rank] = self.look(rank)
            return [rank for rank, message in found.items() if message is None]

        self._wait(missing)
        return found

    def flush(self) -> None:
        """Waits until the others have what was sent."""
        return

    def close(self) -> None:
        return

    def _wait(self, missing: Callable[[], list[int]]) -> None:
        """Until no rank is missing."""
        while late := missing():
            if time.monotonic() <= self._end_s:
                time.sleep(_LOOK_S)
                continue
            ranks, limit = self._ranks, f"within {self._timeout_s:g} s (connect_timeout_s)"
            if ranks.rank == 0:
                raise WaitTimeoutError(
                    f"{len(late)} of the {ranks.workers} processes of {ranks.source} did not create a tfps.Strategy "
                    f"{limit}: rank {', '.join(map(str, late))}"
                )
            raise WaitTimeoutError(
                f"rank 0 of the {ranks.workers} processes of {ranks.source} did not answer {limit}, this is rank "
                f"{ranks.rank}; all of them must create a tfps.Strategy, and processes of one host must see the same "
                "processes and network, as they do outside of containers"
            )


class HostLink(Link):
    """Between processes of one host: rank 0 listens at a socket, not of a file, whose name they all can tell."""

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        super().__init__(ranks, timeout_s)
        self._connections: dict[int, socket.socket] = {}
        self._strangers: list[socket.socket] = []  # have not said their rank yet
        self._listener = _socket() if ranks.rank == 0 else None
        if self._listener is None:
            self._wait(lambda: [] if self._connect(socket_name(ranks)) else [0])
            return
        try:
            self._listener.bind(socket_name(ranks))
        except OSError as error:
            self.close()
            raise ConnectError(
                f"rank 0 of {ranks.source} cannot listen for the others, another process with rank 0 does: {error}"
            ) from None
        self._listener.listen((ranks.workers or 1) + 8)

    def send(self, rank: int, message: Json) -> None:
        try:
            self._connections[rank].sendall(json.dumps(message).encode())
        except OSError:
            raise self._lost(rank) from None

    def look(self, rank: int) -> Json | None:
        if self._listener is not None:
            self._accept(self._listener)
        message = _received(self._connections[rank]) if rank in self._connections else None
        if message == b"":
            raise self._lost(rank)
        return None if message is None else json.loads(message)

    def close(self) -> None:
        for each in (*self._connections.values(), *self._strangers, *filter(None, [self._listener])):
            each.close()

    def _connect(self, name: str) -> bool:
        connection = _socket()
        try:
            connection.connect(name)
            connection.sendall(str(self._ranks.rank).encode())
        except OSError:  # it does not listen yet
            connection.close()
            return False
        if not _is_own(connection):
            connection.close()
            raise ConnectError(f"another user of this host answers in the place of rank 0 of {self._ranks.source}")
        self._connections[0] = connection
        return True

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = listener.accept()
                connection.setblocking(False)
                self._strangers.append(connection)
        for each in list(self._strangers):
            said = _received(each) if _is_own(each) else b""
            if said is None:
                continue
            self._strangers.remove(each)
            if said.isdigit():
                self._connections[int(said)] = each
            else:
                each.close()

    def _lost(self, rank: int) -> ConnectError:
        return ConnectError(
            f"rank {rank} of {self._ranks.source} ended before all processes had found each other; what it says is in "
            "its output"
        )


def _socket() -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps messages apart
    found.setblocking(False)
    return found


def _received(connection: socket.socket) -> bytes | None:
    """The next message; None: there is none yet; b"": the other end is closed."""
    try:
        return connection.recv(_MAX_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _is_own(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())


def socket_name(ranks: Ranks) -> str:
    """What rank 0 listens at, in the abstract namespace: no other job of this host and this network has it."""
    job = ranks.job if ranks.job.startswith("slurm-") else f"{ranks.job} {_started_by(ranks)}"
    return f"\0tfps-rendezvous-{os.getuid()}-{hashlib.sha256(job.encode()).hexdigest()[:32]}"


def _started_by(ranks: Ranks) -> str:
    """The process that has started the ranks, or what did it on this host: the next above that has no rank itself."""
    process = os.getpid()
    while process > 1:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        try:
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        except OSError:
            variables = []  # another user's, hence none of the ranks
        if process != os.getpid() and f"{ranks.variable}={ranks.rank}".encode() not in variables:
            return f"{process} {status[19]}"  # the time of its start: numbers are given again
        process = int(status[1])
    return "0"


class MpiLink(Link):
    """Between processes of several hosts, by mpi4py."""

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        super().__init__(ranks, timeout_s)
        if ranks.variable in _ABIS:  # a wheel of mpi4py has a module for each MPI, and may choose one that is not there
            os.environ.setdefault("MPI4PY_MPIABI", _ABIS[ranks.variable])
        try:
            mpi = importlib.import_module("mpi4py.MPI")
        except (ImportError, RuntimeError, OSError) as error:
            raise ConfigError(
                f"They would find each other by mpi4py, which cannot be imported ({error}): pip install 'tfps[mpi]'"
            ) from None
        if not mpi.Is_initialized() or mpi.Is_finalized():
            raise ConfigError(
                "They would find each other by mpi4py, but the program has not initialized MPI, or ended it"
            )
        self._world: Communicator = mpi.COMM_WORLD
        if (self._world.Get_rank(), self._world.Get_size()) != (ranks.rank, ranks.workers):
            raise ConfigError(
                f"They would find each other by mpi4py, but it sees {self._world.Get_size()} processes: it has loaded "
                "another MPI than that of mpirun (`python -m mpi4py --mpi-library` says which)"
            )
        self._sending: list[Communicator] = []

    def send(self, rank: int, message: Json) -> None:
        self._sending.append(self._world.isend(message, rank, _TAG))

    def look(self, rank: int) -> Json | None:
        # MPI itself would wait without end.
        return self._world.recv(source=rank, tag=_TAG) if self._world.iprobe(source=rank, tag=_TAG) else None

    def flush(self) -> None:
        self._wait(lambda: [] if all(request.Test() for request in self._sending) else [0])


def start_pserver(job: Job, on_one_host: bool) -> list[str]:
    """Starts a pserver, which ends after this process with the last worker; its address, and the name of this host."""
    arguments = job.pserver_arguments("127.0.0.1" if on_one_host else "")
    # Certificates are for hosts that somebody has chosen.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TFPS_TLS_")}
    with _on_all_cpus():
        pserver = subprocess.Popen(
            [sys.executable, "-m", "tfps.pserver.cli", *arguments, "--while-needed", "--quiet"],
            env={**environment, **job.pserver_variables()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for workers
        )
    _kept.append(pserver)
    said = b""
    if pserver.stdout and select.select([pserver.stdout], [], [], START_S)[0]:
        said = pserver.stdout.readline()
        if not said:
            raise ConnectError(
                f"the pserver of this host did not start, it ended with exit code {pserver.wait()}; what it says is "
                "above"
            )
    ready = READY.match(said.decode(errors="replace"))
    if ready is None:
        pserver.kill()
        raise ConnectError(f"the pserver of this host was not ready within {START_S:g} s")
    return [ready["address"], socket.gethostname()]


@contextlib.contextmanager
def _on_all_cpus() -> Iterator[None]:
    """What this thread starts may use every CPU that the machine, or its container, allows (Linux).

    Open MPI binds a process to a core, which a pserver would inherit. Who else binds processes, as Slurm or taskset,
    means all that they start.
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
