"""The data port of a pserver: who gets in, who does not, and what is left of either."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import struct
import threading

import jobs
import numpy as np
import pytest
from guarded import peak_bytes, serving
from jobs import Cluster

from tfps.config import Config
from tfps.errors import ClosedError, ConnectError, PserverLostError, WorkerLostError
from tfps.exchange.interface import BucketSpec
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.data_port import _LINGER_S, DataPort
from tfps.pserver.server import ParameterServer
from tfps.pserver.slices import SumSlice
from tfps.types import Argument, Array
from tfps.wire import frames
from tfps.wire.connection import dial, greet
from tfps.wire.frames import EMPTY, PART_BYTES, Header, Kind, decode_part
from tfps.wire.job_token import JobToken
from tfps.worker.worker import Worker

TCP = Config(
    slice_bytes=1024,
    shared_memory=False,
    transport="tcp",
    connect_timeout_s=jobs.DEADLINE_S,
    step_timeout_s=jobs.DEADLINE_S,
)
SUM = BucketSpec(("b",), "sum", 40_000, "float32", 0)


def data(server: ParameterServer) -> DataPort:
    assert server._data is not None
    return server._data


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("tfps-data")}


def test_nothing_is_left_of_a_job_that_has_ended(cluster: Cluster) -> None:
    before = threads()
    server = cluster.pserver(1)
    worker = cluster.worker([server.address], config=TCP)
    worker.declare([SUM])
    jobs.push(worker, 0, bytes(40_000)).wait()
    running = [thread for thread in threading.enumerate() if thread.name.startswith("tfps-data")]
    worker.close()
    for thread in running:
        thread.join(_LINGER_S / 2)  # neither waits for the other
    assert threads() <= before
    assert not data(server)._connections
    assert not data(server)._strangers


@pytest.mark.parametrize(("incarnation", "rank", "error"), [("wrong", 0, ClosedError), (None, 7, ConnectError)])
def test_who_is_no_member_is_refused_and_told_why(
    incarnation: str | None, rank: int, error: type[Exception], cluster: Cluster
) -> None:
    server = cluster.pserver(1)
    member = cluster.raw(server.address)
    with pytest.raises(error):
        dial(server.address, data(server).port, JobToken(), incarnation or member.incarnation, rank, jobs.DEADLINE_S)


def test_a_second_connection_of_a_rank_is_refused_and_the_first_goes_on(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    worker = cluster.worker([server.address], config=TCP)
    worker.declare([SUM])
    with pytest.raises(ConnectError, match="has a stream already"):
        dial(server.address, data(server).port, JobToken(), worker.client.membership.incarnation, 0, jobs.DEADLINE_S)
    assert jobs.push(worker, 0, bytes(40_000)).wait().error is None


def test_strangers_that_say_nothing_are_bounded_and_the_oldest_make_room(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfps.pserver.data_port._GREETING_S", 10 * jobs.DEADLINE_S)  # it is not what ends them
    server = cluster.pserver(1)
    worker = cluster.worker([server.address], config=TCP)
    worker.declare([SUM])
    strangers = [socket.create_connection(("127.0.0.1", data(server).port), jobs.DEADLINE_S) for _ in range(70)]
    assert [each.recv(1) for each in strangers[:6]] == [b""] * 6  # the oldest make room
    assert jobs.push(worker, 0, bytes(40_000)).wait().error is None
    for stranger in strangers:
        stranger.close()


def test_who_says_nothing_is_closed_after_a_while(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfps.pserver.data_port._GREETING_S", 0.1)
    server = cluster.pserver(1)
    with socket.create_connection(("127.0.0.1", data(server).port), jobs.DEADLINE_S) as stranger:
        assert stranger.recv(1) == b""
    jobs.poll(lambda: not len(data(server)._strangers))


def test_who_says_it_byte_by_byte_gets_no_more_time(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfps.pserver.data_port._GREETING_S", 0.3)
    server = cluster.pserver(1)
    greeting = struct.pack("<4sHHHI", b"tfps", 4, 0, 256, 0) + bytes(256)
    with socket.create_connection(("127.0.0.1", data(server).port), 0.05) as stranger:
        assert _trickled(stranger, greeting) < len(greeting)
    jobs.poll(lambda: not len(data(server)._strangers))


def _trickled(stranger: socket.socket, text: bytes) -> int:
    """Sends `text` byte by byte, each after a timeout of `stranger`, until it is closed: after how many that was."""
    for count in range(len(text)):
        try:
            stranger.sendall(text[count : count + 1])
            if not stranger.recv(1000):
                return count
        except TimeoutError:
            pass
        except OSError:
            return count
    return len(text)


def test_without_threads_for_it_a_connection_is_closed_and_the_next_is_served(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    server = cluster.pserver(1)
    before = threading.stack_size(2**46)  # no thread gets that
    try:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", data(server).port), jobs.DEADLINE_S) as refused:
                assert refused.recv(1) == b""
    finally:
        threading.stack_size(before)
    assert not len(data(server)._strangers)
    worker = cluster.worker([server.address], config=TCP)
    worker.declare([SUM])
    assert jobs.push(worker, 0, bytes(40_000)).wait().error is None
    (line,) = [record.getMessage() for record in caplog.records if "closed at once" in record.getMessage()]
    assert "can't start new thread" in line


def test_without_a_second_thread_for_its_connection_a_worker_is_told_why(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    member = cluster.raw(server.address)
    incarnation = member.incarnation.encode()
    with socket.create_connection(("127.0.0.1", data(server).port), jobs.DEADLINE_S) as connected:
        jobs.poll(lambda: "tfps-data" in threads())
        before = threading.stack_size(2**46)  # no thread gets that
        try:
            connected.sendall(struct.pack("<4sHHHI", b"tfps", 4, 0, len(incarnation), member.rank) + incarnation)
            assert decode_part(connected.recv(PART_BYTES)).header.kind == Kind.ACK
            part = decode_part(connected.recv(PART_BYTES))
            assert part.header.kind == Kind.ERROR
            assert b"can't start new thread" in connected.recv(part.total)
        finally:
            threading.stack_size(before)
    jobs.poll(lambda: not data(server)._connections)


def test_a_worker_that_did_not_wait_for_the_answer_to_its_greeting_may_use_grpc(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(connected: socket.socket, *others: Argument) -> tuple[str, int]:
        found = greet(connected, *others)
        connected.settimeout(jobs.DEADLINE_S)
        connected.recv(1, socket.MSG_PEEK)  # until the worker has given up
        return found

    monkeypatch.setattr("tfps.pserver.data_port.greet", late)
    server = cluster.pserver(1)
    member = cluster.raw(server.address)
    incarnation = member.incarnation.encode()
    with socket.create_connection(("127.0.0.1", data(server).port), jobs.DEADLINE_S) as connected:
        connected.sendall(struct.pack("<4sHHHI", b"tfps", 4, 0, len(incarnation), member.rank) + incarnation)
        connected.shutdown(socket.SHUT_WR)
        assert connected.recv(1) == b""
    jobs.poll(lambda: not len(data(server)._strangers))
    member.open().declare()


def test_an_error_of_the_system_is_not_taken_for_a_broken_connection(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_files(*_: Argument) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(SumSlice, "take", without_files)
    worker = cluster.worker(cluster.pservers(1, 1), config=TCP)
    worker.declare([SUM])
    error = str(jobs.push(worker, 0, bytes(40_000)).error())
    assert "failed while it took a push of rank 0" in error
    assert "Too many open files" in error


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="needs Linux")
def test_a_worker_that_never_reads_its_replies_is_lost_and_the_others_are_told(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfps.wire.connection._LINUX", (("TCP_USER_TIMEOUT", 500),))  # ms, instead of 30 s
    jobs.use("tcp", monkeypatch)
    server = cluster.pserver(2)
    config = dataclasses.replace(TCP, slice_bytes=2**20)
    silent = cluster.raw(server.address, 1, config=config).open()
    worker, _ = jobs.attempt(lambda: cluster.worker([server.address], 0, config=config), silent.declare)
    assert isinstance(worker, Worker)
    nbytes = 64 * 2**20  # more than both kernels hold
    bucket = pb.Bucket(names=["b"], kind="sum", nbytes=nbytes, dtype="float32")
    jobs.attempt(
        lambda: worker.declare([BucketSpec(("b",), "sum", nbytes, "float32", 0)]),
        lambda: silent.declare(bucket, number=1),
    )
    failed = jobs.Failed(worker)
    jobs.push(worker, 0, np.ones(nbytes // 4, np.float32))
    for index in range(nbytes // 2**20):
        silent.send(frames.encode(Header(Kind.PUSH, EMPTY, index=index), b""))
    assert isinstance(error := failed.wait(), WorkerLostError)
    assert "rank 1" in str(error)
    jobs.poll(lambda: not data(server)._connections)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="needs Linux")
def test_both_ends_notice_a_host_that_has_vanished_within_30_s(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    worker = cluster.worker([server.address], config=TCP)
    jobs.poll(lambda: len(data(server)._connections) == 1)
    (there,) = data(server)._connections
    path = worker._streams[0]._path
    for end in (path._connection._socket, there._socket):  # type: ignore[union-attr]
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle_s, interval_s, count = (
            end.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle_s + interval_s * count == 30
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


def test_a_worker_whose_peer_reads_nothing_for_a_while_waits_and_loses_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.use("tcp", monkeypatch)
    nbytes, slice_bytes = 64 * 2**20, 2**20
    config = dataclasses.replace(TCP, slice_bytes=slice_bytes)
    with serving("--workers=2", "--max-memory=1") as (address, process):
        slow = cluster.raw(address, 1, config=config).open()
        slow.data.settimeout(None)
        slow.data.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(jobs.DEADLINE_S), 0))
        worker, _ = jobs.attempt(lambda: cluster.worker([address], 0, config=config), slow.declare)
        assert isinstance(worker, Worker)
        bucket = pb.Bucket(names=["b"], kind="sum", nbytes=nbytes, dtype="float32")
        jobs.attempt(
            lambda: worker.declare([BucketSpec(("b",), "sum", nbytes, "float32", 0)]),
            lambda: slow.declare(bucket, number=1),
        )
        peaks = []
        for step in range(1, 5):
            own = jobs.push(worker, 0, np.full(nbytes // 4, step, np.float32))
            assert not own.replied  # it waits for the other one, however long that takes
            for index in range(nbytes // slice_bytes):
                header = Header(Kind.PUSH, index=index, step=step - 1)
                slow.send(frames.encode(header, np.full(slice_bytes // 4, 10, np.float32).tobytes()))
            assert (jobs.summed(own.wait()) == 10 + step).all()
            # The other one has read nothing: what it gets waits at the pserver.
            sent = worker._pservers[0].call("Status", pb.StatusRequest(details=True), jobs.DEADLINE_S).members[1]
            assert sent.sent_bytes < step * nbytes
            assert (_sums(slow.data, nbytes, slice_bytes) == 10 + step).all()
            peaks.append(peak_bytes(process))
        assert peaks[-1] - peaks[1] < nbytes  # no step leaves anything behind


def _sums(connected: socket.socket, nbytes: int, slice_bytes: int) -> Array:
    """Reads replies; parts of several slices may come in turns."""
    found, left = bytearray(nbytes), nbytes
    while left:
        part = decode_part(connected.recv(PART_BYTES, socket.MSG_WAITALL))
        payload = connected.recv(part.nbytes, socket.MSG_WAITALL) if part.nbytes else b""
        if part.header.kind == Kind.REPLY:
            begin = part.header.index * slice_bytes + part.offset
            found[begin : begin + part.nbytes] = payload
            left -= part.nbytes
    return np.frombuffer(found, np.float32)


def test_a_worker_whose_connection_breaks_within_a_frame_has_died(cluster: Cluster) -> None:
    server = cluster.pserver(2)
    worker, other = cluster.workers([server.address], 2, config=TCP)
    jobs.together(lambda: worker.declare([SUM]), lambda: other.declare([SUM]))
    jobs.poll(lambda: len(data(server)._connections) == 2)
    (connection,) = [each for each in data(server)._connections if _is_of(each, other)]
    connection.shut_down()
    error = jobs.push(worker, 0, bytes(40_000)).error()
    assert isinstance(error, WorkerLostError | PserverLostError)  # whichever end of the connection says it first
    assert str(error).startswith("rank 1 (")
    assert isinstance(jobs.Failed(other).wait(), WorkerLostError | PserverLostError)


def _is_of(connection: object, worker: object) -> bool:
    """Whether this end's other end is the worker's."""
    here = worker._streams[0]._path._connection._socket.getsockname()  # type: ignore[attr-defined]
    return bool(connection._socket.getpeername() == here)  # type: ignore[attr-defined]


def test_auto_takes_grpc_where_the_data_port_cannot_be_reached(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    server = cluster.pserver(1)
    data(server).close()
    config = Config(slice_bytes=1024, shared_memory=False, connect_timeout_s=jobs.DEADLINE_S)
    worker = cluster.worker([server.address], config=config)
    worker.declare([SUM])
    assert jobs.push(worker, 0, bytes(40_000)).wait().error is None
    (line,) = [record.getMessage() for record in caplog.records if "data port" in record.getMessage()]
    assert f"pserver {server.address}: its data port {data(server).port} cannot be reached" in line
    assert "slices go through gRPC" in line


def test_tcp_says_that_the_data_port_cannot_be_reached(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    data(server).close()
    with pytest.raises(ConnectError, match=r"data port \d+ cannot be reached: .*refused.*transport=\"auto\""):
        cluster.worker([server.address], config=TCP)
