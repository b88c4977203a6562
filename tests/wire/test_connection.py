"""Data connections between real sockets: order, ends, and what strangers send."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import jobs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from receivers import Taking

from tfps.errors import ConnectError, ProtocolError, TfpsError, WorkerLostError
from tfps.threads import DaemonPool
from tfps.trace.recorder import Recorder
from tfps.types import Argument
from tfps.wire import frames
from tfps.wire.connection import (
    CHEAP_PART_BYTES,
    IN_C,
    LARGE_PARTS,
    MAX_PART_BYTES,
    MIN_PART_BYTES,
    PART_S,
    SLOW_PART_S,
    UNSENT_S,
    BrokenConnectionError,
    Connection,
    RateEstimator,
    dial,
    greet,
    refuse,
)
from tfps.wire.frames import PART_BYTES, Header, Kind, decode_part, encode_part
from tfps.wire.job_token import JobToken
from tfps.wire.send_queue import Outgoing, SendQueue

END = Header(Kind.ERROR)


@pytest.fixture(params=["C", "Python"])
def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection whose loops over parts are in C or in Python."""
    if request.param == "Python":
        monkeypatch.setattr("tfps.wire.connection._native", None)
    elif not IN_C:
        pytest.skip("needs tfps.wire._native: tfps was installed without a C compiler")
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
        with here, there:
            yield here, there


def queue() -> SendQueue:
    sends = SendQueue(2**20, "priority", piggyback=True, recorder=Recorder())
    sends.use_connection()
    return sends


def item(priority: int, nbytes: int, bucket: int = 0) -> Outgoing:
    payload = np.full(nbytes, bucket, np.uint8)
    return Outgoing(Header(Kind.PUSH, bucket=bucket, priority=priority), nbytes, payload.data)


@contextlib.contextmanager
def sending(connection: Connection, sends: SendQueue) -> Iterator[None]:
    """Sends meanwhile, and closes the queue at the end."""

    def send() -> None:
        with contextlib.suppress(OSError):
            connection.send(sends)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        sends.close()
        connection.shut_down()
        thread.join(jobs.DEADLINE_S)
        assert not thread.is_alive()


def receiving(connection: Connection, taking: Taking, kind: Kind = Kind.PUSH) -> Future[TfpsError | None]:
    """Receives on a thread of its own."""
    return DaemonPool(1, "receiving").submit(connection.receive, kind, queue(), taking)


def the_end(ended: Future[TfpsError | None]) -> BaseException | None:
    """What receiving raised or returned."""
    return ended.exception(jobs.DEADLINE_S) or ended.result()


def stuck(sends: SendQueue) -> None:
    """Returns when the sender has begun and takes nothing any more, as the socket is full."""
    before, deadline_s = -1, time.monotonic() + jobs.DEADLINE_S
    while (now := sends.load.in_flight_bytes) != before or not now:
        assert time.monotonic() < deadline_s
        before = now
        threading.Event().wait(0.05)


