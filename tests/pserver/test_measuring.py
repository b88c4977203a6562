"""A pserver that is asked to measure: what it tells, whom it refuses, and that a job comes first."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable

import grpc
import jobs
import pytest
from guarded import OTHER, SECRET, SUM, data, settings, still_sums
from jobs import Cluster
from measured import enough

from tfps import __version__
from tfps.config import Security
from tfps.errors import ConnectError, TfpsError, WaitTimeoutError
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.server import ParameterServer
from tfps.wire.connection import introduce
from tfps.wire.control import MEASURE, PROTOCOL_VERSION, Pserver, memory_message, method
from tfps.wire.job_token import JobToken
from tfps.wire.measuring import (
    CHUNK,
    DIRECTION_KEY,
    Direction,
    measure_connection,
    measure_grpc,
    pack_result,
    purpose,
)
from tfps.wire.send_queue import Throughput
from tfps.wire.shared_memory import Arena, Offer

Measure = Callable[[ParameterServer, Direction, float], Throughput]
SHORT_S = 0.1


def over_tcp(server: ParameterServer, direction: Direction, seconds: float = SHORT_S, token: str = "") -> Throughput:
    connected = asked(server, direction, token)
    return measure_connection(connected, direction, seconds, jobs.DEADLINE_S)


def over_grpc(server: ParameterServer, direction: Direction, seconds: float = SHORT_S) -> Throughput:
    pserver = Pserver(server.address)
    try:
        return measure_grpc(pserver, direction, seconds)
    finally:
        pserver.close()


def rate(server: ParameterServer, direction: Direction, measure: Measure) -> float:
    """Once it is this client's turn, and enough arrives to say."""

    def attempt(seconds: float) -> float:
        jobs.poll(lambda: free(server))
        return measure(server, direction, seconds).bytes_per_s

    return enough(attempt)


def asked(server: ParameterServer, direction: Direction, token: str = "") -> socket.socket:
    """A data connection that the pserver has accepted for measuring."""
    port = data(server).port
    return introduce(server.address, port, JobToken(token), purpose(direction), 0, jobs.DEADLINE_S)


def free(server: ParameterServer) -> bool:
    return not server._measuring._turn.locked()


both_paths = pytest.mark.parametrize("measure", [over_tcp, over_grpc])
both_directions = pytest.mark.parametrize("direction", ["push", "pull"])


@both_paths
@both_directions
def test_both_directions_are_measured_over_both_paths(measure: Measure, direction: Direction, cluster: Cluster) -> None:
    server = cluster.pserver(1)
    assert rate(server, direction, measure) > 1e5
    jobs.poll(lambda: free(server))
    assert server.status().state == "idle"
    assert server.status().jobs == 0


@both_paths
def test_while_there_is_a_job_nothing_is_measured_and_afterwards_it_is(measure: Measure, cluster: Cluster) -> None:
    server = cluster.pserver(1)
    worker = cluster.worker([server.address], config=settings(""))
    worker.declare([SUM])
    with pytest.raises(WaitTimeoutError, match="the pserver has a job, which a measurement would slow"):
        measure(server, "push", SHORT_S)
    still_sums(worker)
    worker.close()
    assert rate(server, "pull", measure) > 0


