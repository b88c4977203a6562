"""The streams between a worker and a pserver, one per direction: the loops that both ends run, and the worker's end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

import grpc
import numpy as np

from tfps.errors import ProtocolError, PserverLostError, TfpsError
from tfps.wire import frames
from tfps.wire.control import PULL, PUSH, RANK_KEY, TOKEN_KEY, Pserver, lost, method
from tfps.wire.frames import EMPTY, Header, Kind
from tfps.wire.send_queue import SendQueue
from tfps.wire.shared_memory import Place

_END_S = 5.0  # for a pserver to end the streams of a worker that has left
OnData = Callable[[Header, memoryview, Place | None], None]  # without the payload, if there is a place where it is
OnNotice = Callable[[Header, memoryview], None]


def outgoing(queue: SendQueue) -> Iterator[bytes]:
    """The messages to send, as the queue gives them out; ends when it is closed.

    Raises:
        TfpsError: the queue failed.
    """
    while (taken := queue.take()) is not None:
        item, received = taken
        if item is None:
            yield frames.encode(Header(Kind.ACK, received=received))
        elif isinstance(item, bytes):
            yield item
        elif item.target is not None:
            if item.payload is not None:
                np.copyto(item.target.memory, np.frombuffer(item.payload, np.uint8))
            yield frames.encode_shared(item.header._replace(received=received), item.target.place)
        elif item.frame is not None:
            yield item.frame
        else:
            yield frames.encode(item.header._replace(received=received), item.payload or b"")
        item = taken = None  # the payload may go while this waits for the next


def receive(
    messages: Iterable[bytes],
    data: Kind,
    queue: SendQueue,
    on_data: OnData,
    on_notice: OnNotice | None = None,
) -> TfpsError | None:
    """Hands all data frames that come in to `on_data` and keeps the receipts of both directions, to the stream's end.

    `on_notice` gets LAYOUT and TRACE frames, which only workers get.

    Returns:
        The error that the other end sent, if it did.

    Raises:
        ProtocolError: a frame is malformed or of a kind that does not come in this direction.
        grpc.RpcError: the stream broke (on a pserver: a plain Exception).
    """
    for message in messages:
        header, payload = frames.decode(message)
        del message
        if header.kind == data:
            if (place := frames.decode_place(header, payload)) is None:
                queue.received(len(payload))
            else:
                queue.received(0 if header.flags & EMPTY else place.nbytes)
            queue.acked(header.received)
            on_data(header, payload, place)
        elif header.kind == Kind.ACK:
            queue.acked(header.received)
        elif header.kind in (Kind.LAYOUT, Kind.TRACE) and on_notice is not None:
            on_notice(header, payload)
        elif header.kind == Kind.ERROR:
            return frames.decode_error(header, payload)
        else:
            raise ProtocolError(f"kind of a frame must be {data.name}, ACK or ERROR here, got {Kind(header.kind).name}")
        del payload  # the message's memory is the next one's
    return None


class WorkerStream:
    """The worker's end of both. gRPC's own threads push, the thread "tfps-recv-<index>" pulls.

    What ends the stream of pushes shows in that of replies: the pserver ends the one with the other.

    Args:
        on_data: called with every reply on the receiver thread.
        on_notice: called with every LAYOUT and TRACE there.
        on_end: called once on the receiver thread if the streams end other than by `close`; told is True if the pserver
            said why.
        when: `at step 17`, for messages.
    """

    def __init__(
        self,
        pserver: Pserver,
        index: int,
        queue: SendQueue,
        on_data: OnData,
        on_notice: OnNotice,
        on_end: Callable[[TfpsError, bool], None],
        when: Callable[[], str],
    ) -> None:
        self._pserver = pserver
        self._queue = queue
        self._on_data = on_data
        self._on_notice = on_notice
        self._on_end = on_end
        self._when = when
        self._closed = False
        self._pull: grpc.Call | None = None
        self._push: grpc.Future | None = None
        self._thread = threading.Thread(target=self._receive, name=f"tfps-recv-{index}", daemon=True)

    def start(self, token: str, rank: int) -> None:
        """Opens the streams of a worker that has joined."""
        channel, metadata = self._pserver.channel, ((TOKEN_KEY, token), (RANK_KEY, str(rank)))
        self._pull = channel.unary_stream(method(PULL))(b"", metadata=metadata)
        self._push = channel.stream_unary(method(PUSH)).future(outgoing(self._queue), metadata=metadata)
        self._thread.start()

    def close(self) -> None:
        """Waits for the end of the streams and of the thread; the pserver, which must know of the leave, ends them."""
        self._closed = True
        self._queue.close()
        if self._pull is not None and threading.current_thread() is not self._thread:
            self._thread.join(_END_S)
            if self._thread.is_alive():  # the pserver is not there any more: one connection less does not matter
                self._pull.cancel()
                self._thread.join()

    def _receive(self) -> None:
        address = self._pserver.address
        told = False
        try:
            failure = receive(
                self._pull,  # type: ignore[arg-type]
                Kind.REPLY,
                self._queue,
                self._on_data,
                self._on_notice,
            )
            told = failure is not None
            error: TfpsError = failure or PserverLostError(f"pserver {address}: ended the stream {self._when()}")
        except grpc.RpcError as broken:
            error = lost(address, broken, self._when())
            error.__cause__ = broken
        except ProtocolError as malformed:
            error = ProtocolError(f"pserver {address}: {malformed}")
        except Exception as bug:  # without a receiver every waiter would wait for ever
            error = TfpsError(f"pserver {address}: receiving failed {self._when()}: {bug!r}")
            error.__cause__ = bug
        if self._push is not None:
            self._push.cancel()
        if not self._closed:
            self._on_end(error, told)
        # To the end: gRPC keeps the connection of a stream that is read by the thread that wants it until it has said
        # what the stream ended with, also if that was cancelled.
        with contextlib.suppress(grpc.RpcError):
            for _ in self._pull or ():
                pass
