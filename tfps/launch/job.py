"""A job as every launcher describes it: its hosts, how its processes learn their place, and files with its token.

Tested in tests/launch/test_job.py.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tfps.config import check_host_name
from tfps.errors import ConfigError

START_S = 60.0  # a pserver needs less than a second; a busy machine or slow disks may take more
READY = re.compile(r"tfps_pserver ready at (?P<address>\S+:\d+) workers=\d+")  # what it prints then
# And with --tell what becomes of a job; "moves": to other pservers.
TOLD = re.compile(r"tfps_pserver: (job (?P<job>begins|ends|fails|moves)|worker (?P<worker>\d+) takes part)")
HASHES_ALIKE = {"PYTHONHASHSEED": "0"}  # by default: a set of words has one order on all ranks, not one in each process
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Job:
    """Roles, addresses, ranks and token, the same whatever starts the processes."""

    name: str  # other jobs on the same pservers have other names
    workers: int | None  # of its start; None: not known, as to workers that join it
    pservers: tuple[str, ...] = ()  # "host:port", as workers reach them; empty until they are known
    token_file: str = ""  # where a process finds the job token, on its own host

    @classmethod
    def named(cls, what: str, workers: int, token_file: str = "") -> Job:
        """A job called `what` and something that no other job is called."""
        return cls(f"{what}-{secrets.token_hex(4)}", workers, token_file=token_file)

    def at(self, pservers: Sequence[str]) -> Job:
        """This job with its pservers' addresses."""
        return replace(self, pservers=tuple(pservers))

    def worker_variables(self, rank: int | None = None) -> dict[str, str]:
        """A worker's environment variables (see `tfps.config.Launch`), without `rank` the same for all workers."""
        return {
            "TFPS_PSERVERS": ",".join(self.pservers),
            **({} if self.workers is None else {"TFPS_WORKERS": str(self.workers)}),
            "TFPS_JOB": self.name,
            **self.pserver_variables(),
            **({} if rank is None else {"TFPS_RANK": str(rank)}),
        }

    def pserver_variables(self) -> dict[str, str]:
        """A pserver's environment variables."""
        return {"TFPS_TOKEN_FILE": self.token_file} if self.token_file else {}

    def pserver_arguments(
        self, host: str = "", port: int = 0, metrics_port: int | None = None, join: str = ""
    ) -> list[str]:
        """The arguments of a `tfps_pserver` on `host` ("": all interfaces, if there is a token) and `port` (0: any).

        `join`: address of a pserver whose job it takes part in.
        """
        arguments = ["--port", str(port), "--workers", str(self.workers), "--job", self.name]
        if host:
            arguments += ["--host", host]
        if join:
            arguments += ["--join", join]
        return arguments if metrics_port is None else [*arguments, "--metrics-port", str(metrics_port)]


@dataclass(frozen=True)
class Host:
    """A host by the name that the other hosts reach it by, and how many workers it gets."""

    name: str
    workers: int = 1


class LocalRank(NamedTuple):
    """A worker's place among those of its host, which share its GPUs, and their number."""

    rank: int
    workers: int


@dataclass(frozen=True)
class Placement:
    """The hosts of a job's processes: of each worker by rank, of each pserver by index."""

    workers: tuple[str, ...]
    pservers: tuple[str, ...]

    @classmethod
    def of(cls, hosts: Sequence[Host], pservers_per_host: int) -> Placement:
        """Ranks go through the hosts in their order, so that those of one host are neighbors."""
        workers = tuple(host.name for host in hosts for _ in range(host.workers))
        return cls(workers, tuple(host.name for host in hosts for _ in range(pservers_per_host)))

    def local_rank(self, rank: int) -> LocalRank:
        host = self.workers[rank]
        return LocalRank(self.workers[:rank].count(host), self.workers.count(host))


@dataclass(frozen=True)
class Task:
    """A process of the job, as it runs on its host."""

    name: str
    argv: tuple[str, ...]
    variables: Mapping[str, str]  # of its environment, besides those of its host
    colour: int
    local_rank: LocalRank | None = None  # None: not a worker


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parses "a:4,b:4": hosts and their numbers of workers (default 1). An IPv6 address needs brackets."""
    hosts = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(?P<name>\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+)(:(?P<workers>[0-9]+))?\s*", part)
        if found is None or found["name"].startswith("-") or found["workers"] in ("0",):
            raise ConfigError(
                f"--hosts must be HOST:WORKERS, separated by commas, as in a:4,b:4 (an IPv6 address in brackets), got "
                f"{part.strip()!r} in {text!r}"
            )
        hosts.append(Host(check_host_name(found["name"], " in --hosts"), int(found["workers"] or 1)))
    return checked_hosts(hosts)


def checked_hosts(hosts: Sequence[Host]) -> tuple[Host, ...]:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"each host must be named once, got {name} {names.count(name)} times; write {name}:N")
        if len(names) > 1 and name in LOOPBACK:
            raise ConfigError(f"{name} is another machine on each host; name this one as the other hosts reach it")
    return tuple(hosts)


def families(name: str) -> set[int]:
    """The kinds of addresses (`socket.AF_INET6`, ...) that a host has; none if its name is unknown here."""
    try:
        return {family for family, *_ in socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


@contextmanager
def secret_file(text: str) -> Iterator[str]:
    """The path of a file with `text` that only this user can read: in memory where that is possible."""
    if sys.platform.startswith("linux"):
        path = Path(lasting_secret_file(text))
        try:
            if os.access(path, os.R_OK):
                yield str(path)
                return
        finally:
            os.close(int(path.name))
    with tempfile.NamedTemporaryFile("w", prefix="tfps-token-") as file:  # with mode 0600
        file.write(text)
        file.flush()
        yield file.name


def lasting_secret_file(text: str) -> str:
    """The same in memory, on Linux only: a new file, there until this process ends, however that ends."""
    fd = os.memfd_create("tfps-token")
    os.fchmod(fd, 0o600)
    os.write(fd, text.encode())
    return f"/proc/{os.getpid()}/fd/{fd}"
