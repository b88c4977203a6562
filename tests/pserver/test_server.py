"""The pserver against workers that speak the protocol wrongly: the one to blame is named, nobody hangs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

import grpc
import jobs
import numpy as np
import pytest
from jobs import Cluster, RawWorker, attempt, together

from tfps.config import Security
from tfps.errors import (
    ClosedError,
    ConnectError,
    ProtocolError,
    PserverLostError,
    TfpsError,
    WaitTimeoutError,
    WorkerLostError,
)
from tfps.exchange.interface import BucketSpec
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.declarations import Declarations
from tfps.pserver.server import ParameterServer
from tfps.pserver.slices import SumSlice
from tfps.wire import frames, send_queue
from tfps.wire.connection import write_shared
from tfps.wire.frames import EMPTY, LAST, MAX_FRAME_BYTES, SHARED, Header, Kind
from tfps.wire.send_queue import Outgoing, SendQueue
from tfps.wire.shared_memory import Arena
from tfps.worker.worker import Worker

SUM = pb.Bucket(names=["dense"], kind="sum", nbytes=2000, dtype="float32", priority=3)  # slices of 1024 and 976 bytes
GATHER = pb.Bucket(names=["words"], kind="gather", nbytes=0, dtype="uint8", priority=1)


OVER_GRPC = pytest.mark.parametrize("cluster", ["grpc"], indirect=True)
OVER_ALL = pytest.mark.parametrize("cluster", ["tcp", "grpc", "shared memory"], indirect=True)


@pytest.fixture(params=["tcp", "grpc"])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    jobs.use(request.param, monkeypatch)
    with Cluster() as cluster:
        yield cluster


class Member(RawWorker):
    """Offers its memory. Where the pserver takes it, slices of sums are there, and frames say where."""

    def __init__(self, address: str, rank: int) -> None:
        self._arena = Arena()
        offer = self._arena.offer
        memory = pb.SharedMemory(host=offer.host, fd=offer.fd, secret=offer.secret)
        super().__init__(address, rank, memory=memory)

    def send(self, message: bytes) -> None:
        if self.joined.shared_memory:
            header, payload = frames.decode(message)
            if header.kind == Kind.PUSH and not header.flags and header.bucket != 1:
                region = self._arena.allocate(len(payload))
                assert region is not None
                message = frames.encode(*write_shared(header, payload, region.target(0, len(payload))))
                self._region = region  # of the last push: its sum comes to the same place
        super().send(message)

    def read(self) -> tuple[Header, bytes]:
        header, payload = super().read()
        if not header.flags & SHARED:
            return header, payload
        assert frames.decode_place(header, memoryview(payload)) == self._region.place(0, len(self._region.array))
        return header._replace(flags=header.flags & ~SHARED), self._region.array.tobytes()


def pair(cluster: Cluster) -> list[Member]:
    """Two members with the two buckets declared."""
    address = cluster.pserver(2).address
    members = [Member(address, rank) for rank in range(2)]
    for member in members:
        cluster.callback(member.close)
        member.open()
    together(*(member.declare for member in members))
    together(*(functools.partial(member.declare, SUM, GATHER, number=1) for member in members))
    return members


def slice_push(index: int = 0, **fields: int) -> Header:
    return Header(Kind.PUSH, index=index, priority=3)._replace(**fields)


@OVER_ALL
def test_a_slice_comes_back_to_all_when_all_have_pushed(cluster: Cluster) -> None:
    members = pair(cluster)
    for member in members:
        member.send(frames.encode(slice_push(), np.ones(256, np.float32).tobytes()))
    for member in members:
        header, payload = member.read()
        assert header._replace(received=0) == Header(Kind.REPLY, priority=3, generation=1)
        assert np.frombuffer(payload, np.float32).tolist() == [2] * 256


@OVER_ALL
def test_half_a_window_is_acknowledged_by_a_frame_of_its_own(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue, "_RECEIPT_BYTES", jobs.CONFIG.first_window_bytes // 2)  # over a data connection
    first, _ = pair(cluster)
    first.send(frames.encode(slice_push(0), bytes(1024)))
    first.send(frames.encode(slice_push(1), bytes(976)))
    first.send(frames.encode(Header(Kind.PUSH, LAST, 1, 0, 1), bytes(500)))
    assert first.read() == (Header(Kind.ACK, received=2500), b"")


GOOD = slice_push()
MALFORMED = {
    "truncated header": (b"\x01\x00", "a frame must have 32 to"),
    "no bytes": (b"", "got 0"),
    "oversized frame": (bytes(MAX_FRAME_BYTES + 1), f"got {MAX_FRAME_BYTES + 1}"),
    "a reply from a worker": (frames.encode(GOOD._replace(kind=Kind.REPLY), bytes(1024)), "must be PUSH, ACK or ERROR"),
    "truncated payload": (frames.encode(GOOD, bytes(1023)), "slice 0 of bucket 'dense' must have 1024 bytes"),
    "oversized payload": (frames.encode(GOOD, bytes(1025)), "got 1025 bytes"),
    "payload of an empty push": (frames.encode(GOOD._replace(flags=EMPTY), bytes(4)), "must have 0 bytes"),
    "last slice of a sum": (frames.encode(GOOD._replace(flags=LAST), bytes(1024)), "no LAST or UNCODED flag"),
    "undeclared bucket": (frames.encode(GOOD._replace(bucket=2), bytes(1024)), "one of the 2 declared ones, got 2"),
    "unknown slice": (frames.encode(GOOD._replace(index=2), bytes(1024)), "bucket 'dense' has no slice 2"),
    "wrong step": (frames.encode(GOOD._replace(step=1), bytes(1024)), "step of slice 0 .* must be 0, got 1"),
    "wrong priority": (frames.encode(GOOD._replace(priority=0), bytes(1024)), "priority of bucket 'dense' must be 3"),
    "receipt for nothing": (frames.encode(Header(Kind.ACK, received=1)), "at most the 0 sent, got 1"),
    "piece out of order": (frames.encode(Header(Kind.PUSH, LAST, 1, 1, 1), b""), "index of bucket 'words' must be 0"),
    "short piece": (frames.encode(Header(Kind.PUSH, 0, 1, 0, 1), b"x"), "must have 1024 bytes, got 1"),
    "long piece": (frames.encode(Header(Kind.PUSH, LAST, 1, 0, 1), bytes(1025)), "at most 1024 bytes, got 1025"),
}


MESSAGES = ["truncated header", "no bytes", "oversized frame"]  # which a connection has none of; see test_frames.py
OVER = {
    "tcp": [what for what in MALFORMED if what not in MESSAGES],
    "grpc": [*MALFORMED],
    # Of slices; wrong places are in tests/wire/test_shared_memory.py.
    "shared memory": ["truncated payload", "oversized payload", "unknown slice", "wrong step"],
}


@pytest.mark.parametrize(
    ("cluster", "what"),
    [(path, what) for path, found in OVER.items() for what in found],
    indirect=["cluster"],
)
def test_a_malformed_frame_fails_the_job_and_names_the_rank(cluster: Cluster, what: str) -> None:
    message, rule = MALFORMED[what]
    members = pair(cluster)
    members[1].send(message)
    for member in members:
        error = member.read_error(ProtocolError)
        assert str(error).startswith("rank 1: ")
        with pytest.raises(ProtocolError, match=rule):
            raise error


@OVER_ALL
def test_a_slice_that_comes_twice_fails_the_job(cluster: Cluster) -> None:
    members = pair(cluster)
    for _ in range(2):
        members[0].send(frames.encode(GOOD, bytes(1024)))
    assert "rank 0: slice 0 of bucket 'dense' must be pushed once in step 0" in str(members[1].read_error())


@OVER_ALL
def test_a_bug_while_a_push_is_taken_is_reported_as_what_it_is(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SumSlice, "take", lambda *_: bytearray(2**62))
    members = pair(cluster)
    members[1].send(frames.encode(GOOD, bytes(1024)))
    for member in members:
        assert re.fullmatch(
            r"pserver .*: failed while it took a push of rank 1: MemoryError\(\); .*", str(member.read_error())
        )
    (record,) = [record for record in caplog.records if record.name == "tfps"]
    assert record.getMessage() == "tfps: failed while it took a push of rank 1"
    assert record.exc_info is not None and record.exc_info[0] is MemoryError


@OVER_ALL
def test_a_bug_while_a_reply_is_sent_is_reported_as_what_it_is(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    members = pair(cluster)
    for name in ("take", "take_parts"):
        monkeypatch.setattr(SendQueue, name, lambda *_: bytearray(2**62))
    for member in members:
        member.send(frames.encode(GOOD, bytes(1024)))
    for member in members:
        error = member.read_error()
        assert re.fullmatch(r"pserver .*: failed while it sent to rank [01]: MemoryError\(\); .*", str(error))
    assert "tfps: failed while it sent to rank" in caplog.text


def test_a_bug_in_a_call_is_reported_as_what_it_is(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Declarations, "declare", lambda *_: bytearray(2**62))
    member = cluster.raw(cluster.pserver(1).address).open()
    with pytest.raises(TfpsError, match=r"^pserver .*: failed in Declare: MemoryError\(\); "):
        member.declare()
    assert "tfps: failed in Declare" in caplog.text


@OVER_GRPC
@pytest.mark.parametrize("stream", ["pushing", "pulling"])
def test_a_stream_that_breaks_fails_the_job_and_ends_the_other(cluster: Cluster, stream: str) -> None:
    members = pair(cluster)
    members[1].send(frames.encode(GOOD, bytes(1024)))
    getattr(members[1], stream).cancel()
    error = members[0].read_error(WorkerLostError, "rank 1 (rawhost:")
    assert "died at step 0" in str(error)
    for member in members:  # nobody has to wait for the worker to end them
        assert member.pushing.code() is grpc.StatusCode.CANCELLED
    with pytest.raises(StopIteration if stream == "pushing" else grpc.RpcError):
        while True:
            next(members[1].pulling)


@pytest.mark.parametrize("last", [0, 1])
def test_a_worker_with_one_stream_is_waited_for_by_name(cluster: Cluster, last: int) -> None:
    server = cluster.pserver(2)
    members = [cluster.raw(server.address, 0).open(), cluster.raw(server.address, 1).open_pull()]
    jobs.poll(lambda: server.status().members[0].state == "streaming")

    def declare_last() -> None:
        jobs.poll(lambda: bool(server._job.declarations.all))  # else the other would be missing, too
        try:
            members[last].declare(timeout_s=0.3)
        finally:
            members[1 - last].leave()  # ends its wait

    error, _ = attempt(declare_last, members[1 - last].declare)
    assert isinstance(error, WaitTimeoutError)
    assert re.search(
        r"not joined: rank 1 \(rawhost:\d+\) \(is it started\? see its log; --workers is 2 here\)$", str(error)
    )


@pytest.mark.parametrize(
    ("incarnation", "rank", "rule"),
    [
        ("wrong", "0", "does not know this job"),
        ("", "0", "does not know this job"),
        (None, "7", "rank 7 has not joined"),
        (None, "0", "has a stream already"),
        (None, "x", "must be a number, got 'x'"),
    ],
)
def test_a_stream_of_a_stranger_is_refused_alone(
    cluster: Cluster, incarnation: str | None, rank: str, rule: str
) -> None:
    member = cluster.raw(cluster.pserver(1).address).open().declare()
    for error in member.second_streams(incarnation, rank):
        with pytest.raises((ConnectError, ClosedError), match=rule):
            raise error
    member.declare(number=1)  # the job goes on


def test_other_protocol_versions_refuse_each_other_by_name(cluster: Cluster) -> None:
    address = cluster.pserver(1).address
    with pytest.raises(
        ConnectError, match=f"pserver {address}: the pserver speaks protocol version 11, the worker versi"
    ):
        cluster.raw(address, protocol_version=1)


def test_the_incarnation_of_an_ended_job_is_worth_nothing(cluster: Cluster) -> None:
    address = cluster.pserver(1).address
    old = cluster.raw(address).open().declare()
    old.leave()
    new = cluster.raw(address).open().declare()
    assert new.incarnation != old.incarnation
    with pytest.raises(ClosedError, match="does not know this job, or not any more"):
        old.declare(number=1)


@pytest.mark.parametrize(
    ("number", "rule"), [(2, "number of a declaration must be at most 1, got 2"), (0, "must come once from rank 0")]
)
def test_declarations_out_of_order_are_refused(cluster: Cluster, number: int, rule: str) -> None:
    member = cluster.raw(cluster.pserver(1).address).open().declare()
    with pytest.raises(ProtocolError, match=rule):
        member.declare(number=number)


def reply(**fields: int) -> Callable[[], bytes]:
    return lambda: frames.encode(Header(Kind.REPLY, generation=1)._replace(**fields))


MALFORMED_REPLIES: dict[str, tuple[Callable[[], bytes], str]] = {
    "garbage": (lambda: b"garbage", "a frame must have 32 to"),
    "a push": (lambda: frames.encode(Header(Kind.PUSH)), "must be REPLY, ACK or ERROR here, got PUSH"),
    "undeclared bucket": (reply(bucket=9), "declared ones, got 9"),
    "unknown slice": (
        reply(index=9),
        "has no slice 9 on this pserver",
    ),
    "wrong step": (
        reply(step=4),
        "step of bucket 'b' must be 0, got 4",
    ),
    "another view": (
        reply(generation=2),
        "generation of a reply must be one that was told .*, got 2",
    ),
    "a set of nobody": (lambda: frames.encode(Header(Kind.RANKS, generation=2)), "4 bytes for each rank, got 0 bytes"),
    "wrong size": (lambda: frames.encode(Header(Kind.REPLY, generation=1), b"1234"), "must have 8 bytes, got 4"),
    "receipt for nothing": (lambda: frames.encode(Header(Kind.ACK, received=99)), "at most the [08] sent, got 99"),
}


@OVER_GRPC  # for TCP see tests/wire/test_frames.py and test_connection.py
@pytest.mark.parametrize("what", MALFORMED_REPLIES)
def test_a_malformed_reply_fails_the_worker_and_names_the_pserver(cluster: Cluster, what: str) -> None:
    make, rule = MALFORMED_REPLIES[what]
    server = cluster.pserver(2)
    other = cluster.raw(server.address, 1).open()
    spec = BucketSpec(("b",), "sum", 8, "float32", 0)
    bucket = pb.Bucket(names=["b"], kind="sum", nbytes=8, dtype="float32")

    worker = together(lambda: cluster.worker([server.address], 0), other.declare)[0]
    assert isinstance(worker, Worker)
    together(lambda: worker.declare([spec]), lambda: other.declare(bucket, number=1))
    waiting = jobs.push(worker, 0, bytes(8))
    queue = server._job._state.queues[0]
    queue.put([Outgoing(Header(Kind.REPLY), 0, frame=make())])
    with pytest.raises(ProtocolError, match=rf"^pserver {server.address}: .*{rule}"):
        raise waiting.error()


def test_the_address_of_a_pserver_on_all_interfaces_can_be_connected_to(cluster: Cluster) -> None:
    server = ParameterServer("0.0.0.0", 0, workers=1, security=Security(insecure=True))
    cluster.callback(server.stop, 0.2)
    assert not server.address.startswith("0.0.0.0")
    cluster.worker([server.address])


def test_stopping_ends_a_waiting_join(cluster: Cluster) -> None:
    server = cluster.pserver(2)
    member = cluster.raw(server.address).open()
    error, _ = attempt(member.declare, server.stop)
    assert isinstance(error, PserverLostError)  # "was stopped", or that the call broke, if it came too late


ENDS_WITHOUT_STOP = """
import sys
from tfps.exchange.interface import BucketSpec
from tfps.pserver.server import ParameterServer
from tfps.worker.worker import Worker

