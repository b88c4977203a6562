"""Processes of one job on several hosts find each other by MPI's messages (mpi4py). Nothing else is sent by MPI."""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tfps.errors import ConfigError, WaitTimeoutError
from tfps.launch.own_pserver import Found, start_pserver
from tfps.launch.ranks import Ranks
from tfps.types import Communicator

_ABIS = {"OMPI_COMM_WORLD_RANK": "openmpi", "PMI_RANK": "mpich"}
_LOOK_S = 0.01
_ONE_BYTES, _ALL_BYTES = 4096, 1 << 20  # of messages: about one pserver, about those of 4096 hosts
_JOB, _PSERVER, _ALL, _HERE = 7701, 7702, 7703, 7704  # tags that a program's own messages hardly have


def communicator(ranks: Ranks) -> Communicator:
    """MPI's communicator of all processes.

    Raises:
        ConfigError: there is none, or it has other processes than `ranks` says.
    """
    if ranks.variable in _ABIS:  # a wheel of mpi4py has a module for each MPI, and may choose one that is not there
        os.environ.setdefault("MPI4PY_MPIABI", _ABIS[ranks.variable])
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"They would find each other by mpi4py, which cannot be imported ({error}): pip install 'tfps[mpi]'"
        ) from None
    if not mpi.Is_initialized() or mpi.Is_finalized():
        raise ConfigError("They would find each other by mpi4py, but the program has not initialized MPI, or ended it")
    world = mpi.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (ranks.rank, ranks.workers):
        raise ConfigError(
            f"They would find each other by mpi4py, but it sees {world.Get_size()} processes: it has loaded another "
            "MPI than that of mpirun (`python -m mpi4py --mpi-library` says which)"
        )
    return world


def meet(world: Communicator, ranks: Ranks, token_file: str, timeout_s: float) -> Found:
    """Starts a pserver in one process of each host, and lets all know where they are.

    Raises:
        ConfigError: no process has started one.
        ConnectError: a pserver did not start.
        WaitTimeoutError: others did not come in time.
    """
    exchange = _Exchange(world, ranks, time.monotonic() + timeout_s, timeout_s)
    others = range(1, world.Get_size())
    if ranks.local_rank is None:
        ranks = replace(ranks, local_rank=_local_rank(exchange, world, ranks.rank))
    if ranks.rank != 0:
        (line,) = exchange.receive([0], _JOB)
        found = Found.from_line(line)
        exchange.send(0, _PSERVER, _own_pserver(found, ranks, token_file))
        (line,) = exchange.receive([0], _ALL)
        return Found.from_line(line)
    found = Found.new(world.Get_size(), token_file)
    for rank in others:
        exchange.send(rank, _JOB, found.line())
    own = _own_pserver(found, ranks, token_file)
    offers = [line.decode().split(" ") for line in (own, *exchange.receive(others, _PSERVER)) if line]
    if not offers:
        raise ConfigError(
            f"one process of each host starts a pserver, the one with local rank 0, but none of the {ranks.workers} "
            f"processes of {ranks.source} has it; start tfps_pserver and set TFPS_PSERVERS=HOST:PORT,..."
        )
    # Hosts of a job know each other by name, as mpirun does. Where one does not, as in containers, none is trusted.
    by_name = all(_resolves(name) for _, name in offers)
    found = found.at(*(f"{name}:{address.rpartition(':')[2]}" if by_name else address for address, name in offers))
    for rank in others:
        exchange.send(rank, _ALL, found.line())
    exchange.finish()
    return found


def _local_rank(exchange: _Exchange, world: Communicator, rank: int) -> int:
    """The place of this process among those of its host, where no variable says it."""
    # MPI waits without end for processes that do not come: first all say that they are here.
    others = range(1, world.Get_size())
    if rank == 0:
        exchange.receive(others, _HERE)
        for other in others:
            exchange.send(other, _HERE, b"all")
    else:
        exchange.send(0, _HERE, b"here")
        exchange.receive([0], _HERE)
    of_host = world.Split_type(importlib.import_module("mpi4py.MPI").COMM_TYPE_SHARED)
    local_rank: int = of_host.Get_rank()
    of_host.Free()
    return local_rank


def _own_pserver(found: Found, ranks: Ranks, token_file: str) -> bytes:
    """Starts a pserver: its address and the name of this host. b"": another process of this host does that."""
    if ranks.local_rank != 0:
        return b""
    address = start_pserver(found, ranks.workers or 1, token_file, on_one_host=False)
    return f"{address} {socket.gethostname()}".encode()


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


class _Exchange:
    """Messages of bytes, with a deadline: MPI itself waits without end."""

    def __init__(self, world: Communicator, ranks: Ranks, deadline: float, timeout_s: float) -> None:
        self._world, self._ranks, self._deadline, self._timeout_s = world, ranks, deadline, timeout_s
        self._sending: list[Communicator] = []

    def send(self, rank: int, tag: int, line: bytes) -> None:
        self._sending.append(self._world.Isend(bytearray(line), rank, tag))

    def receive(self, ranks: Sequence[int], tag: int) -> list[bytes]:
        """From each of `ranks` one message, in their order."""
        buffers = [bytearray(_ALL_BYTES if tag == _ALL else _ONE_BYTES) for _ in ranks]
        sizes: dict[int, int] = {}
        requests = [self._world.Irecv(buffer, rank, tag) for buffer, rank in zip(buffers, ranks, strict=True)]
        status = importlib.import_module("mpi4py.MPI").Status()

        def missing() -> list[int]:
            for index, request in enumerate(requests):
                if index not in sizes and request.Test(status):
                    sizes[index] = status.Get_count()
            return [rank for index, rank in enumerate(ranks) if index not in sizes]

        self._wait(missing)
        return [bytes(buffer[: sizes[index]]) for index, buffer in enumerate(buffers)]

    def finish(self) -> None:
        """Waits until all messages have been taken."""
        self._wait(lambda: [0] if not all(request.Test() for request in self._sending) else [])

    def _wait(self, missing: Callable[[], list[int]]) -> None:
        while late := missing():
            if time.monotonic() > self._deadline:
                raise WaitTimeoutError(
                    f"{len(late)} of the {self._ranks.workers} processes of {self._ranks.source} did not create a "
                    f"tfps.Strategy within {self._timeout_s:g} s (connect_timeout_s): rank "
                    f"{', '.join(map(str, late))}"
                )
            time.sleep(_LOOK_S)
