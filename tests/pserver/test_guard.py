"""The guard of a pserver: what is refused before it costs anything, and where it may listen. Whole attacks are in
test_strangers.py.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import urllib.request

import jobs
import pytest
from guarded import data

from tfps.config import Security
from tfps.errors import ConfigError, ProtocolError
from tfps.pserver.guard import (
    Rate,
    check_host,
    default_host,
    is_loopback,
    listen,
    parse,
    reachable,
    try_to_listen,
    why_not_listening,
)
from tfps.pserver.metrics import MetricsServer
from tfps.pserver.server import ParameterServer

TOKEN, TLS = Security(token_file="t"), Security(tls_cert="c", tls_key="k")
INSECURE = Security(insecure=True)


def test_a_rate_allows_a_burst_and_then_so_many_in_a_second() -> None:
    now = [100.0]
    rate = Rate(per_s=10, burst=3, clock=lambda: now[0])
    assert [rate.take() for _ in range(3)] == [0.0] * 3
    assert rate.take() == pytest.approx(0.1)
    now[0] += 0.05
    assert rate.take() == pytest.approx(0.05)  # asking costs nothing
    now[0] += 0.06
    assert rate.take() == 0.0
    now[0] += 1000
    assert [rate.take() > 0 for _ in range(4)] == [False, False, False, True]  # what was not used is not saved up


@pytest.mark.parametrize(("name", "limit"), [("Status", 2**16), ("Join", 2**16), ("Declare", 2**24), ("Upload", 2**23)])
def test_a_request_that_is_too_large_is_refused_without_parsing_it(name: str, limit: int) -> None:
    with pytest.raises(ProtocolError, match=f"a request of {name} must have at most {limit} bytes, got {limit + 1}"):
        parse(name, b"\xff" * (limit + 1))


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(ProtocolError, match="a request of Join must be a message of tfps, got 4 other bytes"):
        parse("Join", b"\xff" * 4)


@pytest.mark.parametrize(
    ("security", "host"),
    [(Security(), "127.0.0.1"), (TOKEN, "0.0.0.0"), (TLS, "0.0.0.0"), (INSECURE, "0.0.0.0")],
)
def test_other_hosts_are_served_only_by_who_keeps_strangers_out_or_says_so(security: Security, host: str) -> None:
    assert default_host(security) == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.7"])
def test_a_host_that_others_reach_needs_a_token_tls_or_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match=r"must be a loopback address such as 127\.0\.0\.1, got .*--token-file FILE"):
        check_host(host, Security())
    with pytest.raises(ConfigError, match=r"^--metrics-host of a pserver .* got .*--insecure .* read its metrics"):
        check_host(host, Security(), metrics=True)
    for security in (TOKEN, TLS, INSECURE):
        check_host(host, security)
        check_host(host, security, metrics=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    assert is_loopback(host)
    check_host(host, Security())
    check_host(host, Security(), metrics=True)


def test_a_host_that_no_resolver_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a host must be a name or an IP address, got 'a\.\.b': "):
        check_host("a..b", TOKEN)


def test_an_authority_without_a_certificate_of_the_pserver_is_refused() -> None:
    with pytest.raises(ConfigError, match="tls_ca of a pserver must come with tls_cert and tls_key"):
        check_host("127.0.0.1", Security(tls_ca="ca"))


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("ps0", "ps0")])
def test_a_host_of_its_own_is_where_it_is_reached(host: str, address: str) -> None:
    assert reachable(host) == address


def test_every_interface_is_reached_at_one_of_them() -> None:
    assert reachable("0.0.0.0") not in ("0.0.0.0", "")


IPV6_ONLY = """
ip link add name there type veth peer name here && ip addr add fd00:7f::1/64 dev here nodad && ip link set there up &&
ip link set here up && ip -6 route add default dev here && exec "$0" "$@"
"""


@pytest.mark.skipif(
    subprocess.run(
        ["unshare", "--net", "sh", "-c", IPV6_ONLY.replace('"$0" "$@"', "true")], capture_output=True
    ).returncode
    != 0,
    reason="needs root and network namespaces with IPv6",
)
def test_every_interface_of_a_host_with_ipv6_alone_is_reached_by_that() -> None:
    program = "from tfps.pserver.guard import reachable; print(reachable('0.0.0.0'))"
    command = ["unshare", "--net", "sh", "-c", IPV6_ONLY, sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=jobs.DEADLINE_S, cwd=jobs.ROOT)
    assert found.stdout == "[fd00:7f::1]\n"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_every_interface_is_reached_by_ipv4_and_ipv6_on_all_ports(host: str) -> None:
    server = ParameterServer(host, 0, workers=1, security=INSECURE)
    metrics = MetricsServer(server, host, 0)
    try:
        for port in (server.port, data(server).port):
            for address in ("127.0.0.1", "::1"):
                socket.create_connection((address, port), jobs.DEADLINE_S).close()
        for name in ("127.0.0.1", "[::1]"):
            with urllib.request.urlopen(f"http://{name}:{metrics.port}/healthz", timeout=jobs.DEADLINE_S) as reply:
                assert reply.read() == b"ok\n"
    finally:
        metrics.stop()
        server.stop()


def test_a_data_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 0.0.0.0:{port} for data connections: .*in use"):
            ParameterServer("0.0.0.0", 0, workers=1, data_port=port, security=INSECURE)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_a_port_that_another_process_has_for_ipv6_is_not_shared_in_silence() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6) as other, pytest.raises(OSError, match="in use"):
        listen("0.0.0.0", other.getsockname()[1], 1).close()


def test_who_has_a_port_is_named_or_how_to_find_out(monkeypatch: pytest.MonkeyPatch) -> None:
    psutil = pytest.importorskip("psutil")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use") as caught:
            try_to_listen("127.0.0.1", port)
        said = why_not_listening(caught.value, port)
        assert f"in use by process {os.getpid()} (" in said
        monkeypatch.setitem(sys.modules, psutil.__name__, None)  # not installed
        assert f"in use; `ss -ltnp 'sport = :{port}'`" in why_not_listening(caught.value, port)
    assert why_not_listening(OSError(errno.EACCES, "Permission denied"), 80) == "Permission denied"
