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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from tfps.config import check_host_name
from tfps.errors import ConfigError

START_S = 60.0  # a pserver needs less than a second; a busy machine or slow disks may take more
READY = re.compile(r"tfps_pserver ready at (?P<address>\S+:\d+) workers=\d+")  # what it prints then
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Job:
    """Roles, addresses, ranks and token, the same whatever starts the processes.

    Args:
        name: other jobs on the same pservers have other names.
        workers: their number.
        pservers: their addresses ("host:port"), as workers reach them; empty until they are known.
        token_file: where a process finds the job token, on its own host.
    """

    name: str
    workers: int
    pservers: tuple[str, ...] = ()
    token_file: str = ""

    @classmethod
    def named(cls, what: str, workers: int, token_file: str = "") -> Job:
        """A job called `what` and something that no other job is called."""
        return cls(f"{what}-{secrets.token_hex(4)}", workers, token_file=token_file)

    def at(self, pservers: Sequence[str]) -> Job:
        """This job with its pservers' addresses."""
        return replace(self, pservers=tuple(pservers))

    def worker_variables(self, rank: int | None = None) -> dict[str, str]:
        """A worker's environment variables (see `tfps.config.Launch`), without `rank` the same for all workers."""
        variables = {
            "TFPS_PSERVERS": ",".join(self.pservers),
            "TFPS_WORKERS": str(self.workers),
            "TFPS_JOB": self.name,
            **self.pserver_variables(),
        }
        return variables if rank is None else {**variables, "TFPS_RANK": str(rank)}

    def pserver_variables(self) -> dict[str, str]:
        """A pserver's environment variables."""
        return {"TFPS_TOKEN_FILE": self.token_file} if self.token_file else {}

    def pserver_arguments(self, host: str = "", port: int = 0, metrics_port: int | None = None) -> list[str]:
        """The arguments of a `tfps_pserver`.

        Args:
            host: that it listens at; "": all interfaces, if there is a token.
            port: 0: one that the system picks.
            metrics_port: of Prometheus metrics and /healthz; None: no metrics.
        """
        arguments = ["--port", str(port), "--workers", str(self.workers), "--job", self.name]
        if host:
            arguments += ["--host", host]
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
        workers = [host.name for host in hosts for _ in range(host.workers)]
        return cls(tuple(workers), tuple(host.name for host in hosts for _ in range(pservers_per_host)))

    def local_rank(self, rank: int) -> LocalRank:
        """The place of worker `rank` among those of its host."""
        same = [other for other, host in enumerate(self.workers) if host == self.workers[rank]]
        return LocalRank(same.index(rank), len(same))


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
    """Returns `hosts`."""
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"each host must be named once, got {name} {names.count(name)} times; write {name}:N")
        if len(names) > 1 and name in LOOPBACK:
            raise ConfigError(f"{name} is another machine on each host; name this one as the other hosts reach it")
    return tuple(hosts)


def has_only_ipv6(name: str) -> bool:
    """Whether IPv6 is the only way to a host. Names that are unknown here are not known to be so."""
    try:
        found = socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(family == socket.AF_INET6 for family, *_ in found)


@contextmanager
def secret_file(text: str) -> Iterator[str]:
    """The path of a file with `text` that only this user can read.

    On Linux it is in memory and ends with this process, however that ends; elsewhere it is removed on leaving.
    """
    if sys.platform.startswith("linux"):
        fd = _in_memory(text)
        try:
            path = _path(fd)
            if os.access(path, os.R_OK):
                yield path
                return
        finally:
            os.close(fd)
    with tempfile.NamedTemporaryFile("w", prefix="tfps-token-") as file:  # with mode 0600
        file.write(text)
        file.flush()
        yield file.name


def lasting_secret_file(text: str) -> str:
    """The same in memory, on Linux only: a new file, there until this process ends, however that ends."""
    return _path(_in_memory(text))


def _in_memory(text: str) -> int:
    fd = os.memfd_create("tfps-token")
    os.fchmod(fd, 0o600)
    os.write(fd, text.encode())
    return fd


def _path(fd: int) -> str:
    return f"/proc/{os.getpid()}/fd/{fd}"
