"""A pserver with a job token: whom it lets in, what it tells the others, where it listens, and that nobody sees it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
from pathlib import Path

import grpc
import jobs
import pytest
from guarded import OTHER, SECRET, SUM, data, serving, settings, still_sums
from jobs import Cluster

from tfps.config import Security, Transport
from tfps.errors import ConnectError, PserverLostError
from tfps.protos import tfps_pb2 as pb
from tfps.wire.connection import dial
from tfps.wire.control import CHANNEL_OPTIONS, MEASURE, PULL, PUSH, Pserver, method
from tfps.wire.job_token import TOKEN_KEY, JobToken

UNARY = ("Join", "Declare", "Waiting", "Tune", "Trace", "Clock", "Upload", "Collect", "Status", "Probe", "Leave")


# The job token


@pytest.mark.parametrize(
    ("own", "theirs", "says"),
    [
        (SECRET, "", "wants a job token, this client sent none: set TFPS_TOKEN_FILE"),
        (SECRET, OTHER, "has another job token than this client"),
        ("", SECRET, "was started without a job token, but this client has one: start the pserver with --token-file"),
    ],
)
def test_a_worker_is_told_which_end_lacks_what(
    own: str, theirs: str, says: str, cluster: Cluster, files: dict[str, str]
) -> None:
    server = cluster.pserver(1, security=Security(token_file=files[own]))
    with pytest.raises(ConnectError) as caught:
        cluster.worker([server.address], config=settings(files[theirs]))
    assert str(caught.value).startswith(f"pserver {server.address} {says}")
    with pytest.raises(ConnectError) as refused:
        dial(server.address, data(server).port, JobToken(theirs), "incarnation", 0, jobs.DEADLINE_S)
    assert says in str(refused.value)


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_who_has_the_token_trains_and_no_call_gets_through_without_it(
    transport: Transport, cluster: Cluster, files: dict[str, str]
) -> None:
    server = cluster.pserver(1, security=Security(token_file=files[SECRET]))
    worker = cluster.worker([server.address], config=settings(files[SECRET], transport=transport))
    worker.declare([SUM])
    with grpc.insecure_channel(server.address, CHANNEL_OPTIONS) as channel:
        for token in ((), ((TOKEN_KEY, OTHER),), ((TOKEN_KEY, ""),)):
            for name in (*UNARY, PULL, MEASURE, "Nonsense"):
                with pytest.raises(grpc.RpcError) as caught:
                    channel.unary_unary(method(name))(b"", metadata=token, timeout=jobs.DEADLINE_S)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, name
            with pytest.raises(grpc.RpcError) as caught:
                channel.stream_unary(method(PUSH))(iter([b""]), metadata=token, timeout=jobs.DEADLINE_S)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert {count.error for count in server.status().errors} == {"ConnectError"}
    still_sums(worker)
    assert len(worker.info.links()) == 1  # which asks for the status


def test_a_program_with_settings_of_its_own_takes_the_token_from_the_environment(
    cluster: Cluster, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = cluster.pserver(1, security=Security(token_file=files[SECRET]))
    monkeypatch.setenv("TFPS_TOKEN_FILE", files[SECRET])
    cluster.worker([server.address], config=jobs.CONFIG)


def test_the_token_shows_nowhere(files: dict[str, str]) -> None:
    """A whole job at the most talkative log level: logs, status, errors, captures, arguments."""
    serve = ("-m", "tfps.pserver.cli", "--port=0", "--host=127.0.0.1", "--workers=1", "--token-file", files[SECRET])
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        with jobs.python(*serve) as process, contextlib.ExitStack() as stack:
            assert process.stdout is not None
            address = process.stdout.readline().split()[3]
            config = settings(files[SECRET])
            cluster = stack.enter_context(Cluster())
            worker = cluster.worker([address], config=config)
            worker.declare([SUM])
            worker.captures.start()
            still_sums(worker)
            membership, pserver = worker.client.membership, worker._pservers[0]
            seen += map(repr, [config, worker, membership, pserver, Security.of_worker(config, {})])
            seen.append(repr(worker.captures.stop([], "run", (), {})))
            for arguments in (("--token-file", files[SECRET]), ("--token-file", files[OTHER]), ()):
                seen.append(_status(address, *arguments))
            with pytest.raises(ConnectError) as caught:
                cluster.worker([address], config=settings(files[OTHER]))
            seen.append(str(caught.value))
            seen.append(Path(f"/proc/{process.pid}/cmdline").read_text())
            process.send_signal(signal.SIGTERM)
            seen += process.communicate(timeout=jobs.DEADLINE_S)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    assert any('"state": "running"' in text for text in seen)
    assert any("has another job token" in text for text in seen)
    assert not [text for text in seen if SECRET in text or OTHER in text]


def _status(address: str, *more: str) -> str:
    with jobs.python("-m", "tfps.pserver.cli", "--status", address, "--json", *more) as process:
        return "".join(process.communicate(timeout=jobs.DEADLINE_S))


# The command


def test_it_listens_on_this_host_only_unless_told_whom_it_serves(files: dict[str, str], tmp_path: Path) -> None:
    readable = tmp_path / "readable"
    readable.write_text(SECRET)
    readable.chmod(0o644)
    for options, host, says in (
        ((), "127.0.0.1:", "tfps_pserver: listens on this host only: other hosts need --token-file FILE"),
        (
            ("--insecure",),
            "",
            "tfps_pserver: --insecure: everybody who reaches 0.0.0.0 may join, read and end its jobs",
        ),
        (("--token-file", files[SECRET]), "", ""),
        (("--token-file", str(readable)), "", f"tfps_pserver: token_file '{readable}' may be read by other users"),
    ):
        with jobs.python("-m", "tfps.pserver.cli", "--port=0", "--workers=1", *options) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith(f"tfps_pserver ready at {host}"), line
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=jobs.DEADLINE_S)
        assert log.startswith(says) if says else log == ""


def test_metrics_listen_on_this_host_whatever_the_pserver_does(files: dict[str, str]) -> None:
    options = ("--port=0", "--workers=1", "--metrics-port=0", "--token-file", files[SECRET])
    with jobs.python("-m", "tfps.pserver.cli", *options) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=jobs.DEADLINE_S)
    assert re.fullmatch(r"tfps_pserver: metrics at http://127\.0\.0\.1:\d+/metrics\n", log)


def test_the_status_of_a_pserver_with_a_token_needs_it(files: dict[str, str]) -> None:
    with serving("--workers=1", "--token-file", files[SECRET]) as (address, _):
        assert json.loads(_status(address, "--token-file", files[SECRET]))["job"]["state"] == "idle"
        assert _status(address) == (
            f"tfps_pserver: pserver {address} wants a job token, this client sent none: set TFPS_TOKEN_FILE (or "
            "token_file, --token-file) to its file; a job of tfps_launch has one that nobody can name, unless it was "
            "started with --token-file\n"
        )


def test_a_stranger_that_is_lost_is_no_lost_pserver(cluster: Cluster, files: dict[str, str]) -> None:
    """A running worker does not mistake a refusal for the end of its pserver."""
    server = cluster.pserver(1, security=Security(token_file=files[SECRET]))
    stranger = Pserver(server.address)
    cluster.callback(stranger.close)
    with pytest.raises(ConnectError) as caught:
        stranger.call("Status", pb.StatusRequest(), jobs.DEADLINE_S)
    assert not isinstance(caught.value, PserverLostError)
    assert os.path.basename(files[SECRET]) not in str(caught.value)  # noqa: PTH119
