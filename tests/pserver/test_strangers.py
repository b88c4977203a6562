"""Strangers, and members that ask for too much: they cost next to nothing, and a job goes on meanwhile."""

from __future__ import annotations

import contextlib
import functools
import re
import resource
import socket
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import jobs
import pytest
from google.protobuf.message import Message
from guarded import SECRET, SUM, data, peak_bytes, serving, settings, still_sums
from jobs import Cluster

from tfps.config import Config, Security
from tfps.errors import ClosedError, ConfigError, ConnectError, ProtocolError, TfpsError
from tfps.exchange.interface import BucketSpec
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.metrics import MetricsServer
from tfps.pserver.server import ParameterServer
from tfps.types import Argument
from tfps.wire.connection import introduce
from tfps.wire.control import CHANNEL_OPTIONS, PROTOCOL_VERSION, Pserver, method
from tfps.wire.frames import Header, Kind, encode
from tfps.wire.job_token import JobToken
from tfps.wire.measuring import measure_grpc, purpose

MIB = 2**20


# What it must not cost


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


def test_many_calls_of_1_mb_without_the_token_are_not_kept(files: dict[str, str]) -> None:
    with serving("--workers=1", "--token-file", files[SECRET]) as (address, process):
        assert ask(address, "Status", b"") is grpc.StatusCode.UNAUTHENTICATED
        before = peak_bytes(process)
        with contextlib.ExitStack() as connections:
            calls: list[grpc.Future] = []
            for _ in range(4):
                channel = connections.enter_context(grpc.insecure_channel(address, CHANNEL_OPTIONS))
                status = channel.unary_unary(method("Status"))
                calls += [status.future(bytes(MIB), timeout=jobs.DEADLINE_S) for _ in range(32)]
            # All are answered, so the pserver has kept of each whatever it keeps.
            assert {call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
        assert peak_bytes(process) - before < 40 * MIB


@pytest.mark.skipif(tuple(map(int, grpc.__version__.split(".")[:2])) < (1, 84), reason="needs gRPC 1.84")
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
        assert re.fullmatch(
            r"rank 1\d\d has not joined this pserver, or was lost: it cannot declare anything", str(error)
        )
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


@pytest.mark.parametrize("rank", ["9" * 5000, "-1", "1 ", "x", ""])
def test_a_rank_that_is_no_number_is_refused_by_name(rank: str, cluster: Cluster) -> None:
    for error in cluster.raw(cluster.pserver(1).address).second_streams(None, rank):
        assert re.fullmatch(r"metadata tfps-rank must be a number, got '[^']{0,20}'", str(error))


def test_members_that_only_push_and_leave_hold_no_threads(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    for _ in range(30):  # more than the pserver has threads
        member = cluster.raw(server.address)
        pushing = member._push(member._outbox, member.incarnation, "0")
        jobs.poll(lambda: bool(server._job._state.roster.members[0].streams))
        member.leave()
        assert pushing.exception(jobs.DEADLINE_S) is not None


def test_members_that_read_no_replies_keep_no_threads_once_their_job_is_over(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfps.pserver.server._UNREAD_S", 0.05)
    narrow = [option for option in CHANNEL_OPTIONS if option[0] != "grpc.http2.lookahead_bytes"]
    monkeypatch.setattr("tfps.wire.control.CHANNEL_OPTIONS", narrow)
    server = cluster.pserver(1)
    for _ in range(20):  # more than the pserver has threads
        member = cluster.raw(server.address, config=Config(slice_bytes=2**20, window_bytes=2**20)).open().declare()
        member.declare(pb.Bucket(names=["b"], kind="sum", nbytes=2**20, dtype="float32"), number=1)
        member.send(encode(Header(Kind.PUSH), bytes(2**20)))
        jobs.poll(lambda: server._job._state.queues[0].load.sent_slices == 1)  # stuck: more than the client lets come
        member.send(encode(Header(Kind.REPLY)))
        jobs.poll(lambda: server._job.over)
    worker = cluster.worker([server.address], config=settings(""))
    worker.declare([SUM])
    still_sums(worker)


def test_workers_that_died_before_their_streams_leave_nothing_to_the_next_job(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = cluster.pserver(1)
    dead = cluster.raw(server.address, config=Config(slice_bytes=64))
    trace = pb.TraceRequest(incarnation=dead.incarnation, number=1, on=True)
    dead.pserver.call("Trace", trace, jobs.DEADLINE_S)
    assert server._recorder.enabled
    monkeypatch.setattr("tfps.pserver.job.STREAM_GRACE_S", 0.0)
    worker = cluster.worker([server.address], config=settings(""))
    worker.declare([SUM])
    still_sums(worker)
    assert not server._recorder.enabled


# A job goes on meanwhile


FLOODS: dict[str, Callable[[ParameterServer, Security], object]] = {
    "calls": lambda server, _: ask(server.address, "Status", b"x" * 100_000),
    "leaves": lambda server, _: ask(server.address, "Leave", pb.LeaveRequest(rank=0).SerializeToString()),
    "garbage": lambda server, _: _say(server.port, b"\x16\x03\x01garbage" * 100),
    "connections": lambda server, _: _say(data(server).port, b""),
    "greetings": lambda server, _: _say(data(server).port, b"tfps\x02\x00" + b"\xff" * 300),
    "frames": lambda server, _: _say(data(server).port, bytes(10_000)),
    "measurements": lambda server, _: introduce(
        server.address, data(server).port, JobToken(SECRET), purpose("pull"), 0, jobs.DEADLINE_S
    ).close(),
    "measurements over gRPC": lambda server, known: _measure_over_grpc(Pserver(server.address, known)),
}


def _say(port: int, text: bytes) -> None:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), jobs.DEADLINE_S) as stranger:
        stranger.settimeout(0.2)
        stranger.sendall(text)
        stranger.recv(1000)


def _measure_over_grpc(pserver: Pserver) -> None:
    with contextlib.closing(pserver):
        measure_grpc(pserver, "pull", 0.05)


@pytest.mark.parametrize("what", FLOODS)
def test_a_flood_of_strangers_does_not_stop_a_job(what: str, cluster: Cluster, files: dict[str, str]) -> None:
    security = Security(token_file=files[SECRET])
    server = cluster.pserver(1, security=security)
    worker = cluster.worker([server.address], config=settings(files[SECRET]))
    worker.declare([SUM])
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            with contextlib.suppress(TfpsError, OSError):  # a job forbids measurements
                FLOODS[what](server, security)

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


@pytest.mark.parametrize("end", ["each call is given up", "the connection ends"])
def test_calls_that_strangers_give_up_are_forgotten_before_they_are_answered(
    end: str, cluster: Cluster, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfps.pserver.guard._REFUSAL_S", 10 * jobs.DEADLINE_S)
    server = cluster.pserver(1, security=Security(token_file=files[SECRET]))
    with grpc.insecure_channel(server.address, CHANNEL_OPTIONS) as channel:
        calls = [channel.unary_unary(method("Status")).future(b"") for _ in range(40)]
        jobs.poll(lambda: len(server._guard.waiting) == 32)  # what one connection may have at a time
        assert not any(call.done() for call in calls)
        if end == "each call is given up":
            for call in reversed(calls):  # first those that have not left yet
                call.cancel()
            jobs.poll(lambda: not server._guard.waiting)
    jobs.poll(lambda: not server._guard.waiting)


def idle(port: int) -> socket.socket:
    """A connection to the control port that begins HTTP/2 and then calls nothing."""
    stranger = socket.create_connection(("127.0.0.1", port), jobs.DEADLINE_S)
    stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
    return stranger


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux")
def test_a_job_goes_on_while_strangers_hold_all_file_descriptors(cluster: Cluster) -> None:
    with contextlib.ExitStack() as strangers, serving("--workers=1") as (address, process):
        worker = cluster.worker([address], config=Config(step_timeout_s=jobs.DEADLINE_S))
        worker.declare([SUM])
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (100, 100))
        port = int(address.rpartition(":")[2])
        for _ in range(100):
            strangers.enter_context(idle(port))
        jobs.poll(lambda: sum(1 for _ in Path(f"/proc/{process.pid}/fd").iterdir()) >= 99)
        assert worker._memory.pservers  # through shared memory, which is mapped already
        still_sums(worker)
        worker.close()


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


def test_a_call_after_the_end_of_its_connection_is_told_by_an_error_of_tfps(cluster: Cluster) -> None:
    """A worker that goes on with other pservers closes connections that other threads use."""
    pserver = Pserver(cluster.pserver(1).address)
    pserver.close()
    request = pb.StatusRequest(details=True)
    with pytest.raises(ClosedError, match=f"pserver {pserver.address}: Status came after the connection was closed"):
        pserver.call("Status", request, jobs.DEADLINE_S)
    with pytest.raises(ClosedError):
        pserver.call_while(lambda: True, "SaveRows", pb.SaveRowsRequest(), jobs.DEADLINE_S)
