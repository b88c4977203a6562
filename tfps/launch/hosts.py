"""The hosts of a job, and which of its processes each gets."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from tfps.config import check_host_name
from tfps.errors import ConfigError

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Host:
    """A host by the name that the other hosts reach it by, and how many workers it gets."""

    name: str
    workers: int = 1


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

    def neighbors(self, rank: int) -> tuple[int, int]:
        """The place of worker `rank` among those of its host, and their number."""
        same = [other for other, host in enumerate(self.workers) if host == self.workers[rank]]
        return same.index(rank), len(same)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parses "a:4,b:4": hosts and their numbers of workers (default 1). An IPv6 address needs brackets.

    Raises:
        ConfigError: a host or a number is malformed, or a host is named twice.
    """
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
    """Returns `hosts`.

    Raises:
        ConfigError: a host is there twice, or this machine is named so that other hosts cannot reach it.
    """
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
