"""Where a pserver listens: only on this host, unless it knows whom it talks to."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

from tfps.config import Security, check_host_name
from tfps.errors import ConfigError

LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
_EVERY = (EVERYWHERE, "::", "")
_ELSEWHERE = (socket.AF_INET, "192.0.2.1", "{}"), (socket.AF_INET6, "2001:db8::1", "[{}]")  # for documentation only
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # such as where it is turned off


def default_host(security: Security) -> str:
    """Every interface if strangers are kept out or `insecure` allows them, else this host only."""
    return EVERYWHERE if _open_to_others(security) else LOOPBACK


def check_host(host: str, security: Security) -> None:
    """Checks that other hosts can reach a pserver at `host` only with a job token, TLS, or `insecure`.

    Raises:
        ConfigError: they could without; the files do not fit together; or this cannot be a host.
    """
    check_host_name(host)
    if security.tls_ca and not security.tls_cert:
        raise ConfigError("tls_ca of a pserver must come with tls_cert and tls_key (--tls-cert, --tls-key), got none")
    if not _open_to_others(security) and not is_loopback(host):
        raise ConfigError(
            f"host of a pserver without a job token and without TLS must be a loopback address such as {LOOPBACK}, got "
            f"{host!r}: give it --token-file FILE (or --tls-cert and --tls-key), or --insecure where everybody who "
            "reaches it may join, read and end its jobs"
        )


def check_metrics_host(host: str, security: Security) -> None:
    """As `check_host`, for the metrics port.

    Raises:
        ConfigError: other hosts could read the metrics of a pserver that says nowhere whom it serves; or this cannot be
            a host.
    """
    check_host_name(host)
    if not _open_to_others(security) and not is_loopback(host):
        raise ConfigError(
            f"--metrics-host of a pserver without a job token and without TLS must be a loopback address such as "
            f"{LOOPBACK}, got {host!r}: give it --token-file FILE (or --tls-cert and --tls-key), or --insecure where "
            "everybody who reaches it may read its metrics"
        )


def is_loopback(host: str) -> bool:
    """Whether only this host reaches `host`. Names that are unknown count as such: nobody reaches them."""
    if not host:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found)


def reachable(host: str) -> str:
    """An address at which other hosts reach a server that listens on `host`."""
    if host not in _EVERY:
        return f"[{host}]" if ":" in host else host
    for family, elsewhere, form in _ELSEWHERE:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))  # sends nothing; picks the interface of the default route
            return form.format(probe.getsockname()[0])
    return LOOPBACK


def try_to_listen(host: str, port: int) -> None:
    """Raises OSError if the port is not available: gRPC itself does not report the reason."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does; else lingering connections count
        probe.bind((host, port))


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """Listens as gRPC does: every interface is reached by IPv4 and IPv6, if the host has both.

    Raises:
        OSError: the port is not available.
    """
    if host in _EVERY and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=backlog)


def _open_to_others(security: Security) -> bool:
    return bool(security.token_file or security.tls_cert or security.insecure)
