"""A pserver as a worker of this host would see it: real pservers, real certificates, and servers that are none."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import jobs
import pytest
from guarded import OTHER, SECRET, SUM, data, settings, still_sums
from jobs import Cluster

from tfps.config import Config, Security
from tfps.doctor.pserver import Client, Visit
from tfps.doctor.report import Check
from tfps.launch.cluster_spec import Cluster as Places
from tfps.protos import tfps_pb2 as pb
from tfps.threads import DaemonPool
from tfps.version import __version__
from tfps.wire import reach
from tfps.wire.control import PROTOCOL_VERSION, SERVICE
from tfps.wire.shared_memory import Arena
from tools.certificates import Authority, Certificate

SHORT_S = 0.1
pytestmark = pytest.mark.usefixtures("near")
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")


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
            visit.checks.append(Check("bandwidth", "ok", found.text, values=found.values))
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
    assert found["job"].values == {"state": "idle", "workers": 2, "members": 0, "name": ""}
    assert found["data port"].values == {"port": data(server).port}
    assert 0 < found["round trip"].values["network_s"] < jobs.DEADLINE_S
    assert abs(found["clock"].values["offset_s"]) <= found["clock"].values["error_s"]  # one process, one clock
    assert abs(found["clock"].values["wall_offset_s"]) < jobs.DEADLINE_S
    assert found["bandwidth"].values["path"] == "tcp"
    assert server.status().errors == ()  # nothing that an operator would wonder about


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


def test_a_job_that_begins_meanwhile_is_no_fault_of_the_network(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    visit = Visit(server.address, client(timeout_s=0.2))
    visit.look()
    cluster.raw(server.address)
    assert visit.measure(False) is None
    visit.close()
    assert (visit.checks[-1].status, visit.checks[-1].text) == ("skipped", "not measured: there is a job")


def test_a_job_that_waits_for_workers_is_no_problem(cluster: Cluster) -> None:
    server = cluster.pserver(2)
    cluster.raw(server.address)
    assert visited(server.address, client())["job"].text == "joining, 1 of 2 workers"


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
        name, problem, advice = wrong(visited(address, client(timeout_s=0.5)))
    assert (name, problem) == ("pserver", "stranger")
    assert "no pserver" in advice


@pytest.mark.parametrize(
    ("protocol", "status", "problem"), [(4, "failed", "version"), (PROTOCOL_VERSION, "warning", "old")]
)
def test_an_older_pserver_is_asked_for_its_version(protocol: int, status: str, problem: str) -> None:
    def join(request: bytes, _: object) -> bytes:
        assert pb.JoinRequest.FromString(request).protocol_version == 0  # which cannot join
        failure = pb.Failure(code=2, text="other version")
        return pb.JoinReply(protocol_version=protocol, failure=failure).SerializeToString()

    with grpc_server(answering(Join=join)) as address:
        check = visited(address, client())["pserver"]
    assert (check.status, check.problem) == (status, problem)
    assert check.values["protocol_version"] == protocol


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
