"""TLS between a pserver and a worker: who is accepted, what the others are told, and certificates that change."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
from pathlib import Path

import jobs
import pytest
from jobs import Cluster

from tfps.config import Config, Security
from tfps.errors import ConfigError, ConnectError
from tfps.exchange.interface import BucketSpec
from tfps.pserver.console import Watcher
from tfps.pserver.server import ParameterServer
from tfps.wire.tls import diagnose, server_credentials
from tools.certificates import Authority, Certificate

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")
SUM = BucketSpec(("b",), "sum", 40_000, "float32", 0)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One that nobody asked for."""
    return Authority(tmp_path_factory.mktemp("other"), "other")


def of_pserver(own: Certificate, authority: Authority | None = None) -> Security:
    return Security(tls_cert=own.cert, tls_key=own.key, tls_ca="" if authority is None else authority.file)


def of_worker(authority: Authority | None, own: Certificate | None = None, **more: object) -> Config:
    files = {"tls_ca": "" if authority is None else authority.file}
    if own is not None:
        files |= {"tls_cert": own.cert, "tls_key": own.key}
    settings = {"slice_bytes": 1024, "connect_timeout_s": jobs.DEADLINE_S, "step_timeout_s": jobs.DEADLINE_S}
    return Config(**{**settings, **files, **more})  # type: ignore[arg-type]


