"""The loops of a stream, without a network: frames in, frames out."""

from __future__ import annotations

import pytest
from receivers import Taking

from tfps.errors import ClosedError, ProtocolError, WorkerLostError
from tfps.trace.recorder import Recorder
from tfps.wire import frames
from tfps.wire.connection import outgoing, receive
from tfps.wire.frames import Header, Kind
from tfps.wire.send_queue import Outgoing, SendQueue


def queue(piggyback: bool = True) -> SendQueue:
    return SendQueue(100, "priority", piggyback=piggyback, recorder=Recorder())


def test_a_push_carries_the_receipt_of_its_moment() -> None:
    sends = queue()
    sends.received(30)
    sends.put([Outgoing(Header(Kind.PUSH, bucket=1), 2, memoryview(b"ab"))])
    messages = outgoing(sends)
    assert next(messages) == frames.encode(Header(Kind.PUSH, bucket=1, received=30), b"ab")
    sends.close()
    assert list(messages) == []


def test_an_encoded_frame_is_sent_as_the_very_object() -> None:
    sends = queue(piggyback=False)
    frame = frames.encode(Header(Kind.REPLY), b"x")
    sends.put([Outgoing(Header(Kind.REPLY), 1, frame=frame)])
    assert next(outgoing(sends)) is frame


def test_a_due_receipt_is_a_frame_of_its_own() -> None:
    sends = queue()
    sends.received(50)
    assert next(outgoing(sends)) == frames.encode(Header(Kind.ACK, received=50))


def test_receiving_counts_data_and_takes_receipts() -> None:
    sends = queue()
    sends.put([Outgoing(Header(Kind.PUSH), 80, memoryview(bytes(80)))])
    sending = outgoing(sends)
    next(sending)
    taking = Taking()
    data = frames.encode(Header(Kind.REPLY, received=10), bytes(60))
    ack = frames.encode(Header(Kind.ACK, received=80))
    assert receive([data, ack], Kind.REPLY, sends, taking) is None
    assert not taking.notices
    assert taking.got == [(Header(Kind.REPLY, received=10), bytes(60))]
    assert frames.decode(next(sending))[0] == Header(Kind.ACK, received=60)
    with pytest.raises(ProtocolError, match="must not decrease from 80, got 79"):
        sends.acked(79)


def test_an_error_frame_ends_receiving() -> None:
    messages = iter([frames.encode_error(WorkerLostError("rank 1 died")), b"never read"])
    error = receive(messages, Kind.REPLY, queue(), Taking())
    assert isinstance(error, WorkerLostError)
    assert str(error) == "rank 1 died"


@pytest.mark.parametrize("expected", [Kind.PUSH, Kind.REPLY])
def test_data_of_the_wrong_direction_is_refused(expected: Kind) -> None:
    other = Kind.REPLY if expected is Kind.PUSH else Kind.PUSH
    with pytest.raises(ProtocolError, match=f"must be {expected.name}, ACK or ERROR here, got {other.name}"):
        receive([frames.encode(Header(other))], expected, queue(), Taking())


def test_a_failed_queue_raises_in_the_sender() -> None:
    sends = queue()
    sends.fail(ClosedError("over"))
    with pytest.raises(ClosedError, match="over"):
        next(outgoing(sends))
