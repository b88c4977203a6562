"""`tfps_doctor`: exit codes, JSON, a host without TensorFlow, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket

import jobs
import pytest
from guarded import OTHER, SECRET
from jobs import Cluster

from tfps.config import Security
from tfps.doctor.cli import main

WITHOUT_TENSORFLOW = """
import sys
sys.modules.update(dict.fromkeys(("tensorflow", "keras", "rich"), None))
from tfps.doctor.cli import main
sys.exit(main())
"""


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
