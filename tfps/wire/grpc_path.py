"""Slices as messages on gRPC streams, one per direction: the fallback without a data connection."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import grpc

from tfps.errors import TfpsError
from tfps.wire import frames
from tfps.wire.control import INCARNATION_KEY, PULL, PUSH, RANK_KEY, Pserver, lost, method
from tfps.wire.frames import Header, Kind
from tfps.wire.send_queue import SendQueue
from tfps.wire.stream import Receiver, take, write_shared


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


class GrpcPath:
    """A worker's two streams. gRPC's own threads push."""

    def __init__(
        self, pserver: Pserver, queue: SendQueue, incarnation: str, rank: int, when: Callable[[], str]
    ) -> None:
        self._address, self._when = pserver.address, when
        channel, metadata = pserver.channel, (*pserver.metadata, (INCARNATION_KEY, incarnation), (RANK_KEY, str(rank)))
        self._pull: grpc.Call = channel.unary_stream(method(PULL))(b"", metadata=metadata)
        self._push: grpc.Future = channel.stream_unary(method(PUSH)).future(outgoing(queue), metadata=metadata)

    def receive(self, queue: SendQueue, receiver: Receiver) -> TfpsError | None:
        try:
            return receive(self._pull, Kind.REPLY, queue, receiver)
        except grpc.RpcError as broken:
            raise lost(self._address, broken, self._when()) from broken

    def finish(self) -> None:
        self._push.cancel()
        # Read to the end: with SingleThreadedUnaryStream gRPC keeps the connection until the reader has got the final
        # status, even if cancelled.
        with contextlib.suppress(grpc.RpcError):
            for _ in self._pull:
                pass

    def abort(self) -> None:
        self._pull.cancel()
