"""What a worker and a pserver send each other, whichever data path it takes, and the worker's end of it.

Tested in tests/wire/test_grpc_path.py, tests/wire/test_connection.py and tests/worker/test_worker.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from tfps.errors import ProtocolError, PserverLostError, TfpsError
from tfps.wire import frames
from tfps.wire.frames import EMPTY, Header, Kind
from tfps.wire.send_queue import SendQueue
from tfps.wire.shared_memory import Place

_END_S = 5.0  # for a pserver to end the streams of a worker that has left


class Receiver(Protocol):
    """What takes the frames that come in."""

    def memory(self, header: Header, nbytes: int) -> memoryview | None:
        """Where the `nbytes` of payload of a data frame belong, if that is known; called before they are received.

        Raises:
            ProtocolError: the frame does not belong here.
        """

    def data(self, header: Header, payload: memoryview, place: Place | None) -> None:
        """Takes a data frame; its payload is where `memory` said, or in shared memory at `place`, else to be kept."""

    def notice(self, header: Header, payload: memoryview) -> None:
        """Takes a LAYOUT or a TRACE, which only workers get."""


class Path(Protocol):
    """A worker's streams to and from one pserver: gRPC, or a data connection."""

    def receive(self, queue: SendQueue, receiver: Receiver) -> TfpsError | None:
        """Receives to the end, which a pserver's ERROR may be.

        Raises:
            ProtocolError: a frame is malformed or of a kind that does not come in this direction.
            PserverLostError: the connection broke.
        """

    def finish(self) -> None:
        """Ends both directions, from the thread that has received."""

    def abort(self) -> None:
        """Makes `receive` end, from another thread."""


def take(header: Header, payload: memoryview, data: Kind, queue: SendQueue, receiver: Receiver) -> TfpsError | None:
    """Takes a frame that has come in: data frames go to `receiver`, receipts to `queue`.

    Args:
        data: the kind of data frames in this direction.

    Returns:
        The error in it, if it is one: the last frame.

    Raises:
        ProtocolError: it is of a kind that does not come in this direction.
    """
    if header.kind == data:
        if (place := frames.decode_place(header, payload)) is None:
            queue.received(len(payload))
        else:
            queue.received(0 if header.flags & EMPTY else place.nbytes)
        queue.acked(header.received)
        receiver.data(header, payload, place)
    elif header.kind == Kind.ACK:
        queue.acked(header.received)
    elif header.kind in (Kind.LAYOUT, Kind.TRACE):
        receiver.notice(header, payload)
    elif header.kind == Kind.ERROR:
        return frames.decode_error(header, payload)
    else:
        raise not_expected(header, data)
    return None


def not_expected(header: Header, data: Kind) -> ProtocolError:
    """The error for a frame of a kind that does not come in a direction whose data frames are of kind `data`."""
    return ProtocolError(f"kind of a frame must be {data.name}, ACK or ERROR here, got {Kind(header.kind).name}")


class WorkerStream:
    """The worker's end of both directions to one pserver. The thread "tfps-recv-<index>" receives.

    What ends the stream of pushes shows in that of replies: the pserver ends the one with the other.

    Args:
        address: of the pserver.
        receiver: called on the receiver thread.
        on_end: called once on the receiver thread if the streams end other than by `close`; told is True if the pserver
            said why.
        when: `at step 17`, for messages.
    """

    def __init__(
        self,
        address: str,
        index: int,
        queue: SendQueue,
        receiver: Receiver,
        on_end: Callable[[TfpsError, bool], None],
        when: Callable[[], str],
    ) -> None:
        self._address = address
        self._queue = queue
        self._receiver = receiver
        self._on_end = on_end
        self._when = when
        self._closed = False
        self._name = f"tfps-recv-{index}"
        self._running: tuple[Path, threading.Thread] | None = None

    def start(self, path: Path) -> None:
        """Receives what comes on `path`, which sends already."""
        thread = threading.Thread(target=self._receive, args=(path,), name=self._name, daemon=True)
        self._running = path, thread
        thread.start()

    def close(self) -> None:
        """Waits for the end of the streams and of the thread; the pserver, which must know of the leave, ends them."""
        self._closed = True
        self._queue.close()
        if self._running is None:
            return
        path, thread = self._running
        if threading.current_thread() is not thread:
            thread.join(_END_S)
            if thread.is_alive():  # the pserver is not there any more
                path.abort()
                thread.join()

    def _receive(self, path: Path) -> None:
        told = False
        try:
            failure = path.receive(self._queue, self._receiver)
            told = failure is not None
            error: TfpsError = failure or PserverLostError(f"pserver {self._address}: ended the stream {self._when()}")
        except ProtocolError as malformed:
            error = ProtocolError(f"pserver {self._address}: {malformed}")
        except PserverLostError as lost:
            error = lost
        except Exception as bug:  # without a receiver every waiter would wait for ever
            error = TfpsError(f"pserver {self._address}: receiving failed {self._when()}: {bug!r}")
            error.__cause__ = bug
        if not self._closed:
            self._on_end(error, told)
        path.finish()
