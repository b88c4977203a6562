"""A worker's end of the streams to its pservers: over a data connection or gRPC, and the choice between the two.

Tested in tests/wire/test_paths.py, tests/worker/test_worker_ends.py and tests/pserver/test_data_port.py.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

import grpc

from tfps.config import Transport
from tfps.errors import ConnectError, ProtocolError, PserverLostError, TfpsError
from tfps.membership.view import Membership
from tfps.wire.connection import BrokenConnectionError, Connection, Receiver, dial, outgoing, receive
from tfps.wire.control import INCARNATION_KEY, PULL, PUSH, RANK_KEY, Pserver, lost, method
from tfps.wire.frames import Kind
from tfps.wire.send_queue import SendQueue

logger = logging.getLogger("tfps")
# For a data port to answer, and for others after one that did not: behind a firewall that drops packets none does.
_DIAL_S, _NEXT_DIAL_S = 5.0, 1.0
_END_S = 5.0  # for a pserver to end the streams of a worker that has left


class TcpPath:
    """A worker's data connection. The thread "tfps-send-<index>" pushes. `GrpcPath` has the same methods."""

    def __init__(self, connection: Connection, address: str, index: int, queue: SendQueue, when: Callable[[], str]):
        self._connection, self._address, self._when, self._queue = connection, address, when, queue
        queue.use_connection()
        self._bug: Exception | None = None  # why sending ended
        self._sender = threading.Thread(target=self._send, name=f"tfps-send-{index}", daemon=True)
        self._sender.start()

    def receive(self, queue: SendQueue, receiver: Receiver) -> TfpsError | None:
        """Receives to the end, or until the pserver sends an ERROR, which it returns."""
        broken: BrokenConnectionError | None = None
        try:
            error = self._connection.receive(Kind.REPLY, queue, receiver)
        except BrokenConnectionError as caught:
            broken = caught
        if self._bug is not None:  # which has ended the connection
            raise TfpsError(f"pserver {self._address}: sending failed {self._when()}: {self._bug!r}") from self._bug
        if broken is not None:
            raise PserverLostError(f"pserver {self._address}: connection lost {self._when()}: {broken}") from broken
        return error

    def finish(self) -> None:
        """Ends both directions; for the receiving thread."""
        self._queue.close()
        self._connection.shut_down()
        self._sender.join()
        self._connection.close()

    def abort(self) -> None:
        """Ends `receive` from another thread."""
        self._connection.shut_down()

    def _send(self) -> None:
        try:
            self._connection.send(self._queue)
        except Exception as error:  # the receiving thread reports what happened: every waiter would hang
            self._bug = None if isinstance(error, BrokenConnectionError) else error
            self._connection.shut_down()


class GrpcPath:
    """A worker's two streams. gRPC's own threads push."""

    def __init__(self, pserver: Pserver, queue: SendQueue, member: Membership, when: Callable[[], str]) -> None:
        self._address, self._when, channel = pserver.address, when, pserver.channel
        metadata = (*pserver.metadata, (INCARNATION_KEY, member.incarnation), (RANK_KEY, str(member.rank)))
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


DataPath = TcpPath | GrpcPath


class Opening:
    """Opens the data paths of a worker to one pserver after the other; `when()` is `at step 17`, for messages."""

    def __init__(self, transport: Transport, when: Callable[[], str]) -> None:
        self._transport, self._when, self._dial_s = transport, when, _DIAL_S

    def open(self, pserver: Pserver, index: int, queue: SendQueue, data_port: int, member: Membership) -> DataPath:
        """Opens the path to a pserver that `member` has joined; a `data_port` of 0: it uses TLS and has none."""
        if not data_port and self._transport != "grpc":
            logger.info("tfps: pserver %s uses TLS: slices go through gRPC", pserver.address)
        elif self._transport != "grpc":
            try:
                address, token = pserver.address, pserver.token
                connection = dial(address, data_port, token, member.incarnation, member.rank, self._dial_s)
                return TcpPath(connection, address, index, queue, self._when)
            except OSError as error:
                if isinstance(error, TimeoutError):  # a firewall, which probably hides the other ports, too
                    self._dial_s = _NEXT_DIAL_S
                where = f"pserver {pserver.address}: its data port {data_port} cannot be reached: {error}"
                if self._transport == "tcp":
                    raise ConnectError(
                        f"{where}; open the port between the hosts (tfps_pserver --data-port sets it), or set "
                        'transport="auto"'
                    ) from error
                logger.warning("tfps: %s; slices go through gRPC, which takes several times the CPU per byte", where)
        return GrpcPath(pserver, queue, member, self._when)


class WorkerStream:
    """The worker's end of both directions to one pserver. The thread "tfps-recv-<index>" receives.

    `on_end` is called on it once if the streams end other than by `close`: why, and whether the pserver said so.
    """

    def __init__(
        self,
        path: DataPath,
        address: str,
        index: int,
        queue: SendQueue,
        receiver: Receiver,
        on_end: Callable[[TfpsError, bool], None],
        when: Callable[[], str],
    ) -> None:
        self._path, self._address, self._queue, self._when = path, address, queue, when
        self._receiver, self._on_end = receiver, on_end
        self._closed = False
        self._thread = threading.Thread(target=self._receive, name=f"tfps-recv-{index}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for the streams and the thread to end. The pserver ends them, so Leave must come before."""
        self._closed = True
        self._queue.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_S)
            if self._thread.is_alive():  # the pserver is gone
                self._path.abort()
                self._thread.join()

    def _receive(self) -> None:
        failure = None
        try:
            failure = self._path.receive(self._queue, self._receiver)
            error: TfpsError = failure or PserverLostError(f"pserver {self._address}: ended the stream {self._when()}")
        except ProtocolError as malformed:
            error = ProtocolError(f"pserver {self._address}: {malformed}")
        except TfpsError as known:
            error = known
        except Exception as bug:  # without a receiver every waiter would hang
            error = TfpsError(f"pserver {self._address}: receiving failed {self._when()}: {bug!r}")
            error.__cause__ = bug
        if not self._closed:
            self._on_end(error, failure is not None)
        self._path.finish()
