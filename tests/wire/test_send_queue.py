"""The send queue: order, window, receipts, ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random

import jobs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import sends

from tfps.config import Policy
from tfps.errors import ClosedError, ProtocolError, WorkerLostError
from tfps.exchange.codecs import known
from tfps.trace.recorder import Recorder
from tfps.wire.frames import Header, Kind
from tfps.wire.send_queue import Encoding, Next, Outgoing, SendQueue
from tfps.wire.shared_memory import Place, Target

INT8 = known("int8")


def queue(window: int = 100, policy: Policy = "priority", piggyback: bool = True) -> SendQueue:
    return SendQueue(window, policy, piggyback=piggyback, recorder=Recorder())


def item(priority: int, nbytes: int = 10, bucket: int = 0) -> Outgoing:
    return Outgoing(Header(Kind.PUSH, bucket=bucket, priority=priority), nbytes, memoryview(bytes(nbytes)))


def taken(queue: SendQueue) -> Outgoing:
    got = queue.take()
    assert got is not None
    assert isinstance(got.item, Outgoing)
    return got.item


def waits(queue: SendQueue, release: Callable[[], None]) -> Next | Exception | None:
    """What `take` returns; it must not return before `release` was called."""
    results: list[Next | Exception | None] = []
    done = threading.Event()

    def take() -> None:
        try:
            results.append(queue.take())
        except Exception as error:
            results.append(error)
        done.set()

    thread = threading.Thread(target=take)
    thread.start()
    assert not done.wait(0.05)
    release()
    assert done.wait(jobs.DEADLINE_S)
    thread.join()
    return results[0]


@given(priorities=st.lists(st.integers(0, 5), max_size=30))
def test_the_most_urgent_leaves_first_and_equals_in_order_of_arrival(priorities: list[int]) -> None:
    sends = queue(window=10**6)
    sends.put(item(priority, bucket=number) for number, priority in enumerate(priorities))
    order = [taken(sends).header.bucket for _ in priorities]
    assert order == [number for _, number in sorted((priority, n) for n, priority in enumerate(priorities))]


def test_fifo_ignores_priorities() -> None:
    sends = queue(policy="fifo")
    sends.put([item(5), item(0), item(3)])
    assert [taken(sends).header.priority for _ in range(3)] == [5, 0, 3]


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=40), window=st.integers(1, 120), random=st.randoms())
def test_in_flight_bytes_never_exceed_window_plus_one_slice(sizes: list[int], window: int, random: Random) -> None:
    sends = queue(window)
    sends.put(item(0, size) for size in sizes)
    flying: list[int] = []
    received = 0
    left = len(sizes)
    while left:
        if sum(flying) < window and random.random() < 0.5:
            flying.append(taken(sends).nbytes)
            left -= 1
            assert sum(flying) < window + max(sizes)
        elif flying:
            received += flying.pop(0)
            sends.acked(received)


def test_a_full_window_waits_for_a_receipt() -> None:
    sends = queue(window=10)
    sends.put([item(0), item(1)])
    taken(sends)
    got = waits(sends, lambda: sends.acked(10))
    assert isinstance(got, Next)
    assert isinstance(got.item, Outgoing)
    assert got.item.header.priority == 1


def test_an_urgent_frame_overtakes_those_that_wait_for_the_window() -> None:
    sends = queue(window=10)
    sends.put([item(5), item(5), item(5)])
    taken(sends)
    sends.put([item(0)])
    sends.acked(10)
    assert taken(sends).header.priority == 0


def test_a_receipt_rides_on_a_data_frame_if_there_is_one() -> None:
    sends = queue(window=100)
    sends.received(60)
    sends.put([item(0)])
    got = sends.take()
    assert got is not None
    assert got.item is not None
    assert got.received == 60
    assert waits(sends, sends.close) is None  # and no other one is due


def test_a_receipt_of_its_own_is_due_after_half_a_window() -> None:
    sends = queue(window=100)
    sends.received(49)
    assert waits(sends, lambda: sends.received(1)) == Next(None, 50)


def test_replies_carry_no_receipts() -> None:
    sends = queue(window=100, piggyback=False)
    sends.received(60)
    sends.put([item(0)])
    assert sends.take() == Next(None, 60)
    assert taken(sends).nbytes == 10


def test_replies_in_shared_memory_carry_receipts() -> None:
    sends = queue(window=100, piggyback=False)
    sends.received(60)
    sends.put([item(0)._replace(target=Target(Place(0, 10), np.empty(10, np.uint8)))])
    shared = sends.take()
    assert shared is not None
    assert isinstance(shared.item, Outgoing)
    assert shared.received == 60
    sends.received(40)  # 40 since then: not due
    sends.put([item(0)])
    assert taken(sends).target is None


def test_a_receipt_is_due_while_the_window_is_full() -> None:
    sends = queue(window=10)
    sends.put([item(0), item(0)])
    taken(sends)
    sends.received(5)
    assert sends.take() == Next(None, 5)


def test_receipts_for_more_than_was_sent_are_refused() -> None:
    sends = queue()
    sends.put([item(0)])
    taken(sends)
    with pytest.raises(ProtocolError, match="at most the 10 sent, got 11"):
        sends.acked(11)


def test_receipts_that_shrink_are_refused() -> None:
    sends = queue()
    sends.put([item(0)])
    taken(sends)
    sends.acked(10)
    sends.acked(0)  # carries none
    with pytest.raises(ProtocolError, match="must not decrease from 10, got 9"):
        sends.acked(9)


def test_closing_ends_a_waiting_sender() -> None:
    sends = queue()
    assert waits(sends, sends.close) is None
    sends.put([item(0)])
    assert sends.take() is None


def test_failing_wakes_a_waiting_sender_with_the_first_error() -> None:
    sends = queue()

    def fail() -> None:
        sends.fail(ClosedError("first"))
        sends.fail(ClosedError("second"))

    error = waits(sends, fail)
    assert isinstance(error, ClosedError)
    assert str(error) == "first"


def test_the_load_says_what_is_in_flight_and_the_recorder_what_was_sent() -> None:
    recorder = Recorder()
    recorder.start()
    one = SendQueue(100, "priority", piggyback=True, recorder=recorder, pserver=2)
    one.put([item(3, bucket=7)])
    taken(one)
    assert one.load.in_flight_bytes == 10
    one.acked(10)
    assert one.load.in_flight_bytes == 0
    (sent,) = sends(recorder)
    assert (sent.bucket, sent.priority, sent.nbytes, sent.rank, sent.pserver) == (7, 3, 10, -1, 2)


def encoding(count: int = 1000) -> tuple[Encoding, np.ndarray]:
    held = np.zeros(count, np.float32)
    return Encoding(INT8, np.linspace(-1, 1, count, dtype=np.float32), held), held


def test_whoever_asks_gets_the_same_bytes_and_the_residual_counts_once() -> None:
    one, held = encoding()
    first, *others = jobs.together(*[one.data] * 4)
    once, expected = encoding()
    assert bytes(first) == bytes(once.data())
    assert held.tobytes() == expected.tobytes()
    assert np.abs(held).max() > 0
    assert all(other.obj is first.obj for other in others)


def test_nothing_is_encoded_before_it_is_sent() -> None:
    queue = SendQueue(2**20, "priority", piggyback=True, recorder=Recorder(), pserver=0)
    queue.use_connection()
    made = [encoding()[0] for _ in range(4)]
    items = [
        Outgoing(Header(Kind.PUSH, bucket=number, priority=9 - number), each.nbytes, encoding=each)
        for number, each in enumerate(made)
    ]
    queue.put(items)
    assert not any(each.made for each in made)
    queue.prepare()  # while the socket is full
    assert [each.made for each in made] == [False, False, False, True]  # the most urgent
    taken = queue.take_parts(100)
    assert taken is not None
    ((item, _, begin, end),) = taken
    assert isinstance(item, Outgoing)
    assert (item.encoding, begin, end) == (made[3], 0, 100)
    queue.prepare()
    queue.prepare()
    assert [each.made for each in made] == [False, False, True, True]  # one ahead


def test_a_run_of_parts_gives_way_and_its_rest_keeps_its_place() -> None:
    queue = SendQueue(2**20, "priority", piggyback=True, recorder=Recorder(), pserver=0)
    queue.use_connection()

    def put(bucket: int, priority: int) -> None:
        payload = memoryview(bytes(1000))
        queue.put([Outgoing(Header(Kind.PUSH, bucket=bucket, priority=priority), len(payload), payload)])

    def taken() -> list[tuple[int, int, int]]:
        parts = queue.take_parts(10_000) or []
        return [(each.item.header.bucket, each.begin, each.end) for each in parts if isinstance(each.item, Outgoing)]

    put(0, 5)
    put(1, 5)
    run = queue.take_run(100, 200, 4)
    assert run is not None
    assert (run.parts.begin, run.parts.end, run.part_bytes, queue.load.in_flight_bytes) == (0, 400, 100, 400)
    put(2, 5)
    put(3, 6)
    assert not queue.overtaken[0]  # neither is more urgent
    put(4, 4)
    assert queue.overtaken[0]
    queue.ran(run, 200)
    assert queue.load.in_flight_bytes == 200
    assert taken() == [(4, 0, 1000), (0, 200, 1000), (1, 0, 1000), (2, 0, 1000), (3, 0, 1000)]


def test_a_run_of_all_parts_gives_way_and_its_rest_keeps_its_place() -> None:
    queue = SendQueue(2**20, "priority", piggyback=True, recorder=Recorder(), pserver=0)
    queue.use_connection()
    queue.put([item(5, 1000, bucket=bucket) for bucket in range(2)])
    run = queue.take_run(300, 300, 99)
    assert run is not None
    assert run.parts.end == 1000
    queue.put([item(4, 10, bucket=2)])
    assert queue.overtaken[0]
    queue.ran(run, 900)
    parts = queue.take_parts(10_000) or []
    assert [(each.begin, each.end) for each in parts] == [(0, 10), (900, 1000), (0, 1000)]


def test_a_queue_is_settled_when_nothing_more_urgent_is_expected() -> None:
    sends = queue(10_000)
    for step, settled in enumerate((False, True)):
        assert not sends.settled  # nothing is there
        urgent, large = (
            each._replace(header=each.header._replace(step=step)) for each in (item(0, bucket=1), item(1, bucket=0))
        )
        sends.put([large])
        assert not sends.settled
        sends.put([urgent])
        assert [taken(sends), sends.settled, taken(sends)] == [urgent, settled, large]
    fifo = queue(policy="fifo")
    fifo.put([item(5)])
    assert fifo.settled


@pytest.mark.parametrize("end", ["close", "fail", "put_urgent"])
def test_a_run_ends_with_its_queue_and_for_frames_outside_the_window(end: str) -> None:
    queue = SendQueue(2**20, "fifo", piggyback=True, recorder=Recorder(), pserver=0)
    queue.use_connection()
    queue.put([Outgoing(Header(Kind.PUSH), 1000, memoryview(bytes(1000)))])
    run = queue.take_run(100, 400, 2)
    assert run is not None
    assert (run.parts.end, run.part_bytes) == (800, 400)  # nothing is more urgent
    calls = {"close": (), "fail": (WorkerLostError("gone"),), "put_urgent": (b"frame",)}
    getattr(queue, end)(*calls[end])
    assert queue.overtaken[0]
    queue.ran(run, 300)
    assert queue.take_run(100, 400, 2) is None


@pytest.mark.parametrize(
    "item",
    [
        Outgoing(Header(Kind.PUSH), 100, memoryview(bytes(100))),
        Outgoing(
            Header(Kind.PUSH), 1000, memoryview(bytes(1000)), target=Target(Place(0, 1000), np.zeros(1000, np.uint8))
        ),
    ],
)
def test_what_has_no_several_parts_is_no_run(item: Outgoing) -> None:
    queue = SendQueue(2**20, "priority", piggyback=True, recorder=Recorder(), pserver=0)
    queue.use_connection()
    assert queue.take_run(100, 400, 2) is None
    queue.put([item])
    assert queue.take_run(100, 400, 2) is None


def test_an_error_is_reported_once_and_raised_to_everybody() -> None:
    reported: list[Exception] = []

    def failed(error: Exception) -> Exception:
        reported.append(error)
        return ValueError(f"it failed: {error}")

    broken = Encoding(INT8, np.zeros(8, np.float32), np.zeros(7, np.float32), failed)  # sizes that do not fit
    for _ in range(2):
        with pytest.raises(ValueError, match="it failed: "):
            broken.data()
    assert len(reported) == 1
