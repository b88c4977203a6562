"""`tfps_doctor`: whole examinations and the command."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import jobs
import pytest
from guarded import OTHER, SECRET
from jobs import Cluster

from tfps.config import Security
from tfps.doctor.cli import HOW, examine, main
from tfps.doctor.report import Check, Report
from tools import netlab
from tools.netlab import Netlab

SHORT_S = 0.1
pytestmark = pytest.mark.usefixtures("near")
SOCKETS = {"TFPS_SHARED_MEMORY": "0"}
WITHOUT_TENSORFLOW = """
import sys
sys.modules.update(dict.fromkeys(("tensorflow", "keras", "rich"), None))
from tfps.doctor.cli import main
sys.exit(main())
"""


def look(*addresses: str, **environment: str) -> Report:
    return examine(addresses, timeout_s=jobs.DEADLINE_S, seconds=SHORT_S, ask_tensorflow=False, environment=environment)


def of_host(report: Report) -> dict[str, Check]:
    return {check.name: check for check in report.groups[0].checks}


def of_pserver(report: Report, index: int = 0) -> dict[str, Check]:
    return {check.name: check for check in report.groups[1 + index].checks}


def test_without_pservers_this_host_is_checked_and_told_how_to_give_some() -> None:
    report = look()
    assert report.healthy
    assert len(report.groups) == 1
    assert (of_host(report)["pservers"].status, of_host(report)["pservers"].text) == ("skipped", HOW)


def test_pservers_come_from_the_arguments_the_launcher_or_tf_config(cluster: Cluster) -> None:
    first, second = cluster.pservers(2, 2)
    tasks = {"cluster": {"worker": ["a:1", "b:1"], "ps": [second]}, "task": {"type": "worker", "index": 1}}
    both = {"TFPS_PSERVERS": first, "TF_CONFIG": json.dumps(tasks)}
    assert [group.address for group in look(TF_CONFIG=both["TF_CONFIG"]).groups[1:]] == [second]
    assert [group.address for group in look(**both).groups[1:]] == [first]
    assert [group.address for group in look(second, first, **both).groups[1:]] == [second, first]


@pytest.mark.parametrize(
    ("addresses", "environment", "says"),
    [
        (["h"], {}, "a pserver address must be 'host:port' with a port from 1 to 65535, got 'h'"),
        (["h:1", "h:1"], {}, "pservers must be different addresses, got h:1, h:1"),
        ([], {"TF_CONFIG": "{"}, "TF_CONFIG must be JSON"),
        ([], {"TF_CONFIG": '{"cluster": {"ps": ["h:1"]}, "task": {"type": "ps", "index": 0}}'}, "run `tfps_pserver"),
    ],
)
def test_what_a_strategy_would_refuse_fails(addresses: list[str], environment: dict[str, str], says: str) -> None:
    report = look(*addresses, **environment)
    assert not report.healthy
    assert of_host(report)["pservers"].problem == "malformed"
    assert any(says in line for line in report.to_do())


def test_settings_that_contradict_each_other_fail() -> None:
    report = look(TFPS_TLS_CA="ca.pem", TFPS_TRANSPORT="tcp")
    assert of_host(report)["security"].status == "failed"
    assert not report.healthy


def test_a_token_given_as_an_argument_wins(cluster: Cluster, files: dict[str, str]) -> None:
    server = cluster.pserver(1, security=Security(token_file=files[SECRET]))
    environment = {"TFPS_TOKEN_FILE": files[OTHER]}
    report = examine(
        [server.address], token_file=files[SECRET], seconds=SHORT_S, ask_tensorflow=False, environment=environment
    )
    assert report.healthy
    assert not look(server.address, **environment).healthy


def test_each_pserver_is_looked_at_although_others_cannot_be_reached(cluster: Cluster) -> None:
    good, closed = cluster.pserver(1).address, f"127.0.0.1:{jobs.unused_ports(1)}"
    report = look(closed, good, **SOCKETS)
    assert not report.healthy
    assert of_pserver(report, 0)["port"].problem == "refused"
    assert of_pserver(report, 1)["bandwidth"].values["path"] == "tcp"
    assert report.to_do()[0].startswith(f"pserver {closed}: nothing listens")


def test_gpus_are_those_that_a_worker_would_see() -> None:
    assert of_host(look(CUDA_VISIBLE_DEVICES="0,3"))["gpus"].values == {"visible": 2, "seen_by_tensorflow": None}


# A link


@pytest.mark.long
@pytest.mark.skipif(netlab.unavailable() is not None, reason=str(netlab.unavailable()))
@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_the_bandwidth_of_a_link_of_100_mbit_is_found(
    transport: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(netlab, "ATTEMPTS", 20)
    environment = {"PYTHONPATH": str(jobs.ROOT), "PYTHONUNBUFFERED": "1", "TFPS_TOKEN_FILE": files[SECRET]}
    with Netlab(2, 100) as lab:
        lab.probe()
        one, two = lab.hosts
        serve = [sys.executable, "-m", "tfps.pserver.cli", "--workers=1", "--port=7070"]
        server = one.popen(serve, env=environment, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        assert server.stdout.readline().startswith("tfps_pserver ready at ")
        ask = [sys.executable, "-m", "tfps.doctor", f"{one.address}:7070", "--json", "--no-tensorflow"]
        best = []
        for _ in range(3):  # a busy machine spoils some measurements
            doctor = two.popen(ask, env={**environment, "TFPS_TRANSPORT": transport}, stdout=subprocess.PIPE, text=True)
            output, _ = doctor.communicate(timeout=jobs.DEADLINE_S)
            assert doctor.returncode == 0, output
            checks = {check["check"]: check for check in json.loads(output)["pservers"][0]["checks"]}
            rates = checks["bandwidth"]["values"]
            assert rates["path"] == transport
            best.append([rates[f"{direction}_bytes_per_s"] * 8 / 1e6 for direction in ("push", "pull")])
            if all(80 <= mbit <= 120 for mbit in best[-1]):
                break
        assert all(80 <= mbit <= 120 for mbit in best[-1]), best
        assert checks["address"]["values"]["addresses"] == [one.address]
        assert "shared_memory" not in checks  # network namespaces count as hosts


@pytest.fixture(autouse=True)
def bare(near: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables of tfps but those of the test: each unknown one is a warning."""
    for name in [name for name in os.environ if name.startswith("TFPS_")]:
        monkeypatch.delenv(name)


