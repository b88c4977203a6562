"""What there is at an address: names, ports, and servers that are no pservers."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
from collections.abc import Iterator

import jobs
import pytest
from guarded import data
from jobs import Cluster

from tfps.wire import reach
from tfps.wire.reach import Reached, Unreached, connect, kind_of, resolve, round_trip_s, split, trouble, who_answers


@contextlib.contextmanager
def saying(text: bytes) -> Iterator[int]:
    """A server that says `text` to the first who connects, and closes once that is read: its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connected, _ = server.accept()
                with connected:
                    connected.sendall(text)
                    connected.shutdown(socket.SHUT_WR)
                    connected.settimeout(jobs.DEADLINE_S)
                    while connected.recv(1000):
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        thread.join(jobs.DEADLINE_S)


@pytest.mark.parametrize(("address", "parts"), [("h:7", ("h", 7)), ("[::1]:80", ("::1", 80))])
def test_an_address_is_a_host_and_a_port(address: str, parts: tuple[str, int]) -> None:
    assert split(address) == parts


def test_names_resolve_or_do_not() -> None:
    found = resolve("localhost", 1, jobs.DEADLINE_S)
    assert isinstance(found, list)
    assert set(found) <= {"127.0.0.1", "::1"}
    for host in ("no-such-host.invalid", "x" * 300):
        unknown = resolve(host, 1, jobs.DEADLINE_S)
        assert isinstance(unknown, Unreached)
        assert unknown.problem == "unresolved"
        assert "does not resolve" in unknown.text


def test_a_resolver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(jobs.DEADLINE_S))
    found = resolve("slow", 1, 0.05)
    over.set()
    assert isinstance(found, Unreached)
    assert found.text == "the name 'slow' was not resolved within 0.05 s"


def test_a_port_takes_connections_or_refuses_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert isinstance(connect(["127.0.0.1"], port, jobs.DEADLINE_S), Reached)
        assert round_trip_s("127.0.0.1", port, jobs.DEADLINE_S) is not None
    closed = jobs.unused_ports(1)
    found = connect(["127.0.0.1"], closed, jobs.DEADLINE_S)
    assert isinstance(found, Unreached)
    assert (found.problem, found.text) == ("refused", "refused: nothing listens there")
    assert round_trip_s("127.0.0.1", closed, jobs.DEADLINE_S) is None


def test_a_port_that_never_answers_is_a_timeout() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        for _ in range(4):  # a full queue lets Linux drop what comes
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(address)
        found = connect(["127.0.0.1"], address[1], 0.3)
    assert isinstance(found, Unreached)
    assert (found.problem, found.text) == ("timeout", "no answer within 0.3 s")


def test_the_second_address_of_a_host_counts_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = connect(["127.0.0.2", "127.0.0.1"], port, jobs.DEADLINE_S)
        assert isinstance(found, Reached)
        assert found.address == "127.0.0.1"


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (OSError(113, "No route to host"), "unreachable"),
        (OSError(1, "Operation not permitted"), "blocked"),
        (TimeoutError(), "timeout"),
        (OSError(105, "No buffer space"), "unreachable"),
    ],
)
def test_each_error_of_the_system_has_its_word(error: OSError, problem: str) -> None:
    assert reach._failure(error, 1.0).problem == problem


def test_a_pserver_is_told_from_its_data_port(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    assert who_answers("127.0.0.1", server.port, jobs.DEADLINE_S)[0] == "grpc"
    assert who_answers("127.0.0.1", data(server).port, jobs.DEADLINE_S)[0] == "data_port"


def test_an_http_server_is_one() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        assert who_answers("127.0.0.1", server.server_address[1], jobs.DEADLINE_S)[0] == "http"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(jobs.DEADLINE_S)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ("http", "'HTTP/1.1 400 Bad Request'")),
        (b"SSH-2.0-OpenSSH_9\r\n", ("other", "'SSH-2.0-OpenSSH_9'")),
        (b"\x1b[2J\xff", ("other", r"'\x1b[2J\xff'")),
        (b"", ("closes", "")),
    ],
)
def test_what_a_server_says_first_tells_what_it_is(text: bytes, found: tuple[str, str]) -> None:
    with saying(text) as port:
        assert who_answers("127.0.0.1", port, jobs.DEADLINE_S) == found


def test_who_accepts_nothing_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert who_answers("127.0.0.1", server.getsockname()[1], 0.1) == ("silent", "")


def test_where_nobody_listens_the_connection_is_closed() -> None:
    assert who_answers("127.0.0.1", jobs.unused_ports(1), jobs.DEADLINE_S) == ("closes", "")


def test_few_bytes_are_no_frame() -> None:
    assert kind_of(b"\x04") == "other"


def test_trouble_names_the_addresses_of_a_name_that_take_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.2", 0)) as listening:
        port = listening.getsockname()[1]
        assert trouble(f"127.0.0.2:{port}") == ""
        known = {"ps0": ("127.0.0.3", "127.0.0.2")}

        def look_up(host: str, *_: object, **__: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in known.get(host, (host,))]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        assert trouble(f"ps0:{port}") == "127.0.0.3: refused: nothing listens there"
