"""The streams between a worker and a pserver, on either data path, and the worker's end of them.

Tested in tests/wire/test_grpc_path.py, tests/wire/test_connection.py and tests/worker/test_worker_ends.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

from tfps.errors import ProtocolError, PserverLostError, TfpsError
from tfps.wire import frames
from tfps.wire.frames import EMPTY, Header, Kind
from tfps.wire.send_queue import SendQueue
from tfps.wire.shared_memory import Place, Target

_END_S = 5.0  # for a pserver to end the streams of a worker that has left


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


class Path(Protocol):
    """A worker's streams to and from one pserver: gRPC, or a data connection."""

    def receive(self, queue: SendQueue, receiver: Receiver) -> TfpsError | None:
        """Receives to the end, or until the pserver sends an ERROR, which it returns.

        Raises:
            ProtocolError: a frame is malformed or of the wrong kind for this direction.
            PserverLostError: the connection broke.
        """

    def finish(self) -> None:
        """Ends both directions; for the receiving thread."""

    def abort(self) -> None:
        """Ends `receive` from another thread."""


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


class WorkerStream:
    """The worker's end of both directions to one pserver. The thread "tfps-recv-<index>" receives.

    The end of the push stream shows in the reply stream: the pserver ends both together.

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
        self._index = index
        self._running: tuple[Path, threading.Thread] | None = None

    def start(self, path: Path) -> None:
        """Starts receiving on `path`, which is sending already."""
        thread = threading.Thread(target=self._receive, args=(path,), name=f"tfps-recv-{self._index}", daemon=True)
        self._running = path, thread
        thread.start()

    def close(self) -> None:
        """Waits for the streams and the thread to end. The pserver ends them, so Leave must come before."""
        self._closed = True
        self._queue.close()
        if self._running is None:
            return
        path, thread = self._running
        if threading.current_thread() is not thread:
            thread.join(_END_S)
            if thread.is_alive():  # the pserver is gone
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
        except TfpsError as known:
            error = known
        except Exception as bug:  # without a receiver every waiter would hang
            error = TfpsError(f"pserver {self._address}: receiving failed {self._when()}: {bug!r}")
            error.__cause__ = bug
        if not self._closed:
            self._on_end(error, told)
        path.finish()