def test_a_good_pserver_is_exit_code_0_and_a_refused_token_1(
    cluster: Cluster, files: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = cluster.pserver(1, security=Security(token_file=files[SECRET])).address
    assert main([address, "--token-file", files[SECRET], "--no-tensorflow"]) == 0
    assert "a job would run here" in capsys.readouterr().out
    monkeypatch.setenv("TFPS_PSERVERS", address)
    monkeypatch.setenv("TFPS_TOKEN_FILE", files[OTHER])
    assert main(["--no-tensorflow"]) == 1
    output = capsys.readouterr().out
    assert f"  1. pserver {address}: has another job token than this client: TFPS_TOKEN_FILE" in output
    assert SECRET not in output
    assert OTHER not in output


def test_the_json_is_one_object(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([cluster.pserver(1).address, "--json", "--no-tensorflow"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["healthy"], found["to_do"]) == (True, [])
    names = {check["check"] for group in (found, *found["pservers"]) for check in group["checks"]}
    assert {"python", "grpcio", "open_files", "token", "port", "pserver", "round_trip", "clock"} <= names


def test_warnings_do_not_fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFPS_TRANSPROT", "tcp")
    assert main(["--no-tensorflow"]) == 0
    assert "A job would run here. Look at:\n  1. the environment variable" in capsys.readouterr().out


def test_a_host_without_tensorflow_is_fine(cluster: Cluster) -> None:
    with jobs.python("-c", WITHOUT_TENSORFLOW, cluster.pserver(1).address, "--no-tensorflow") as process:
        output, errors = process.communicate(timeout=jobs.DEADLINE_S)
    assert (process.returncode, errors) == (0, "")
    assert "job would run here" in output


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "601"])
def test_a_time_out_of_range_is_refused(timeout: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--timeout", timeout])
    assert "--timeout must be a number of seconds up to 600" in capsys.readouterr().err


def test_ctrl_c_ends_it_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with jobs.python("-m", "tfps.doctor", address, "--no-tensorflow", "--timeout=600") as process:
            silent.settimeout(jobs.DEADLINE_S)
            silent.accept()[0].close()  # it has begun
            process.send_signal(signal.SIGINT)
            assert process.wait(jobs.DEADLINE_S) == 130
