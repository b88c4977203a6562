"""Slices over a data connection, and the choice between it and gRPC.

Also tested in tests/worker/test_worker_ends.py and tests/pserver/test_data_port.py.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tfps.config import Transport
from tfps.errors import ConfigError, ConnectError, PserverLostError, TfpsError
from tfps.wire.connection import BrokenConnectionError, Connection, dial
from tfps.wire.control import Pserver
from tfps.wire.frames import Kind
from tfps.wire.grpc_path import GrpcPath
from tfps.wire.send_queue import SendQueue
from tfps.wire.stream import Path, Receiver

logger = logging.getLogger("tfps")
# For a data port to answer, and for others after one that did not: behind a firewall that drops packets none does.
_DIAL_S, _NEXT_DIAL_S = 5.0, 1.0


class TcpPath:
    """A worker's data connection. The thread "tfps-send-<index>" pushes."""

    def __init__(self, connection: Connection, address: str, index: int, queue: SendQueue, when: Callable[[], str]):
        self._connection, self._address, self._when, self._queue = connection, address, when, queue
        queue.use_connection()
        self._bug: Exception | None = None  # why sending ended
        self._sender = threading.Thread(target=self._send, name=f"tfps-send-{index}", daemon=True)
        self._sender.start()

    def receive(self, queue: SendQueue, receiver: Receiver) -> TfpsError | None:
        try:
            ended = self._connection.receive(Kind.REPLY, queue, receiver)
        except BrokenConnectionError as broken:
            self._raise_bug()
            raise PserverLostError(f"pserver {self._address}: connection lost {self._when()}: {broken}") from broken
        self._raise_bug()
        return ended

    def _raise_bug(self) -> None:
        if self._bug is not None:
            raise TfpsError(f"pserver {self._address}: sending failed {self._when()}: {self._bug!r}") from self._bug

    def finish(self) -> None:
        self._queue.close()
        self._connection.shut_down()
        self._sender.join()
        self._connection.close()

    def abort(self) -> None:
        self._connection.shut_down()

    def _send(self) -> None:
        try:
            self._connection.send(self._queue)
        except BrokenConnectionError:
            self._connection.shut_down()  # the receiving thread reports what happened
        except Exception as bug:  # without a sender every waiter would hang
            self._bug = bug
            self._connection.shut_down()


class Opening:
    """Opens the data paths of a worker to one pserver after the other, as `transport` says.

    Args:
        when: `at step 17`, for messages.
    """

    def __init__(self, transport: Transport, when: Callable[[], str]) -> None:
        self._transport, self._when, self._dial_s = transport, when, _DIAL_S

    def open(self, pserver: Pserver, index: int, queue: SendQueue, data_port: int, incarnation: str, rank: int) -> Path:
        """Opens the data path to `pserver`, which the worker has joined.

        Args:
            data_port: the pserver's; 0 if it takes no data connections, as it uses TLS.

        Raises:
            ConfigError: `transport` is "tcp" and the pserver uses TLS.
            ConnectError: `transport` is "tcp" and the pserver's data port cannot be reached.
            TfpsError: the error with which the pserver refuses this worker.
        """
        if self._transport == "tcp" and not data_port:
            raise ConfigError(
                f'transport must be "auto" or "grpc" with TLS, got "tcp": pserver {pserver.address} uses TLS, and data '
                "connections are not encrypted"
            )
        if not data_port and self._transport != "grpc":
            logger.info("tfps: pserver %s uses TLS: slices go through gRPC", pserver.address)
        elif self._transport != "grpc":
            try:
                connection = dial(pserver.address, data_port, pserver.token, incarnation, rank, self._dial_s)
                return TcpPath(connection, pserver.address, index, queue, self._when)
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
        return GrpcPath(pserver, queue, incarnation, rank, self._when)