@both_directions
def test_a_job_that_begins_ends_the_measurement(
    direction: Direction, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfps.wire.measuring._SERVED_S", 10 * jobs.DEADLINE_S)  # time is not what ends it
    server = cluster.pserver(1)
    with asked(server, direction) as connected:  # which neither sends nor reads
        assert not free(server)
        cluster.raw(server.address)
        jobs.poll(lambda: free(server))
        connected.settimeout(jobs.DEADLINE_S)
        if direction == "push":
            assert connected.recv(1000) == pack_result(Throughput(0, 0.0))


@both_directions
def test_a_client_that_does_nothing_loses_its_turn(
    direction: Direction, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfps.wire.measuring._SERVED_S", 2.0)
    server = cluster.pserver(1)
    with asked(server, direction):
        assert not free(server)
        jobs.poll(lambda: free(server))


def test_a_silent_call_of_grpc_ends_at_its_deadline(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    pserver, over = Pserver(server.address), threading.Event()
    cluster.callback(pserver.close)

    def silence() -> object:
        over.wait(jobs.DEADLINE_S)
        yield CHUNK

    call = pserver.channel.stream_stream(method(MEASURE))(silence(), metadata=((DIRECTION_KEY, "push"),), timeout=0.5)
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    over.set()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    jobs.poll(lambda: free(server))


def test_strangers_do_not_push_out_who_measures(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfps.wire.measuring._SERVED_S", 10 * jobs.DEADLINE_S)
    server = cluster.pserver(1)
    with asked(server, "push") as connected, contextlib.ExitStack() as stack:
        address = "127.0.0.1", data(server).port
        strangers = [stack.enter_context(socket.create_connection(address, jobs.DEADLINE_S)) for _ in range(70)]
        assert strangers[0].recv(1) == b""  # the oldest make room
        connected.shutdown(socket.SHUT_WR)
        assert connected.recv(1000) == pack_result(Throughput(0, 0.0))


@both_paths
def test_one_client_measures_at_a_time(measure: Measure, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfps.wire.measuring._SERVED_S", 10 * jobs.DEADLINE_S)
    server = cluster.pserver(1)
    with asked(server, "push"), pytest.raises(WaitTimeoutError, match="another client measures at the moment"):
        measure(server, "pull", SHORT_S)


def test_measurements_come_at_a_bounded_rate(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    refused: TfpsError | None = None
    for _ in range(200):
        try:
            over_tcp(server, "push", seconds=0.0)
        except WaitTimeoutError as error:
            refused = error
            if "too many" in str(error):
                break
        jobs.poll(lambda: free(server))
    assert "too many measurements have been made here; the next may in " in str(refused)


@pytest.mark.parametrize("token", ["", OTHER])
def test_without_the_token_nothing_is_measured(token: str, cluster: Cluster, files: dict[str, str]) -> None:
    server = cluster.pserver(1, security=Security(token_file=files[SECRET]))
    with pytest.raises(ConnectError, match="job token"):
        over_tcp(server, "push", token=token)
    assert free(server)
    assert rate(server, "push", functools.partial(over_tcp, token=SECRET)) > 0


@pytest.mark.parametrize(
    ("metadata", "timeout_s", "says"),
    [
        ((), jobs.DEADLINE_S, "metadata tfps-direction must be push or pull, got 'None'"),
        (((DIRECTION_KEY, "x" * 100),), jobs.DEADLINE_S, "got 'xxxxxxxxxxxxxxxxxxxx'"),
        (((DIRECTION_KEY, "push"),), 100.0, "must have a deadline of at most 5 s"),
        (((DIRECTION_KEY, "push"),), None, "must have a deadline of at most 5 s"),
    ],
)
def test_malformed_calls_are_refused(
    metadata: tuple[tuple[str, str], ...], timeout_s: float | None, says: str, cluster: Cluster
) -> None:
    server = cluster.pserver(1)
    pserver = Pserver(server.address)
    cluster.callback(pserver.close)
    call = pserver.channel.stream_stream(method(MEASURE))(iter([b"x"]), metadata=metadata, timeout=timeout_s)
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert says in caught.value.details()


def test_a_pserver_that_stops_does_not_wait_for_a_measurement(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfps.wire.measuring._SERVED_S", 10 * jobs.DEADLINE_S)
    server = cluster.pserver(1)
    with asked(server, "pull"):
        server.stop()
        jobs.poll(lambda: free(server))


def test_a_probe_tells_what_a_worker_would_get_and_joins_nothing(cluster: Cluster) -> None:
    server = cluster.pserver(3, job="digits")
    pserver, arena = Pserver(server.address), Arena()
    cluster.callback(pserver.close)
    cluster.callback(arena.close)
    offer = arena.offer
    request = pb.ProbeRequest(pid=offer.pid, memory=memory_message(offer))
    reply = pserver.call("Probe", request, jobs.DEADLINE_S)
    assert (reply.protocol_version, reply.version) == (PROTOCOL_VERSION, __version__)
    assert (reply.workers, reply.job, reply.data_port) == (3, "digits", data(server).port)
    assert reply.same_host and reply.shared_memory
    wrong = Offer(offer.host, offer.pid, offer.fd, bytes(16))
    reply = pserver.call("Probe", pb.ProbeRequest(pid=offer.pid, memory=memory_message(wrong)), jobs.DEADLINE_S)
    assert reply.same_host and not reply.shared_memory
    reply = pserver.call("Probe", pb.ProbeRequest(), jobs.DEADLINE_S)
    assert not reply.same_host and not reply.shared_memory
    assert (server.status().jobs, list(server.status().members)) == (0, [])


def test_probes_come_at_a_bounded_rate(cluster: Cluster) -> None:
    pserver = Pserver(cluster.pserver(1).address)
    cluster.callback(pserver.close)

    def many() -> None:
        for _ in range(5000):
            pserver.call("Probe", pb.ProbeRequest(), jobs.DEADLINE_S)

    with pytest.raises(ConnectError, match="too many clients probe this pserver at once"):
        jobs.together(*[many] * 4)


def test_the_clock_tells_the_time_of_the_wall_too(cluster: Cluster) -> None:
    pserver = Pserver(cluster.pserver(1).address)
    cluster.callback(pserver.close)
    before_ns = time.time_ns()
    reply = pserver.call("Clock", pb.ClockRequest(), jobs.DEADLINE_S)
    assert before_ns <= reply.wall_ns <= time.time_ns()
