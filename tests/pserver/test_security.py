"""A pserver against strangers: they are refused, told why, cost next to nothing, and a job goes on meanwhile."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import jobs
import pytest
from google.protobuf.message import Message
from jobs import Cluster

from tfps.config import Config, Security, Transport
from tfps.errors import ConfigError, ConnectError, ProtocolError, PserverLostError, TfpsError
from tfps.exchange.interface import BucketSpec
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.data_port import DataPort
from tfps.pserver.metrics import MetricsServer
from tfps.pserver.server import ParameterServer
from tfps.types import Argument
from tfps.wire.connection import dial
from tfps.wire.control import CHANNEL_OPTIONS, PROTOCOL_VERSION, PULL, PUSH, Pserver, method
from tfps.wire.job_token import TOKEN_KEY, JobToken
from tfps.worker.worker import Worker

SECRET, OTHER = "the-token-of-this-job-0123456789", "the-token-of-another-0123456789x"
SUM = BucketSpec(("b",), "sum", 40_000, "float32", 0)
UNARY = ("Join", "Declare", "Waiting", "Tune", "Trace", "Clock", "Upload", "Collect", "Status", "Leave")
MIB = 2**20


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Token -> path of its file."""
    found = {"": ""}
    for number, text in enumerate((SECRET, OTHER)):
        path = tmp_path / f"token{number}"
        path.touch(0o600)
        path.write_text(text)
        found[text] = str(path)
    return found


def settings(path: str, **more: Argument) -> Config:
    own: dict[str, Argument] = {"slice_bytes": 1024, "shared_memory": False, "token_file": path}
    return Config(**{**own, "connect_timeout_s": jobs.DEADLINE_S, "step_timeout_s": jobs.DEADLINE_S, **more})


def data(server: ParameterServer) -> DataPort:
    assert server._data is not None
    return server._data


def still_sums(worker: Worker) -> None:
    """The job goes on."""
    assert jobs.push(worker, 0, bytes(40_000)).wait().error is None


# The job token


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_who_has_the_token_trains(transport: Transport, cluster: Cluster, files: dict[str, str]) -> None:
    server = cluster.pserver(2, security=Security(token_file=files[SECRET]))
    workers = cluster.workers([server.address], 2, config=settings(files[SECRET], transport=transport))
    jobs.together(*(lambda worker=worker: worker.declare([SUM]) for worker in workers))
    pushes = [jobs.push(worker, 0, b"\0\0\x80\x3f" * 10_000) for worker in workers]
    assert all(set(jobs.summed(push.wait()).tolist()) == {2.0} for push in pushes)
    assert len(workers[0].links()) == 1  # which asks for the status


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


def test_no_call_gets_through_without_the_token(cluster: Cluster, files: dict[str, str]) -> None:
    server = cluster.pserver(1, security=Security(token_file=files[SECRET]))
    worker = cluster.worker([server.address], config=settings(files[SECRET]))
    worker.declare([SUM])
    with grpc.insecure_channel(server.address, CHANNEL_OPTIONS) as channel:
        for token in ((), ((TOKEN_KEY, OTHER),), ((TOKEN_KEY, ""),)):
            for name in (*UNARY, PULL, "Nonsense"):
                with pytest.raises(grpc.RpcError) as caught:
                    channel.unary_unary(method(name))(b"", metadata=token, timeout=jobs.DEADLINE_S)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, name
            with pytest.raises(grpc.RpcError) as caught:
                channel.stream_unary(method(PUSH))(iter([b""]), metadata=token, timeout=jobs.DEADLINE_S)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert {count.error for count in server.status().errors} == {"ConnectError"}
    still_sums(worker)


