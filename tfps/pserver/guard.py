"""Who may call a pserver, how much, and how often, looked at before a call costs anything; and where it listens."""

from __future__ import annotations

import contextlib
import errno
import importlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from google.protobuf.message import Message

from tfps.config import Security, check_host_name
from tfps.errors import ConfigError, ConnectError, ProtocolError
from tfps.wire.control import CALLS, request_type
from tfps.wire.job_token import TOKEN_KEY, JobToken

_REFUSAL_S = 0.01  # all strangers together get one refusal in this time, so that they cost a running job little
# Of a request, in bytes. A declaration names variables, an upload has what was recorded, a layout a step per bucket,
# and what is put comes in pieces.
_MAX_BYTES = {"Declare": 16 * 2**20, "Upload": 8 * 2**20, "Tune": 4 * 2**20, "Put": 8 * 2**20}
_MAX_OTHER_BYTES = 64 * 1024
LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
_EVERY = (EVERYWHERE, "::", "")
_ELSEWHERE = (socket.AF_INET, "192.0.2.1", "{}"), (socket.AF_INET6, "2001:db8::1", "[{}]")  # for documentation only
_SHOWN = 80  # characters of a command
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # such as where it is turned off


class Guard(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses calls without the job token before their messages are read, and tells `refused` of each.

    One thread "tfps-refusals" takes calls of strangers, another answers them slowly; given-up calls are forgotten.
    """

    def __init__(self, token: JobToken, refused: Callable[[str, Exception], None]) -> None:
        self._token, self._refused = token, refused
        self._strangers = ThreadPoolExecutor(2, "tfps-refusals")
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards the next two
        self.waiting: dict[grpc.ServicerContext, Callable[[None], None]] = {}  # what ends each call; the oldest first
        self._answering = False  # whether a thread does

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        """See grpc.ServerInterceptor; on gRPC's thread, for every call."""
        received = dict(details.invocation_metadata).get(TOKEN_KEY, "")
        if (why := self._token.refusal(received.encode() if isinstance(received, str) else received)) is None:
            return continuation(details)
        name = str(details.method).rpartition("/")[2]

        def refuse(_: Iterator[bytes], context: grpc.ServicerContext, end: Callable[[None], None]) -> None:
            self._refused(name if name in CALLS else "other", ConnectError(why))
            context.set_code(grpc.StatusCode.UNAUTHENTICATED)
            context.set_details(why)
            self._add(context, end)

        refuse.experimental_thread_pool = self._strangers  # type: ignore[attr-defined]  # gRPC's names
        refuse.experimental_non_blocking = True  # type: ignore[attr-defined]  # the call ends with `end(None)`
        # As a stream, whatever it is, so that gRPC does not read its message first.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _add(self, context: grpc.ServicerContext, end: Callable[[None], None]) -> None:
        with self._lock:
            self.waiting[context] = end
            if not self._answering:
                self._strangers.submit(self._answer)
                self._answering = True

        def forget() -> None:
            with self._lock:
                self.waiting.pop(context, None)

        if not context.add_callback(forget):
            forget()  # it has ended already

    def _answer(self) -> None:
        """Refuses whoever waits, until nobody does."""
        while True:
            self._closed.wait(_REFUSAL_S)
            with self._lock:
                if not self.waiting:
                    self._answering = False
                    return
                end = self.waiting.pop(next(iter(self.waiting)))
            with contextlib.suppress(Exception):  # gRPC's, where the server has ended: the others still get theirs
                end(None)

    def close(self) -> None:
        self._closed.set()
        self._strangers.shutdown(wait=False, cancel_futures=True)


def parse(name: str, request: bytes) -> Message:
    """The message of a control call. ProtocolError: it is malformed, or larger than such a call may be."""
    limit = _MAX_BYTES.get(name, _MAX_OTHER_BYTES)
    if len(request) > limit:
        raise ProtocolError(f"a request of {name} must have at most {limit} bytes, got {len(request)}")
    try:
        return request_type(name).FromString(request)
    except Exception as error:  # of protobuf, whose class is another one in each of its implementations
        raise ProtocolError(f"a request of {name} must be a message of tfps, got {len(request)} other bytes") from error


class Rate:
    """Allows `burst` events at once and `per_s` per second in the long run; any thread."""

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._lock = threading.Lock()  # guards the next two
        self._left, self._then_s = burst, clock()

    def take(self) -> float:
        """Counts one event. Returns 0.0 if it may happen now, else in how many seconds: then it was not counted."""
        with self._lock:
            now_s = self._clock()
            self._left = min(self._left + (now_s - self._then_s) * self._per_s, self._burst)
            self._then_s = now_s
            if self._left >= 1:
                self._left -= 1
                return 0.0
            return (1 - self._left) / self._per_s


class Newest:
    """The newest open connections, `limit` at most: one more ends the oldest. Any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()  # guards _open
        self._open: dict[socket.socket, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            self._open[connection] = None
        self.end(self._limit)

    def discard(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.pop(connection, None)

    def end(self, most: int = 0) -> None:
        """Ends the oldest until `most` are left."""
        with self._lock:
            while len(self._open) > most:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread


# Where a pserver listens: only on this host, unless it knows whom it talks to


def default_host(security: Security) -> str:
    """Every interface if strangers are kept out or `insecure` allows them, else this host only."""
    return EVERYWHERE if _open_to_others(security) else LOOPBACK


def check_host(host: str, security: Security, *, metrics: bool = False) -> None:
    """Raises ConfigError if others could reach a pserver, or its `metrics`, without a job token, TLS or `insecure`."""
    check_host_name(host)
    if security.tls_ca and not security.tls_cert:
        raise ConfigError("tls_ca of a pserver must come with tls_cert and tls_key (--tls-cert, --tls-key), got none")
    if not _open_to_others(security) and not is_loopback(host):
        name, may = ("--metrics-host", "read its metrics") if metrics else ("host", "join, read and end its jobs")
        raise ConfigError(
            f"{name} of a pserver without a job token and without TLS must be a loopback address such as {LOOPBACK}, "
            f"got {host!r}: give it --token-file FILE (or --tls-cert and --tls-key), or --insecure where everybody who "
            f"reaches it may {may}"
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
    """Listens as gRPC does: every interface is reached by IPv4 and IPv6, if the host has both. May raise OSError."""
    if host in _EVERY and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=backlog)


def why_not_listening(error: OSError, port: int) -> str:
    """Why a port cannot be listened on, and who has it or how to find out."""
    reason = error.strerror or str(error)
    if error.errno != errno.EADDRINUSE:
        return reason
    with contextlib.suppress(Exception):  # psutil is optional, and may not be allowed to look
        psutil = importlib.import_module("psutil")
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid:
                name = " ".join(psutil.Process(each.pid).cmdline())[:_SHOWN]
                return f"{reason} by process {each.pid} ({name}); end it, or choose another port"
    look = f"`ss -ltnp 'sport = :{port}'` (as root: of all users) shows by which process"
    return f"{reason}; {look}; end it, or choose another port"


def _open_to_others(security: Security) -> bool:
    return bool(security.token_file or security.tls_cert or security.insecure)
