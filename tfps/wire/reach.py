"""What there is at an address: whether its name resolves, its port answers, and who answers there."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Literal, NamedTuple

from tfps.errors import ProtocolError
from tfps.threads import DaemonPool
from tfps.wire.frames import PART_BYTES, Kind, decode_part

Answers = Literal["grpc", "http", "data_port", "other", "closes", "silent"]
_NO_WAY, _BLOCKED = ("unreachable", "no way to it: {}"), ("blocked", "this host does not let it out: {}")
_FAILURES = {
    errno.ECONNREFUSED: ("refused", "refused: nothing listens there"),
    **dict.fromkeys((errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN), _NO_WAY),
    **dict.fromkeys((errno.EPERM, errno.EACCES), _BLOCKED),
}
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # HTTP/2 with no settings
_HTTP = (b"http/", b"<!doctype html", b"<html")  # in the last two cases without a status line
_FRAME_BYTES, _SETTINGS = 9, 4  # of HTTP/2
_SHOWN = 40
_MOST_ADDRESSES = 4  # of a name, that `trouble` looks at


class Unreached(NamedTuple):
    """Why there is no connection."""

    problem: str  # "unresolved", "refused", "timeout", "unreachable" or "blocked"
    text: str


class Reached(NamedTuple):
    """The address that took a connection, and the seconds until it did."""

    address: str
    seconds: float


def split(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, which is well-formed."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def resolve(host: str, port: int, timeout_s: float) -> list[str] | Unreached:
    """The addresses of `host`. The system's resolver has no deadline: it runs on a thread of its own."""
    pool = DaemonPool(1, "tfps-doctor-resolve")
    try:
        found = pool.submit(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM).result(timeout_s)
    except FutureTimeoutError:
        return Unreached("unresolved", f"the name {host!r} was not resolved within {timeout_s:.3g} s")
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return Unreached("unresolved", f"the name {host!r} does not resolve: {why}")
    finally:
        pool.shutdown(wait=False)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def connect(addresses: list[str], port: int, timeout_s: float) -> Reached | Unreached:
    """A TCP connection to the first of `addresses` that takes one, closed at once."""
    end_s, failure = time.monotonic() + timeout_s, Unreached("unresolved", "there is no address")
    for index, address in enumerate(addresses):
        began_s = time.monotonic()
        share_s = (end_s - began_s) / (len(addresses) - index)
        try:
            socket.create_connection((address, port), max(share_s, 1e-3)).close()
            return Reached(address, time.monotonic() - began_s)
        except OSError as error:
            failure = _failure(error, timeout_s)
    return failure


def trouble(address: str, timeout_s: float = 1.0) -> str:
    """Which addresses of `host:port` take no connection, or that its name does not resolve; "" if nothing is wrong."""
    host, port = split(address)
    found = resolve(host, port, timeout_s)
    if isinstance(found, Unreached):
        return found.text
    tried = [(each, connect([each], port, timeout_s)) for each in found[:_MOST_ADDRESSES]]
    return "; ".join(f"{each}: {outcome.text}" for each, outcome in tried if isinstance(outcome, Unreached))


def round_trip_s(address: str, port: int, timeout_s: float, times: int = 3) -> float | None:
    """The shortest time of several TCP connections; None if there was none."""
    found = [connect([address], port, timeout_s) for _ in range(times)]
    return min((each.seconds for each in found if isinstance(each, Reached)), default=None)


def _failure(error: OSError, timeout_s: float) -> Unreached:
    if isinstance(error, TimeoutError):
        return Unreached("timeout", f"no answer within {timeout_s:.3g} s")
    problem, text = _FAILURES.get(error.errno or 0, ("unreachable", "no connection: {}"))
    return Unreached(problem, text.format(error.strerror or error))


def who_answers(host: str, port: int, timeout_s: float) -> tuple[Answers, str]:
    """What kind of server is there, and the beginning of what it says, printable. Speaks HTTP/2, as gRPC does."""
    end_s, said, ended = time.monotonic() + timeout_s, b"", False
    try:
        with socket.create_connection((host, port), timeout_s) as connected:
            connected.sendall(_PREFACE)
            while not ended and len(said) < PART_BYTES and kind_of(said) not in ("grpc", "http"):
                connected.settimeout(max(end_s - time.monotonic(), 1e-3))
                said += (piece := connected.recv(256))
                ended = not piece
    except OSError as error:
        ended = not isinstance(error, TimeoutError)
    if not said:
        return ("closes" if ended else "silent"), ""
    return kind_of(said), ascii(said.decode("latin-1").partition("\n")[0].strip()[:_SHOWN])


def kind_of(said: bytes) -> Answers:
    """What kind of server says that first."""
    if said.lower().startswith(_HTTP):
        return "http"
    with contextlib.suppress(ProtocolError):
        if len(said) >= PART_BYTES and decode_part(said[:PART_BYTES]).header.kind == Kind.ERROR:
            return "data_port"
    if len(said) >= _FRAME_BYTES and said[3] == _SETTINGS:
        return "grpc"
    return "other"