def test_slices_go_through_grpc_with_tls(
    cluster: Cluster, authority: Authority, own: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tfps")
    server = cluster.pserver(2, security=of_pserver(own, authority))
    config = of_worker(authority, authority.sign("worker"), shared_memory=False)
    workers = cluster.workers([server.address], 2, config=config)
    jobs.together(*(lambda worker=worker: worker.declare([SUM]) for worker in workers))
    pushes = [jobs.push(worker, 0, b"\0\0\x80\x3f" * 10_000) for worker in workers]
    assert all(set(jobs.summed(push.wait()).tolist()) == {2.0} for push in pushes)
    assert server._data is None
    said = [record.getMessage() for record in caplog.records if "slices go through gRPC" in record.getMessage()]
    assert said == [f"tfps: pserver {server.address} uses TLS: slices go through gRPC"] * 2


def test_shared_memory_stays_in_use_with_tls(cluster: Cluster, authority: Authority, own: Certificate) -> None:
    server = cluster.pserver(1, security=of_pserver(own))
    worker = cluster.worker([server.address], config=of_worker(authority))
    worker.declare([SUM])
    assert jobs.push(worker, 0, bytes(40_000)).wait().error is None
    assert server.status().members[0].shared_memory


def test_tcp_is_refused_with_tls(authority: Authority) -> None:
    with pytest.raises(ConfigError, match=r'transport must be "auto" or "grpc" with TLS .* got "tcp"'):
        Security.of_worker(of_worker(authority, transport="tcp"), {})


def test_a_data_port_is_refused_with_tls(own: Certificate) -> None:
    with pytest.raises(ConfigError, match=r"data_port must be 0 with TLS, .* got 4711"):
        ParameterServer("127.0.0.1", 0, workers=1, data_port=4711, security=of_pserver(own))


def test_a_worker_without_tls_is_told_that_the_pserver_has_it(cluster: Cluster, own: Certificate) -> None:
    server = cluster.pserver(1, security=of_pserver(own))
    with pytest.raises(ConnectError, match=f"pserver {server.address} uses TLS, this worker does not: set TFPS_TLS_CA"):
        cluster.worker([server.address], config=of_worker(None))


def test_a_worker_with_tls_is_told_that_the_pserver_has_none(cluster: Cluster, authority: Authority) -> None:
    server = cluster.pserver(1)
    with pytest.raises(ConnectError, match="does not use TLS, this worker does: start the pserver with --tls-cert"):
        cluster.worker([server.address], config=of_worker(authority))


def test_a_worker_without_a_certificate_is_told_that_the_pserver_wants_one(
    cluster: Cluster, authority: Authority, own: Certificate
) -> None:
    server = cluster.pserver(1, security=of_pserver(own, authority))
    with pytest.raises(ConnectError, match=r"wants a certificate of this worker \(.*\): set TFPS_TLS_CERT"):
        cluster.worker([server.address], config=of_worker(authority))


def test_a_worker_with_a_certificate_of_another_authority_is_refused(
    cluster: Cluster, authority: Authority, own: Certificate, other: Authority
) -> None:
    server = cluster.pserver(1, security=of_pserver(own, authority))
    with pytest.raises(ConnectError, match=r"does not accept the certificate .* of this worker"):
        cluster.worker([server.address], config=of_worker(authority, other.sign("worker")))


@pytest.mark.parametrize(("of", "rule"), [("DNS:elsewhere", "not valid for '127.0.0.1'"), (None, "self.signed|issuer")])
def test_a_pserver_with_the_wrong_certificate_is_refused(
    of: str | None, rule: str, cluster: Cluster, authority: Authority, other: Authority
) -> None:
    wrong = other.sign("pserver") if of is None else authority.sign("elsewhere", of)
    server = cluster.pserver(1, security=of_pserver(wrong))
    with pytest.raises(ConnectError, match=f"has a certificate that TFPS_TLS_CA=.* does not confirm: .*({rule})"):
        cluster.worker([server.address], config=of_worker(authority))


def test_a_status_says_which_end_lacks_tls(
    cluster: Cluster, authority: Authority, own: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfps.wire.control.diagnose", functools.partial(diagnose, timeout_s=jobs.DEADLINE_S))
    encrypted, plain = cluster.pserver(1, security=of_pserver(own)), cluster.pserver(1)
    for server, security, rule in (
        (encrypted, Security(), "uses TLS, this worker does not: set TFPS_TLS_CA"),
        (plain, Security(tls_ca=authority.file), "does not use TLS, this worker does"),
    ):
        with contextlib.closing(Watcher(server.address, security)) as watcher, pytest.raises(ConnectError, match=rule):
            watcher.look(0.0)
    with contextlib.closing(Watcher(encrypted.address, Security(tls_ca=authority.file))) as watcher:
        look = watcher.look(0.0)
    assert look is not None and look.now.state == "idle"


def test_where_nothing_answers_nothing_is_wrong_with_tls(authority: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert diagnose(address, Security(tls_ca=authority.file), timeout_s=0.2) is None
    assert diagnose(address, Security(), timeout_s=0.2) is None


def test_certificates_that_change_are_read_anew(
    cluster: Cluster, authority: Authority, other: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tfps")
    asked = functools.partial(diagnose, timeout_s=jobs.DEADLINE_S)
    used = Certificate(str(tmp_path / "cert"), str(tmp_path / "key"))

    def put(new: Certificate, *, key: bool = True) -> None:
        for source, target in ((new.cert, used.cert), (new.key, used.key))[: 1 + key]:
            shutil.copy(source, f"{target}.new")
            os.replace(f"{target}.new", target)  # noqa: PTH105 (atomically, as those who renew certificates do)

    put(authority.sign("first"))
    server = cluster.pserver(1, security=of_pserver(used))
    old, new = Security(tls_ca=authority.file), Security(tls_ca=other.file)
    assert (asked(server.address, old), bool(asked(server.address, new))) == ("", True)
    half, whole = other.sign("half"), other.sign("whole")
    put(half, key=False)
    assert asked(server.address, old) == ""
    assert "certificates have changed, but the earlier ones stay in use: tls_cert and tls_key must be" in caplog.text
    put(whole)
    assert (bool(asked(server.address, old)), asked(server.address, new)) == (True, "")
    assert "certificates have changed and were read anew" in caplog.text


def test_malformed_files_are_refused_by_name(own: Certificate, authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    empty, missing = str(tmp_path / "empty"), str(tmp_path / "missing")
    for security, rule in (
        (Security(tls_cert=empty, tls_key=own.key), "tls_cert and tls_key must be a certificate and its key"),
        (Security(tls_cert=own.cert, tls_key=authority.sign("w").key), "tls_cert and tls_key must be a certificate"),
        (Security(tls_cert=missing, tls_key=own.key), "cannot be read: No such file"),
        (Security(tls_cert=own.cert, tls_key=own.key, tls_ca=empty), "tls_ca must be a file of certificates"),
        (Security(tls_cert=own.cert, tls_key=own.key, tls_ca=missing), "tls_ca '.*' cannot be read: No such file"),
    ):
        with pytest.raises(ConfigError, match=rule):
            server_credentials(security)


def test_a_certificate_needs_its_key() -> None:
    with pytest.raises(ConfigError, match="tls_cert and tls_key must be given together, got tls_key without tls_cert"):
        Security(tls_key="key")
    with pytest.raises(ConfigError, match="tls_cert of a worker must come with tls_ca"):
        Security.of_worker(Config(tls_cert="cert", tls_key="key"), {})
