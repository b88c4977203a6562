"""`tfps_pserver` as a process."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import signal
import socket
import subprocess
from pathlib import Path

import jobs
import pytest
from guarded import serving

from tfps.config import Config
from tfps.errors import ConfigError, PserverLostError
from tfps.exchange.interface import BucketSpec
from tfps.pserver.cli import main
from tfps.types import Options
from tfps.worker.worker import Worker

SERVE = ("-m", "tfps.pserver.cli", "--host=127.0.0.1", "--port=0")


def ready(process: subprocess.Popen[str]) -> str:
    """The address in the ready line."""
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.fullmatch(r"tfps_pserver ready at (127\.0\.0\.1:[1-9]\d*) workers=(\d+)\n", line)
    assert match, line
    return match[1]


def test_it_prints_one_line_serves_and_ends_cleanly_on_sigterm() -> None:
    with jobs.python(*SERVE, "--workers=1") as process:
        address = ready(process)
        worker = Worker([address], config=jobs.CONFIG)
        (bucket,) = worker.declare([BucketSpec(("b",), "sum", 8, "float32", 0)])
        jobs.push(worker, bucket, bytes(8)).wait()
        process.send_signal(signal.SIGTERM)
        error = jobs.Failed(worker).wait()
        worker.close()
        rest, log = process.communicate(timeout=jobs.DEADLINE_S)
    assert isinstance(error, PserverLostError)
    assert re.match(rf"pserver {address}(:| was stopped)", str(error))  # stopped, or a connection that ended first
    assert (process.returncode, rest) == (0, "")
    lines = [line.removeprefix("tfps_pserver: ") for line in log.splitlines()]
    who = f"rank 0 ({socket.gethostname()}:{os.getpid()})"
    assert lines == [
        "no job token: every user of this host may join, read and end its jobs; see --token-file",
        f"job begins: {who} is the first of 1 workers",
        f"job has failed: PserverLostError: pserver {address} was stopped",
    ]


def test_it_logs_which_jobs_begin_end_and_fail_and_whom_they_have_lost(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("the-token-of-this-job-0123456789")
    token.chmod(0o600)
    config = dataclasses.replace(jobs.CONFIG, token_file=str(token))
    with jobs.python(*SERVE, "--workers=1", "--token-file", str(token)) as process:
        address = ready(process)
        Worker([address], job="first", config=config).close()
        lost = jobs.RawWorker(address, 0, config, job="second").open().declare()
        lost.close()
        assert process.stderr is not None
        lines = [process.stderr.readline().rstrip("\n").removeprefix("tfps_pserver: ") for _ in range(4)]
    who = f"rank 0 ({socket.gethostname()}:{os.getpid()})"
    raw = f"rank 0 (rawhost:{os.getpid()})"
    assert lines == [
        f"job 'first' begins: {who} is the first of 1 workers",
        "job 'first' has ended: all its workers have left",
        f"job 'second' begins: {raw} is the first of 1 workers",
        f"job 'second' has failed: WorkerLostError: {raw} died at step 0: its connection ended without a leave",
    ]


def test_ctrl_c_ends_it_cleanly() -> None:
    with jobs.python(*SERVE, "--workers=2") as process:
        ready(process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=jobs.DEADLINE_S)
    assert process.returncode == 0


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux")
def test_it_may_open_as_many_files_as_the_hard_limit_allows() -> None:
    own, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(own, 500), most))
    try:
        with serving("--workers=1") as (_, process):
            soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            assert hard == most
            assert soft == 2**20 if hard == resource.RLIM_INFINITY else soft == min(hard, 2**20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (own, most))


def test_it_starts_without_tensorflow() -> None:
    with jobs.python("-X", "importtime", *SERVE, "--workers=1") as process:
        ready(process)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=jobs.DEADLINE_S)
    imported = {line.rpartition("|")[2].strip() for line in log.splitlines() if line.startswith("import time:")}
    assert {"grpc", "numpy", "tfps.pserver.server"} <= imported
    assert not {"tensorflow", "keras"} & imported


def test_a_port_in_use_is_said_and_ends_with_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with jobs.python("-m", "tfps.pserver.cli", "--host=127.0.0.1", f"--port={port}", "--workers=1") as process:
            out, log = process.communicate(timeout=jobs.DEADLINE_S)
    assert process.returncode == 1
    assert out == ""
    assert log.startswith(f"tfps_pserver: cannot listen on 127.0.0.1:{port}: Address already in use"), log
    assert log.endswith("; end it, or choose another port\n"), log


@pytest.mark.parametrize(
    ("arguments", "code", "rule"),
    [
        ([], 2, "the following arguments are required: --workers"),
        (["--workers=1", "--port=65536"], 2, "--port must be from 0 to 65535, got 65536"),
        (["--workers=1", "--metrics-port=65536"], 2, "--metrics-port must be from 0 to 65535, got 65536"),
        (["--json"], 2, "--json belongs to --status"),
        (["--status=host"], 1, "'host:port'"),
        (["--status=127.0.0.1:1"], 1, "pserver 127.0.0.1:1: 127.0.0.1: refused: nothing listens there; is"),
    ],
)
def test_malformed_arguments_are_refused(
    arguments: list[str], code: int, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended: object = main(arguments)
    except SystemExit as exit_:
        ended = exit_.code
    out, log = capsys.readouterr()
    assert (ended, out) == (code, "")
    assert rule in log


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--workers=0"], "workers must be at least 1, got 0"),
        (
            ["--workers=1", "--metrics-port=0", "--metrics-host=0.0.0.0"],
            "--metrics-host of a pserver without a job token and without TLS must be a loopback address",
        ),
        (
            ["--workers=1", "--host=0.0.0.0"],
            "must be a loopback address such as 127.0.0.1, got '0.0.0.0': give it --tok",
        ),
        (["--workers=1", "--host=no.such.host.invalid"], "cannot listen on no.such.host.invalid:0"),
    ],
)
def test_a_pserver_that_cannot_serve_ends_with_1(arguments: list[str], rule: str) -> None:
    with jobs.python(*SERVE, *arguments) as process:
        out, log = process.communicate(timeout=jobs.DEADLINE_S)
    assert (process.returncode, out) == (1, "")
    assert rule in log


def test_metrics_that_other_hosts_reach_are_said_with_insecure_in_the_log() -> None:
    with jobs.python(*SERVE, "--workers=1", "--insecure", "--metrics-port=0", "--metrics-host=0.0.0.0") as process:
        ready(process)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=jobs.DEADLINE_S)
    assert "tfps_pserver: --insecure: everybody who reaches 0.0.0.0 may read its metrics\n" in log


def test_metrics_that_other_hosts_reach_need_a_token_and_nothing_more(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("the-token-of-this-job-0123456789")
    (tmp_path / "token").chmod(0o600)
    options = f"--token-file={tmp_path / 'token'}", "--metrics-port=0", "--metrics-host=0.0.0.0"
    with jobs.python(*SERVE, "--workers=1", *options) as process:
        ready(process)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=jobs.DEADLINE_S)
    assert "metrics at http://" in log
    assert "--insecure" not in log


def test_what_is_beyond_max_memory_is_refused_by_that_name() -> None:
    with jobs.python(*SERVE, "--workers=1", "--max-memory=0.001") as process:
        worker = Worker([ready(process)], config=jobs.CONFIG)
        try:
            worker.declare([BucketSpec(("small",), "sum", 8, "float32", 0)])
            with pytest.raises(
                ConfigError, match=r"must fit into the 1073741 bytes that a pserver may use \(--max-memory\)"
            ):
                worker.declare([BucketSpec(("large",), "sum", 2 * 2**20, "float32", 0)])
        finally:
            worker.close()


def test_a_pserver_of_one_job_refuses_others() -> None:
    with jobs.python(*SERVE, "--workers=1", "--job=mnist") as process:
        address = ready(process)
        options: Options = {"config": Config(connect_timeout_s=jobs.DEADLINE_S)}
        with pytest.raises(Exception, match="only job 'mnist'"):
            Worker([address], job="imagenet", **options)
        Worker([address], job="mnist", **options).close()


def test_while_needed_it_ends_with_the_last_worker_after_the_program_that_started_it() -> None:
    with jobs.python(*SERVE, "--workers=1", "--while-needed") as process:
        address = ready(process)
        for _ in range(2):  # a job's end alone does not end it
            worker = Worker([address], config=jobs.CONFIG)
            worker.close()
        worker = Worker([address], config=jobs.CONFIG)
        (bucket,) = worker.declare([BucketSpec(("b",), "sum", 8, "float32", 0)])
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None  # so that nobody flushes it
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1.5)  # long enough for several looks
        jobs.push(worker, bucket, bytes(8)).wait()
        worker.close()
        assert process.wait(timeout=jobs.DEADLINE_S) == 0