server = ParameterServer("127.0.0.1", 0, workers=1)
worker = Worker([server.address])
(bucket,) = worker.declare([BucketSpec(("b",), "sum", 8, "float32", 0)])
worker.push(bucket, bytes(8), lambda reply: None)
if sys.argv[1] == "raise":
    raise RuntimeError("the script failed")
"""


@pytest.mark.parametrize(("end", "code"), [("raise", 1), ("return", 0)])
def test_a_process_that_has_not_stopped_its_pserver_ends_all_the_same(end: str, code: int) -> None:
    with jobs.python("-c", ENDS_WITHOUT_STOP, end) as process:
        _, log = process.communicate(timeout=jobs.DEADLINE_S)
    assert process.returncode == code
    assert ("RuntimeError: the script failed" in log) == (end == "raise")


def test_workers_of_a_process_that_ended_without_a_stop_are_told(cluster: Cluster) -> None:
    program = ENDS_WITHOUT_STOP.replace(
        "worker = Worker([server.address])", "print(server.address, flush=True); input()"
    )
    program = program[: program.index("(bucket,)")] + program[program.index("if sys") :]
    with jobs.python("-c", program, "raise") as process:
        assert process.stdout is not None
        worker = cluster.worker([process.stdout.readline().strip()])
        failed = jobs.Failed(worker)
        process.communicate("\n", timeout=jobs.DEADLINE_S)
        assert isinstance(failed.wait(), PserverLostError)
    assert process.returncode == 1