def test_a_program_with_settings_of_its_own_takes_the_token_from_the_environment(
    cluster: Cluster, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = cluster.pserver(1, security=Security(token_file=files[SECRET]))
    monkeypatch.setenv("TFPS_TOKEN_FILE", files[SECRET])
    cluster.worker([server.address], config=jobs.CONFIG)


def test_the_token_shows_nowhere(files: dict[str, str]) -> None:
    """A whole job at the most talkative log level: logs, status, errors, captures, arguments."""
    serve = ("-m", "tfps.cli", "--port=0", "--host=127.0.0.1", "--workers=1", "--token-file", files[SECRET])
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
            worker.start_trace()
            still_sums(worker)
            seen += map(repr, [config, worker, worker._membership, worker._pservers[0], Security.of_worker(config, {})])
            seen.append(repr(worker.stop_trace([], "run", (), {})))
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
    with jobs.python("-m", "tfps.cli", "--status", address, "--json", *more) as process:
        return "".join(process.communicate(timeout=jobs.DEADLINE_S))


# What it must not cost


@contextlib.contextmanager
def serving(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A pserver as a process: its address."""
    with jobs.python("-m", "tfps.cli", "--port=0", "--host=127.0.0.1", *options) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[3], process


def peak_bytes(process: subprocess.Popen[str]) -> int:
    """The most memory that it has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def ask(address: str, name: str, request: bytes) -> grpc.StatusCode:
    """Calls; the code of its refusal."""
    with grpc.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        try:
            channel.unary_unary(method(name))(request, timeout=jobs.DEADLINE_S)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_a_status_of_256_mib_without_the_token_is_not_even_read(files: dict[str, str]) -> None:
    with serving("--workers=1", "--token-file", files[SECRET]) as (address, process):
        assert ask(address, "Status", b"") is grpc.StatusCode.UNAUTHENTICATED
        before = peak_bytes(process)
        code = ask(address, "Status", bytes(256 * MIB))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert peak_bytes(process) - before < 40 * MIB


def test_a_status_of_256_mib_without_tokens_is_refused_before_it_is_copied() -> None:
    with serving("--workers=1") as (address, process):
        assert ask(address, "Status", b"") is grpc.StatusCode.OK
        before = peak_bytes(process)
        assert ask(address, "Status", bytes(256 * MIB)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert peak_bytes(process) - before < 40 * MIB


def test_a_request_larger_than_its_kind_may_be_is_refused_by_name(cluster: Cluster) -> None:
    pserver = Pserver(cluster.pserver(1).address)
    cluster.callback(pserver.close)
    request = pb.StatusRequest(incarnation="x" * MIB)
    with pytest.raises(ProtocolError, match=r"a request of Status must have at most 65536 bytes, got \d+"):
        pserver.call("Status", request, jobs.DEADLINE_S)


def test_a_join_that_claims_40_million_pservers_is_refused(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    with pytest.raises(ConnectError, match=r"must have 1 to 4096 pservers .* got 40000000 pservers and number 1"):
        cluster.raw(server.address, pservers=40_000_000)
    assert server.status().jobs == 0


@pytest.mark.parametrize("name", ["job", "host", "uid", "incarnation"])
@pytest.mark.parametrize("text", ["x" * 257, "clears the screen \x1b[2J"])
def test_names_that_are_long_or_not_printable_are_refused(name: str, text: str, cluster: Cluster) -> None:
    named: dict[str, Argument] = {name: text}
    with pytest.raises(ConnectError, match=f"{name} of a worker must be at most 256 printable characters") as caught:
        cluster.raw(cluster.pserver(1).address, **named)
    assert "\x1b" not in str(caught.value)


def test_declares_of_ranks_that_do_not_exist_hold_no_thread(cluster: Cluster) -> None:
    server = cluster.pserver(2)
    member = cluster.raw(server.address).open()

    def declare(rank: int) -> Message:
        request = pb.DeclareRequest(incarnation=member.incarnation, rank=rank, timeout_s=1e9)
        return member.pserver.call("Declare", request, jobs.DEADLINE_S)

    # More than the pserver has threads: each would wait until its client gave up.
    for error in jobs.attempt(*(functools.partial(declare, rank) for rank in range(100, 130))):
        assert isinstance(error, ConnectError)
        assert re.fullmatch(r"rank 1\d\d has not joined this pserver, so it cannot declare anything", str(error))
    assert member.pserver.call("Status", pb.StatusRequest(details=True), jobs.DEADLINE_S).workers == 2


@pytest.mark.parametrize("wait_s", [1e9, float("inf"), float("nan"), -1.0])
def test_no_call_waits_longer_than_the_pserver_allows(
    wait_s: float, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfps.pserver.server._MAX_WAIT_S", 0.1)
    member = cluster.raw(cluster.pserver(2).address).open()
    with pytest.raises(TfpsError, match="not joined: rank 1"):
        member.declare(timeout_s=wait_s)


def test_joins_that_wait_for_the_end_of_a_job_leave_threads_for_others(cluster: Cluster) -> None:
    server = cluster.pserver(2)
    first, _ = (cluster.raw(server.address, rank).open() for rank in range(2))
    first.leave()  # the other stays: the job is ending, and whoever joins waits
    refused = threading.Event()

    def join() -> None:
        try:
            cluster.raw(server.address, 0)
        except ConnectError as error:
            if "too many workers wait for the end" in str(error):
                refused.set()
        except TfpsError:
            pass

    for _ in range(30):
        threading.Thread(target=join, daemon=True).start()
    assert refused.wait(jobs.DEADLINE_S)
    pserver = Pserver(server.address)
    cluster.callback(pserver.close)
    assert pserver.call("Status", pb.StatusRequest(details=True), jobs.DEADLINE_S).state == "ending"


def test_joins_come_at_a_bounded_rate(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    pserver = Pserver(server.address)
    cluster.callback(pserver.close)
    request = pb.JoinRequest(protocol_version=PROTOCOL_VERSION)
    answers = (pserver._calls["Join"](request, timeout=jobs.DEADLINE_S).failure.text for _ in range(5000))
    # Far more than the burst, and faster than the rate: others are refused for their settings.
    assert any(said.startswith("too many workers join this pserver at once; the next may in 0.") for said in answers)


@pytest.mark.parametrize(
    ("nbytes", "slice_bytes"), [(2**31, 2**20), (2**24, 1)], ids=["of many bytes", "in many slices"]
)
def test_what_does_not_fit_into_memory_cannot_be_declared(nbytes: int, slice_bytes: int, cluster: Cluster) -> None:
    server = cluster.pserver(1, max_memory=2**30)
    worker = cluster.worker([server.address], config=settings("", slice_bytes=slice_bytes))
    with pytest.raises(
        ConfigError, match=r"must fit into the 1073741824 bytes that a pserver may use \(--max-memory\)"
    ):
        worker.declare([BucketSpec(("b",), "sum", nbytes, "float32", 0)])


def test_a_layout_of_tiny_slices_is_refused(cluster: Cluster) -> None:
    server = cluster.pserver(1, max_memory=2**24)
    member = cluster.raw(server.address).open().declare()
    member.declare(pb.Bucket(names=["b"], kind="sum", nbytes=2**20, dtype="float32"), number=1)
    layout = pb.Layout(slice_bytes=4, window_bytes=4, buckets=[0], steps=[1])
    with pytest.raises(ConfigError, match="in 262145 slices of up to 4 bytes"):
        member.pserver.call("Tune", pb.TuneRequest(incarnation=member.incarnation, layout=layout), jobs.DEADLINE_S)


# A job goes on meanwhile


FLOODS: dict[str, Callable[[ParameterServer], object]] = {
    "calls": lambda server: ask(server.address, "Status", b"x" * 100_000),
    "leaves": lambda server: ask(server.address, "Leave", pb.LeaveRequest(rank=0).SerializeToString()),
    "garbage": lambda server: _say(server.port, b"\x16\x03\x01garbage" * 100),
    "connections": lambda server: _say(data(server).port, b""),
    "greetings": lambda server: _say(data(server).port, b"tfps\x02\x00" + b"\xff" * 300),
    "frames": lambda server: _say(data(server).port, bytes(10_000)),
}


def _say(port: int, text: bytes) -> None:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), jobs.DEADLINE_S) as stranger:
        stranger.settimeout(0.2)
        stranger.sendall(text)
        stranger.recv(1000)


@pytest.mark.parametrize("what", FLOODS)
def test_a_flood_of_strangers_does_not_stop_a_job(what: str, cluster: Cluster, files: dict[str, str]) -> None:
    server = cluster.pserver(1, security=Security(token_file=files[SECRET]))
    worker = cluster.worker([server.address], config=settings(files[SECRET]))
    worker.declare([SUM])
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            FLOODS[what](server)

    strangers = [threading.Thread(target=flood, daemon=True) for _ in range(20)]
    for stranger in strangers:
        stranger.start()
    try:
        for _ in range(50):
            still_sums(worker)
    finally:
        over.set()
        for stranger in strangers:
            stranger.join(jobs.DEADLINE_S)


def test_strangers_on_the_data_port_do_not_keep_a_worker_out(cluster: Cluster, files: dict[str, str]) -> None:
    server = cluster.pserver(1, security=Security(token_file=files[SECRET]))
    address = "127.0.0.1", data(server).port
    strangers = [socket.create_connection(address, jobs.DEADLINE_S) for _ in range(100)]
    worker = cluster.worker([server.address], config=settings(files[SECRET], transport="tcp"))
    worker.declare([SUM])
    still_sums(worker)
    for stranger in strangers:
        stranger.close()


def test_silent_clients_do_not_keep_prometheus_out(cluster: Cluster) -> None:
    metrics = MetricsServer(cluster.pserver(1), "127.0.0.1", 0)
    cluster.callback(metrics.stop)

    def handlers() -> int:
        return sum("process_request_thread" in thread.name for thread in threading.enumerate())

    before = handlers()
    silent = [socket.create_connection(("127.0.0.1", metrics.port), jobs.DEADLINE_S) for _ in range(100)]
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/healthz", timeout=jobs.DEADLINE_S) as reply:
        assert reply.read() == b"ok\n"
    jobs.poll(lambda: handlers() - before <= 16)
    for client in silent:
        client.close()


# The command


def test_it_listens_on_this_host_only_unless_told_whom_it_serves(files: dict[str, str]) -> None:
    for options, host, says in (
        ((), "127.0.0.1:", "tfps_pserver: listens on this host only: other hosts need --token-file FILE"),
        (
            ("--insecure",),
            "",
            "tfps_pserver: --insecure: everybody who reaches 0.0.0.0 may join, read and end its jobs",
        ),
        (("--token-file", files[SECRET]), "", ""),
    ):
        with jobs.python("-m", "tfps.cli", "--port=0", "--workers=1", *options) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith(f"tfps_pserver ready at {host}"), line
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=jobs.DEADLINE_S)
        assert log.startswith(says) if says else log == ""


def test_a_host_for_others_without_a_token_ends_with_1() -> None:
    with jobs.python("-m", "tfps.cli", "--port=0", "--workers=1", "--host=0.0.0.0") as process:
        out, log = process.communicate(timeout=jobs.DEADLINE_S)
    assert (process.returncode, out) == (1, "")
    assert "must be a loopback address such as 127.0.0.1, got '0.0.0.0': give it --token-file FILE" in log


def test_metrics_listen_on_this_host_whatever_the_pserver_does(files: dict[str, str]) -> None:
    options = ("--port=0", "--workers=1", "--metrics-port=0", "--token-file", files[SECRET])
    with jobs.python("-m", "tfps.cli", *options) as process:
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
            "token_file, --token-file) to its file\n"
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
