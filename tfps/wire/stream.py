"""What both ends of the streams between a worker and a pserver do with frames, on either data path.

Tested in tests/wire/test_stream.py and tests/wire/test_connection.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from tfps.errors import ProtocolError, TfpsError
from tfps.wire import frames
from tfps.wire.frames import EMPTY, Header, Kind
from tfps.wire.send_queue import SendQueue
from tfps.wire.shared_memory import Place, Target


class Receiver(Protocol):
    """Takes incoming frames."""

    def memory(self, header: Header, nbytes: int) -> memoryview | None:
        """Where the `nbytes` of a data frame's payload belong, if known; called before they are received.

        Raises:
            ProtocolError: the frame does not belong here.
        """

    def data(self, header: Header, payload: memoryview, place: Place | None) -> None:
        """Takes a data frame; its payload is where `memory` said, or in shared memory at `place`, else new."""

    def notice(self, header: Header, payload: memoryview) -> None:
        """Takes a LAYOUT or a TRACE, which only workers get, or SCALARS, which only pservers get."""


def take(header: Header, payload: memoryview, data: Kind, queue: SendQueue, receiver: Receiver) -> TfpsError | None:
    """Dispatches an incoming frame: data frames go to `receiver`, receipts to `queue`.

    Args:
        data: the kind of data frames in this direction.

    Returns:
        The error of an ERROR frame, which is the last.

    Raises:
        ProtocolError: it is of the wrong kind for this direction.
    """
    if header.kind == data:
        if (place := frames.decode_place(header, payload)) is None:
            nbytes = len(payload)
        else:
            nbytes = 0 if header.flags & EMPTY else place.nbytes
        queue.received(nbytes, header.received)
        receiver.data(header, payload, place)
    elif header.kind == Kind.ACK:
        queue.acked(header.received)
    elif header.kind in (Kind.LAYOUT, Kind.TRACE, Kind.SCALARS):
        receiver.notice(header, payload)
    elif header.kind == Kind.ERROR:
        return frames.decode_error(header, payload)
    else:
        raise not_expected(header, data)
    return None


def not_expected(header: Header, data: Kind) -> ProtocolError:
    """The error for a frame of the wrong kind in a direction whose data frames are of kind `data`."""
    return ProtocolError(f"kind of a frame must be {data.name}, ACK or ERROR here, got {Kind(header.kind).name}")


def write_shared(header: Header, payload: memoryview | None, target: Target) -> bytes:
    """Writes a slice to its `target` in shared memory; returns the frame that says where it is."""
    if payload is not None:
        np.copyto(target.memory, np.frombuffer(payload, np.uint8))
    return frames.encode_shared(header, target.place)


# Over gRPC: frames as messages


def outgoing(queue: SendQueue) -> Iterator[bytes]:
    """Yields the messages to send until the queue is closed.

    Raises:
        TfpsError: the queue failed.
    """
    while (taken := queue.take()) is not None:
        item, received = taken.item, taken.received
        if item is None:
            yield frames.encode(Header(Kind.ACK, received=received))
        elif isinstance(item, bytes):
            yield item
        elif item.target is not None:
            yield write_shared(item.header._replace(received=received), item.payload, item.target)
        elif item.frame is not None:
            yield item.frame
        elif item.encoding is not None:
            yield frames.encode(item.header._replace(received=received), item.encoding.data())
        else:
            yield frames.encode(item.header._replace(received=received), item.payload or b"")
        item = taken = None  # frees the payload while waiting for the next


def receive(messages: Iterable[bytes], data: Kind, queue: SendQueue, receiver: Receiver) -> TfpsError | None:
    """Passes incoming data frames to `receiver` and tracks the receipts of both directions, to the stream's end.

    Returns:
        The error that the other end sent, if it did.

    Raises:
        ProtocolError: a frame is malformed or of the wrong kind for this direction.
        grpc.RpcError: the stream broke (on a pserver: a plain Exception).
    """
    for message in messages:
        header, payload = frames.decode(message)
        del message
        if (error := take(header, payload, data, queue, receiver)) is not None:
            return error
        del payload  # frees its memory for the next message
    return None
