"""What is said of one pserver, and of its bandwidth."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import grpc
import jobs
import pytest
from guarded import OTHER, SECRET, SUM, data, settings, still_sums
from jobs import Cluster

from tfps import __version__
from tfps.config import Config, Security
from tfps.doctor.pserver import (
    Bandwidth,
    Client,
    Visit,
    bandwidth_of_job,
    clock,
    compare_bandwidths,
    distance,
    mbit,
    measure_bandwidth,
    of_version,
    stranger,
    unreached,
)
from tfps.doctor.report import Check
from tfps.errors import TfpsError
from tfps.launch.cluster_spec import Cluster as Places
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.server import ParameterServer
from tfps.threads import DaemonPool
from tfps.wire import reach
from tfps.wire.connection import introduce
from tfps.wire.control import PROTOCOL_VERSION, SERVICE, ClockOffset, Pserver
from tfps.wire.job_token import JobToken
from tfps.wire.measuring import purpose
from tfps.wire.reach import Answers, Unreached
from tfps.wire.send_queue import Throughput
from tfps.wire.shared_memory import Arena
from tools.certificates import Authority, Certificate

SHORT_S = 0.1
pytestmark = pytest.mark.usefixtures("near")
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")


def test_another_protocol_version_fails_and_names_both() -> None:
    check = of_version(PROTOCOL_VERSION + 1, "9.0")
    assert (check.status, check.problem) == ("failed", "version")
    assert f"the pserver speaks protocol version {PROTOCOL_VERSION + 1}, the worker version {PROTOCOL_VERSION}; " in (
        check.advice
    )
    assert of_version(PROTOCOL_VERSION, "9.0").status == "ok"


def test_a_long_way_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfps.doctor.pserver._FAR_S", 0.02)  # in spite of `near`
    assert distance(0.1, 0.001).status == "ok"  # the call waited for a busy host
    check = distance(0.1, 0.05)
    assert (check.status, check.problem) == ("warning", "far")
    assert check.advice.startswith("a round trip takes 50 ms")
    assert distance(0.1, None).problem == "far"


@pytest.mark.parametrize(("wall_offset_ns", "status"), [(10**9, "ok"), (-(10**9), "ok"), (2 * 10**9, "warning")])
def test_times_of_day_that_differ_are_a_warning(wall_offset_ns: int, status: str) -> None:
    check = clock(ClockOffset(-5 * 10**9, 10**6, 2 * 10**6, wall_offset_ns))
    assert check.status == status
    assert check.values["offset_s"] == -5.0
    assert check.values["error_s"] == 0.001


@pytest.mark.parametrize(
    ("who", "problem"),
    [
        ("http", "http"),
        ("data_port", "data_port"),
        ("other", "stranger"),
        ("closes", "closes"),
        ("silent", "silent"),
        ("grpc", "lost"),
    ],
)
def test_each_stranger_has_its_word(who: Answers, problem: str) -> None:
    check = stranger(who, "said", "error")
    assert (check.status, check.problem) == ("failed", problem)


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        ("refused", "is tfps_pserver running, with --port 7? Without --token-file or TLS it listens on its own host"),
        ("timeout", "a firewall drops what goes to port 7 (open it between hosts), or there is no such host"),
        ("unreachable", "look at the address, the route and firewalls"),
        ("blocked", "look at the address, the route and firewalls"),
    ],
)
def test_each_reason_not_to_be_reached_has_its_advice(problem: str, says: str) -> None:
    check = unreached(Unreached(problem, "text"), 7)
    assert (check.status, check.problem) == ("failed", problem)
    assert says in check.advice


def connected(cluster: Cluster, server: ParameterServer) -> Pserver:
    pserver = Pserver(server.address)
    cluster.callback(pserver.close)
    return pserver


def test_while_another_client_measures_this_one_waits(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    pserver, port = connected(cluster, server), data(server).port
    other = introduce(server.address, port, JobToken(), purpose("push"), 0, jobs.DEADLINE_S)
    ends = threading.Timer(0.3, other.close)
    ends.start()
    assert isinstance(measure_bandwidth(pserver, port, jobs.DEADLINE_S, SHORT_S), Bandwidth)
    ends.join()


@pytest.mark.parametrize("path", ["tcp", "grpc"])
def test_it_does_not_wait_for_ever(path: str, cluster: Cluster) -> None:
    server = cluster.pserver(1)
    cluster.raw(server.address)
    port = data(server).port if path == "tcp" else 0
    found = measure_bandwidth(connected(cluster, server), port, 1.0, SHORT_S)
    assert isinstance(found, Check)
    assert found.status == "skipped"
    assert found.text == "not measured: the pserver has a job, which a measurement would slow"


def test_where_bulk_data_does_not_arrive_the_mtu_is_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    server = cluster.pserver(1)

    def lose(receive: Callable[[], int], _: float) -> Throughput:
        lost = 0
        while not lost:
            with contextlib.suppress(TimeoutError):
                lost = receive()
        return Throughput(0, 0.0)

    monkeypatch.setattr(server._measuring, "_count", lose)
    found = measure_bandwidth(connected(cluster, server), data(server).port, jobs.DEADLINE_S, jobs.DEADLINE_S)
    assert isinstance(found, Check)
    assert (found.status, found.problem) == ("failed", "stalls")
    assert "MTU" in found.advice


@pytest.mark.parametrize(
    ("rate", "text"), [(12.5e6, "100 Mbit/s"), (1.25e8, "1 Gbit/s"), (3.1e9, "24.8 Gbit/s"), (0.0, "0 Mbit/s")]
)
def test_rates_are_in_bits(rate: float, text: str) -> None:
    assert mbit(rate) == text


def test_a_pserver_with_less_than_half_of_the_median_is_a_warning() -> None:
    rates = {"a": 1e8, "b": 1e8, "c": 3e7, "d": 6e7}
    found = compare_bandwidths({name: Bandwidth(rate, 9e9, "tcp") for name, rate in rates.items()})
    assert [found[name].status for name in "abcd"] == ["ok", "ok", "warning", "ok"]
    assert found["c"].problem == "slow"
    assert found["c"].advice.startswith(
        "slow: 240 Mbit/s, while half of the pservers reach 800 Mbit/s: every step waits"
    )
    assert found["a"].values == {"push_bytes_per_s": 1e8, "pull_bytes_per_s": 9e9, "path": "tcp"}
    assert compare_bandwidths({}) == {}


def test_too_little_to_say_is_a_warning() -> None:
    assert compare_bandwidths({"a": Bandwidth(0.0, 1e8, "grpc")})["a"].problem == "unknown"


def member(rank: int, busy_bytes: int, busy_s: float, shared: bool = False) -> pb.MemberStatus:
    return pb.MemberStatus(rank=rank, shared_memory=shared, busy_bytes=busy_bytes, busy_s=busy_s)


def test_of_a_running_job_its_slowest_rank_is_told() -> None:
    check = bandwidth_of_job(
        [member(0, 10**8, 1.0), member(1, 10**8, 2.0), member(2, 1, 1.0, True), member(3, 1, 0.01)]
    )
    assert check.status == "skipped"
    assert check.text == "not measured: there is a job; its replies reach rank 1, the slowest, at 400 Mbit/s"
    assert check.values == {"job_bytes_per_s": 5e7, "rank": 1}
    assert bandwidth_of_job([]).text == "not measured: there is a job"


def client(
    token_file: str = "",
    config: Config = Config(),  # noqa: B008 (it is immutable)
    arena: Arena | None = None,
    timeout_s: float = jobs.DEADLINE_S,
    security: Security | None = None,
    **cluster: object,
) -> Client:
    places = Places(("x:1",), **cluster)  # type: ignore[arg-type]
    return Client(config, security or Security(token_file=token_file), places, arena, timeout_s)


def visited(address: str, asks: Client, *, measure: bool = False) -> dict[str, Check]:
    visit = Visit(address, asks)
    try:
        visit.look()
        if measure and (found := visit.measure(visit.busy, SHORT_S)) is not None:
            # How fast: tests/pserver/test_measuring.py
            visit.checks.append(Check("bandwidth", "ok", found.text, values=asdict(found)))
    finally:
        visit.close()
    found_checks = {check.name: check for check in visit.checks}
    assert len(found_checks) == len(visit.checks)
    return found_checks


def wrong(found: dict[str, Check]) -> tuple[str, str, str]:
    """Name, problem and advice of the one check that failed, which is the last."""
    *good, last = found.values()
    assert {check.status for check in good} <= {"ok", "skipped"}
    assert last.status == "failed"
    return last.name, last.problem, last.advice


def test_a_good_pserver_is_looked_at_from_all_sides(cluster: Cluster, files: dict[str, str]) -> None:
    server = cluster.pserver(2, security=Security(token_file=files[SECRET]))
    found = visited(server.address, client(files[SECRET]), measure=True)
    assert list(found) == ["address", "port", "pserver", "job", "data port", "round trip", "clock", "bandwidth"]
    assert {check.status for check in found.values()} == {"ok"}
    assert found["pserver"].values == {"protocol_version": PROTOCOL_VERSION, "version": __version__}
    view = {"generation": 1, "lost_workers": 0, "joined_workers": 0}
    assert found["job"].values == {"state": "idle", "workers": 2, "members": 0, "name": "", **view}
    assert found["data port"].values == {"port": data(server).port}
    assert 0 < found["round trip"].values["network_s"] < jobs.DEADLINE_S
    assert abs(found["clock"].values["offset_s"]) <= found["clock"].values["error_s"]  # one process, one clock
    assert abs(found["clock"].values["wall_offset_s"]) < jobs.DEADLINE_S
    assert found["bandwidth"].values["path"] == "tcp"
    assert not server.status().errors  # nothing that an operator would wonder about


def test_the_round_trip_is_to_the_address_that_answered(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ["127.0.0.2", "127.0.0.1"]  # the pserver listens on the second one
    monkeypatch.setattr(reach, "resolve", lambda *_: addresses)
    found = visited(cluster.pserver(1).address, client())
    assert found["address"].values == {"addresses": addresses}
    assert found["round trip"].values["network_s"] is not None


def test_memory_that_the_pserver_can_open_makes_the_rest_unnecessary(cluster: Cluster) -> None:
    server, arena = cluster.pserver(1), Arena()
    cluster.callback(arena.close)
    found = visited(server.address, client(arena=arena), measure=True)
    assert found["shared memory"].status == "ok"
    assert found["data port"].status == "skipped"
    assert "bandwidth" not in found


def test_memory_that_the_pserver_cannot_open_is_a_warning(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.use("tcp", monkeypatch)
    server, arena = cluster.pserver(1), Arena()
    cluster.callback(arena.close)
    found = visited(server.address, client(arena=arena), measure=True)
    assert (found["shared memory"].status, found["shared memory"].problem) == ("warning", "refused")
    assert found["bandwidth"].status == "ok"


def test_another_token_is_named(cluster: Cluster, files: dict[str, str]) -> None:
    server = cluster.pserver(1, security=Security(token_file=files[SECRET]))
    name, problem, advice = wrong(visited(server.address, client(files[OTHER])))
    assert (name, problem) == ("pserver", "token")
    assert advice.startswith("has another job token than this client")


def test_a_refused_port_is_told_from_one_that_never_answers_and_from_a_name() -> None:
    refused = visited(f"127.0.0.1:{jobs.unused_ports(1)}", client())
    assert wrong(refused)[:2] == ("port", "refused")
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts nothing
        silent = visited(f"127.0.0.1:{server.getsockname()[1]}", client(timeout_s=0.3))
    assert wrong(silent)[:2] == ("pserver", "silent")
    unresolved = visited("no-such-host.invalid:7070", client())
    assert wrong(unresolved)[:2] == ("address", "unresolved")
    assert len(list(unresolved)) == 1


def test_the_data_port_is_not_the_port(cluster: Cluster) -> None:
    port = data(cluster.pserver(1)).port
    name, problem, advice = wrong(visited(f"127.0.0.1:{port}", client()))
    assert (name, problem) == ("pserver", "data_port")
    assert "not of --data-port" in advice


@needs_openssl
def test_with_tls_everything_goes_through_grpc(cluster: Cluster, authority: Authority, own: Certificate) -> None:
    server = cluster.pserver(1, security=Security(tls_cert=own.cert, tls_key=own.key))
    found = visited(server.address, client(security=Security(tls_ca=authority.file)), measure=True)
    assert found["data port"].text == "none with TLS"
    assert found["bandwidth"].values["path"] == "grpc"
    assert {check.status for check in found.values()} == {"ok", "skipped"}


@needs_openssl
def test_tls_at_one_end_only_is_named(cluster: Cluster, authority: Authority, own: Certificate) -> None:
    encrypted = cluster.pserver(1, security=Security(tls_cert=own.cert, tls_key=own.key))
    plain = cluster.pserver(1)
    elsewhere = authority.sign("elsewhere", "DNS:elsewhere")
    misnamed = cluster.pserver(1, security=Security(tls_cert=elsewhere.cert, tls_key=elsewhere.key))
    strict = cluster.pserver(1, security=Security(tls_cert=own.cert, tls_key=own.key, tls_ca=authority.file))
    trusting = Security(tls_ca=authority.file)
    for server, security, says in (
        (encrypted, Security(), "uses TLS, this worker does not: set TFPS_TLS_CA"),
        (plain, trusting, "does not use TLS, this worker does"),
        (misnamed, trusting, "does not confirm: "),
        (strict, trusting, "wants a certificate of this worker"),
    ):
        name, problem, advice = wrong(visited(server.address, client(security=security, timeout_s=5.0)))
        assert (name, problem) == ("pserver", "tls")
        assert says in advice


def test_a_data_port_that_is_closed_is_a_warning_and_grpc_is_measured(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    data(server).close()
    found = visited(server.address, client(), measure=True)
    assert (found["data port"].status, found["data port"].problem) == ("warning", "refused")
    assert "tfps_pserver --data-port fixes its number" in found["data port"].advice
    assert found["bandwidth"].values["path"] == "grpc"
    found = visited(server.address, client(config=Config(transport="tcp")))
    assert found["data port"].status == "failed"
    found = visited(server.address, client(config=Config(transport="grpc")), measure=True)
    assert found["data port"].text == "not used: TFPS_TRANSPORT=grpc"
    assert found["bandwidth"].values["path"] == "grpc"


def test_a_pserver_for_another_number_of_workers_or_another_job_is_named(cluster: Cluster) -> None:
    server = cluster.pserver(2, job="digits")
    assert visited(server.address, client(workers=3, job="digits"))["job"].problem == "workers"
    assert visited(server.address, client(workers=2, job="words"))["job"].status == "failed"
    unnamed = visited(server.address, client())["job"]
    assert (unnamed.status, unnamed.problem) == ("warning", "name")
    assert "a worker needs TFPS_JOB=digits" in unnamed.advice
    assert visited(server.address, client(workers=2, job="digits"))["job"].status == "ok"


def test_a_job_that_runs_is_a_warning_and_is_not_measured(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    worker = cluster.worker([server.address], config=settings("", transport="tcp"))
    worker.declare([SUM])
    still_sums(worker)
    found = visited(server.address, client(), measure=True)
    assert (found["job"].status, found["job"].problem) == ("warning", "busy")
    assert found["job"].text == "has a job (running, 1 of 1 workers)"
    assert found["bandwidth"].status == "skipped"
    still_sums(worker)


def test_a_job_that_has_gone_on_without_a_worker_says_which_and_why(cluster: Cluster) -> None:
    server = cluster.pserver(2)
    config = settings("", transport="tcp", min_workers=1)
    workers = cluster.workers([server.address], 2, config=config)
    workers[1].fail(TfpsError("the disk is full"))
    jobs.poll(lambda: server.status().generation == 2)
    found = visited(server.address, client())["job"]
    assert "; view 2, 1 take part; latest change: view 2: rank 1" in found.text
    assert "the disk is full" in found.text
    assert "1 workers of it were lost" in found.advice
    assert (found.values["generation"], found.values["lost_workers"], found.values["joined_workers"]) == (2, 1, 0)


def test_a_job_that_begins_meanwhile_is_no_fault_of_the_network(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    visit = Visit(server.address, client())
    visit.look()
    cluster.raw(server.address)
    assert visit.measure(False) is None
    visit.close()
    assert (visit.checks[-1].status, visit.checks[-1].text) == ("skipped", "not measured: there is a job")


@contextlib.contextmanager
def grpc_server(*handlers: grpc.GenericRpcHandler) -> Iterator[str]:
    """A server that is no pserver of this version: its address."""
    server = grpc.server(DaemonPool(4, "server"), handlers=handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def answering(**replies: Callable[[bytes, object], bytes]) -> grpc.GenericRpcHandler:
    methods = {name: grpc.unary_unary_rpc_method_handler(reply) for name, reply in replies.items()}
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def test_a_grpc_server_that_is_no_pserver_is_named() -> None:
    with grpc_server() as address:
        name, problem, advice = wrong(visited(address, client()))
    assert (name, problem) == ("pserver", "stranger")
    assert "no pserver" in advice


def test_a_newer_pserver_tells_its_version() -> None:
    reply = pb.ProbeReply(protocol_version=PROTOCOL_VERSION + 1, version="99.0").SerializeToString()
    with grpc_server(answering(Probe=lambda *_: reply)) as address:
        found = visited(address, client())
    assert wrong(found)[:2] == ("pserver", "version")
    assert found["pserver"].values["version"] == "99.0"


def test_a_pserver_that_answers_at_first_and_then_no_more_is_named() -> None:
    reply = pb.ProbeReply(protocol_version=PROTOCOL_VERSION, version="1").SerializeToString()
    with grpc_server(answering(Probe=lambda *_: reply)) as address:
        visit = Visit(address, client())
        visit.look()
        visit.close()
    assert visit.checks[-1].problem == "lost"


def test_a_token_that_cannot_be_read_ends_the_visit(cluster: Cluster, tmp_path: Path) -> None:
    found = visited(cluster.pserver(1).address, client(str(tmp_path / "missing")), measure=True)
    assert list(found) == ["address", "port"]