@pytest.mark.parametrize("nbytes", [0, 1, 100_000, 5_000_001])
def test_slices_of_any_size_arrive_as_they_were(nbytes: int, pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = map(Connection, pair)
    sends, taking = queue(), Taking(3)
    ended = receiving(there, taking)
    with sending(here, sends):
        sends.put([item(5, nbytes, bucket=n) for n in range(3)])
        assert taking.all.wait(jobs.DEADLINE_S)
    assert the_end(ended) is None
    expected = [(Header(Kind.PUSH, bucket=n, priority=5), bytes([n]) * nbytes) for n in range(3)]
    assert [(header._replace(received=0), payload) for header, payload in taking.got] == expected


@pytest.mark.parametrize("sizes", [[0, 10, 0, 70_000, 1], [1] * 200, [300_000, 0, 300_000, 5]])
def test_slices_that_are_sent_together_arrive_one_by_one(
    sizes: list[int], pair: tuple[socket.socket, socket.socket]
) -> None:
    here, there = map(Connection, pair)
    sends, taking = queue(), Taking(len(sizes))
    sends.put([item(n, nbytes, bucket=n) for n, nbytes in enumerate(sizes)])
    ended = receiving(there, taking)
    with sending(here, sends):
        assert taking.all.wait(jobs.DEADLINE_S)
    assert the_end(ended) is None
    assert [(header.bucket, payload) for header, payload in taking.got] == [
        (n, bytes([n]) * nbytes) for n, nbytes in enumerate(sizes)
    ]


def test_what_is_sent_together_says_that_more_follows(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    sends = queue()
    sends.put([item(n, nbytes, bucket=n) for n, nbytes in enumerate((3, 0, 5))])
    with sending(Connection(here), sends):
        found = []
        for _ in range(3):
            part = decode_part(there.recv(PART_BYTES, socket.MSG_WAITALL))
            found.append((part.header.bucket, part.nbytes, part.more))
            if part.nbytes:
                there.recv(part.nbytes, socket.MSG_WAITALL)
    assert found == [(0, 3, True), (1, 0, True), (2, 5, False)]


def test_an_urgent_slice_overtakes_one_that_is_under_way(pair: tuple[socket.socket, socket.socket]) -> None:
    # Nobody receives, so that the large slice gets stuck: then the urgent one comes.
    here, there = map(Connection, pair)
    sends, taking = queue(), Taking(2)
    with sending(here, sends):
        sends.put([item(9, 40_000_000, bucket=9)])
        stuck(sends)
        sends.put([item(0, 10_000)])
        ended = receiving(there, taking)
        assert taking.all.wait(jobs.DEADLINE_S)
    assert [header.bucket for header, _ in taking.got] == [0, 9]
    assert set(taking.got[1][1]) == {9}
    assert the_end(ended) is None


def test_parts_are_larger_once_nothing_more_urgent_is_expected(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    sends = queue()

    def largest(bucket: int, step: int) -> int:
        """The largest part of a slice: 0 is urgent, 1 is not."""
        each = item(bucket, (10, 200_000)[bucket], bucket)
        sends.put([each._replace(header=each.header._replace(step=step))])
        parts = list[int]()
        while sum(parts) < each.nbytes:
            parts.append(decode_part(there.recv(PART_BYTES, socket.MSG_WAITALL)).nbytes)
            there.recv(parts[-1], socket.MSG_WAITALL)
        return max(parts)

    with sending(Connection(here), sends):
        assert largest(1, 0) == CHEAP_PART_BYTES  # who knows?
        assert largest(0, 0) == 10
        assert largest(1, 1) == CHEAP_PART_BYTES
        assert [largest(0, step) for step in (1, 2)] == [10, 10]
        assert largest(1, 2) == 200_000


def test_a_failed_queue_tells_the_other_end(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = map(Connection, pair)
    sends = queue()
    ended = receiving(there, Taking())
    with sending(here, sends):
        sends.fail(WorkerLostError("rank 1 died"))
        error = the_end(ended)
    assert isinstance(error, WorkerLostError)
    assert str(error) == "rank 1 died"


def test_a_frame_outside_the_window_arrives_whole(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = map(Connection, pair)
    sends, taking = queue(), Taking(1)
    ended = receiving(there, taking)
    with sending(here, sends):
        sends.put_urgent(frames.encode(Header(Kind.LAYOUT), b"layout"))
        sends.put([item(0, 1)])
        assert taking.all.wait(jobs.DEADLINE_S)
    assert taking.notices == [(Header(Kind.LAYOUT), b"layout")]
    assert the_end(ended) is None


@given(data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parts_of_any_size_and_order_become_the_frames_that_they_are(
    data: st.DataObject, pair: tuple[socket.socket, socket.socket]
) -> None:
    sizes = data.draw(st.lists(st.sampled_from((0, 1, 200, 600_000)), min_size=1, max_size=5))
    payloads = [bytes([number]) * nbytes for number, nbytes in enumerate(sizes)]
    begins, sent, here = dict.fromkeys(range(len(sizes)), 0), b"", pair[0]
    while begins:
        number = data.draw(st.sampled_from(sorted(begins)))
        begin = begins[number]
        end = min(begin + max(sizes[number] // data.draw(st.sampled_from((2, 4))), 1), sizes[number])
        last = end == sizes[number]
        more = (not last or len(begins) > 1) and data.draw(st.booleans())
        header = Header(Kind.PUSH, bucket=number, received=len(sent))
        sent += encode_part(header, sizes[number], begin, end - begin, more) + payloads[number][begin:end]
        begins[number] = end
        if last:
            del begins[number]
    taking = Taking(len(sizes))
    receiver, got = Connection(pair[1].dup()), queue()
    got._sent = len(sent)  # what the receipts in `sent` may say
    sending_ = DaemonPool(1, "sending").submit(here.sendall, sent + encode_part(END, 0, 0, 0))
    error = receiver.receive(Kind.PUSH, got, taking)
    sending_.result(jobs.DEADLINE_S)
    receiver.close()
    assert isinstance(error, TfpsError)  # the ERROR, which ends it
    assert sorted((header.bucket, payload) for header, payload in taking.got) == list(enumerate(payloads))


BAD_CALLS: dict[str, tuple[Argument, ...]] = {
    "a part beyond its frame": ("receive", bytearray(encode_part(END, 8, 4, 5)), bytearray(8)),
    "memory of another size": ("receive", bytearray(encode_part(END, 8, 4, 4)), bytearray(9)),
    "no header to receive": ("receive", bytearray(8), bytearray(8)),
    "bytes beyond the frame": ("send", encode_part(END, 8, 4, 4), bytes(5), 2, bytearray(1)),
    "parts of nothing": ("send", encode_part(END, 8, 0, 8), bytes(8), 0, bytearray(1)),
    "no header to send": ("send", bytes(8), bytes(8), 2, bytearray(1)),
    "no flag": ("send", encode_part(END, 8, 0, 8), bytes(8), 2, b""),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_c_code_touches_nothing_outside_of_what_it_was_given(what: str) -> None:
    name, *arguments = BAD_CALLS[what]
    with pytest.raises(ValueError, match="must lie within"):
        getattr(pytest.importorskip("tfps.wire._native"), name)(-1, *arguments)


def test_a_run_of_parts_in_c_ends_before_the_next_one_once_it_is_overtaken() -> None:
    native = pytest.importorskip("tfps.wire._native")
    here, there = socket.socketpair()
    payload, overtaken = bytes(40_000_000), bytearray(1)
    head = encode_part(END, len(payload), 0, len(payload))
    running = DaemonPool(1, "running").submit(native.send, here.fileno(), head, payload, 100_000, overtaken)
    there.recv(1)
    overtaken[0] = 1
    draining = DaemonPool(1, "draining").submit(drain, there)
    sent, _ = running.result(jobs.DEADLINE_S)
    assert sent < len(payload)
    assert sent % 100_000 == 0
    here.close()
    assert draining.result(jobs.DEADLINE_S) == sent // 100_000 * (100_000 + PART_BYTES) - 1
    there.close()


def drain(connected: socket.socket) -> int:
    """How many bytes come to the end."""
    count = 0
    while got := len(connected.recv(2**20)):
        count += got
    return count


CUTS = {
    "in a header": encode_part(Header(Kind.PUSH), 8, 0, 8)[:10],
    "before a payload": encode_part(Header(Kind.PUSH), 8, 0, 8),
    "in a payload": encode_part(Header(Kind.PUSH), 8, 0, 8) + b"abc",
    "in a large part": encode_part(Header(Kind.PUSH), 900_000, 0, 800_000) + bytes(700_000),
    "after a large part": encode_part(Header(Kind.PUSH), 900_000, 0, 800_000) + bytes(800_000),
    "before a header that was announced": encode_part(Header(Kind.ACK), 0, 0, 0, more=True),
    "in a header that was announced": encode_part(Header(Kind.PUSH), 8, 0, 4, more=True) + b"abcdefg",
}


@pytest.mark.parametrize("where", CUTS)
def test_a_connection_cut_within_a_frame_is_broken(where: str, pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    taking = Taking()
    ended = receiving(Connection(there), taking)
    here.sendall(CUTS[where])
    here.close()
    error = the_end(ended)
    assert isinstance(error, BrokenConnectionError)
    assert "ended within a frame, after" in str(error)
    assert not taking.got


@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.REPLY])
def test_data_of_the_wrong_direction_is_refused(kind: Kind, pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    other = Kind.REPLY if kind is Kind.PUSH else Kind.PUSH
    ended = receiving(Connection(there), Taking(), kind)
    here.sendall(encode_part(Header(other), 0, 0, 0))
    error = the_end(ended)
    assert isinstance(error, ProtocolError)
    assert f"must be {kind.name}, ACK or ERROR here, got {other.name}" in str(error)


def test_a_stranger_is_told_apart_from_a_worker(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    here.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ConnectError, match="not a tfps worker"):
        greet(there, JobToken(), jobs.DEADLINE_S)


@pytest.mark.parametrize("token", [JobToken(), JobToken("another-token-0123456789")])
def test_who_has_no_token_is_told_so_before_anything_else_is_read(
    token: JobToken, pair: tuple[socket.socket, socket.socket]
) -> None:
    here, there = pair
    sent = token.reveal()
    here.sendall(struct.pack("<4sHHHI", b"tfps", 4, len(sent), 200, 0) + sent)  # the 200 bytes never come
    with pytest.raises(ConnectError, match=r"the pserver (wants|has another) .*job token"):
        greet(there, JobToken("the-token-0123456789"), jobs.DEADLINE_S)


def test_who_is_refused_and_goes_on_talking_is_closed_by_one_deadline(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfps.wire.connection._LINGER_S", 0.3)
    monkeypatch.setattr("tfps.wire.connection._MAX_UNREAD", 2**30)  # it is not what ends this
    here, there = pair
    refusing = DaemonPool(1, "refusing").submit(refuse, there, ConnectError("no"))
    deadline_s = time.monotonic() + jobs.DEADLINE_S
    while not refusing.done():
        assert time.monotonic() < deadline_s
        with contextlib.suppress(OSError):
            here.sendall(b"x")  # the next one comes well within another such time
        with contextlib.suppress(concurrent.futures.TimeoutError):
            refusing.result(0.05)
    assert there.fileno() == -1


def test_who_is_refused_may_say_much_at_once_and_still_reads_why(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    here.sendall(bytes(60_000))
    refusing = DaemonPool(1, "refusing").submit(refuse, there, ConnectError("no"))
    part = decode_part(here.recv(PART_BYTES, socket.MSG_WAITALL))
    assert here.recv(part.total, socket.MSG_WAITALL) == b"no"
    here.close()
    refusing.result(jobs.DEADLINE_S)


def test_a_worker_says_what_it_has_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            connected, _ = server.accept()
            with connected:
                connected.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 4)
                connected.recv(1000)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(ConnectionRefusedError, match="is not a tfps pserver"):
            dial(f"127.0.0.1:{port}", port, JobToken(), "incarnation", 0, jobs.DEADLINE_S)
        thread.join(jobs.DEADLINE_S)


# Parts of half a millisecond of the link, or 64 KiB in up to 3 ms, against a socket with a given rate


def on_link(rate: float, seconds: float = 1.0) -> RateEstimator:
    """After so long of sending on a link of `rate` bytes per second that is always full."""
    estimator, now_s = RateEstimator(), 0.0
    while now_s < seconds:
        now_s += estimator.part_bytes / rate
        estimator.sent(estimator.part_bytes, waited=True, now_s=now_s)
    return estimator


@pytest.mark.parametrize("mbit", [1000, 2500, 5000])
def test_a_part_takes_about_half_a_millisecond(mbit: int) -> None:
    estimator = on_link(mbit * 1e6 / 8)
    assert PART_S / 2 <= estimator.part_bytes / (mbit * 1e6 / 8) <= 2 * PART_S
    assert estimator.unsent_bytes == estimator.part_bytes * UNSENT_S / PART_S


@pytest.mark.parametrize("mbit", [200, 300, 700])
def test_a_part_that_saves_cpu_is_larger(mbit: int) -> None:
    assert on_link(mbit * 1e6 / 8).part_bytes == CHEAP_PART_BYTES
    assert on_link(mbit * 1e6 / 8).large_part_bytes == LARGE_PARTS * CHEAP_PART_BYTES


@pytest.mark.parametrize("mbit", [50, 100, 150])
def test_no_part_holds_an_urgent_one_up_for_longer_than_four_milliseconds(mbit: int) -> None:
    assert SLOW_PART_S / 2 <= on_link(mbit * 1e6 / 8).part_bytes / (mbit * 1e6 / 8) <= 4e-3


def test_slow_and_fast_links_stay_within_bounds() -> None:
    assert on_link(1e5).part_bytes == on_link(1e5).large_part_bytes == MIN_PART_BYTES
    assert on_link(1e11, 0.1).part_bytes == on_link(1e11, 0.1).large_part_bytes == MAX_PART_BYTES


def test_a_socket_that_takes_all_at_once_gets_larger_parts() -> None:
    estimator = RateEstimator()
    for _ in range(200):
        estimator.sent(estimator.part_bytes, waited=False, now_s=0.0)
    assert estimator.part_bytes == MAX_PART_BYTES


def test_a_socket_that_takes_what_comes_now_and_then_shows_nothing() -> None:
    estimator = RateEstimator()
    before = estimator.part_bytes
    for _ in range(200):
        for _ in range(3):
            estimator.sent(estimator.part_bytes, waited=False, now_s=0.0)
        estimator.idle()
    assert estimator.part_bytes == before


def test_an_idle_link_says_nothing_of_its_rate() -> None:
    estimator = on_link(1.25e9)
    before = estimator.part_bytes
    for second in range(2, 20):  # one part per second
        estimator.idle()
        estimator.sent(100, waited=True, now_s=float(second))
    assert estimator.part_bytes == before
