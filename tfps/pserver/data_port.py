"""A pserver's data port: one thread accepts, and each worker's connection has two, one per direction."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from tfps.errors import ConfigError, TfpsError
from tfps.pserver.guard import Newest, Rate, listen, why_not_listening
from tfps.pserver.job import Session
from tfps.wire.connection import BrokenConnectionError, Connection, admit, given_up, greet, refuse
from tfps.wire.job_token import JobToken
from tfps.wire.measuring import Direction, direction_of

logger = logging.getLogger("tfps")
_GREETING_S = 5.0  # for a client to identify itself
_MAX_STRANGERS = 64  # unidentified connections at a time; another one ends the oldest
_PER_S, _BURST = 50.0, 256.0  # connections that are accepted; the others wait in the kernel
_LINGER_S = 5.0  # for a worker to end its half of a connection after the pserver's


class DataPort:
    """Listens until `close`. Tells the worker and `refused` what `open_session` raises. See wire/measuring.py."""

    def __init__(
        self,
        host: str,
        port: int,
        token: JobToken,
        open_session: Callable[[str, int], Session],
        refused: Callable[[TfpsError], None],
        measure: Callable[[socket.socket, Direction], None],
    ) -> None:
        self._token, self._open_session, self._refused, self._measure = token, open_session, refused, measure
        self._rate = Rate(_PER_S, _BURST)
        try:
            self._listening = listen(host, port, backlog=128)
        except OSError as error:
            why = why_not_listening(error, port)
            raise ConfigError(f"cannot listen on {host}:{port} for data connections: {why}") from error
        self.port = int(self._listening.getsockname()[1])
        self._strangers = Newest(_MAX_STRANGERS)
        self._lock = threading.Condition()  # guards the next two; notified when a connection has ended
        self._connections: set[Connection] = set()
        self._closed = False
        self._said = False  # that there are too many threads; the accepting thread's
        threading.Thread(target=self._accept, name="tfps-accept", daemon=True).start()

    def close(self, grace_s: float = 0.0) -> None:
        """Shuts down connections still open after `grace_s`; those of finished jobs end by then."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listening.close()
        self._strangers.end()
        with self._lock:
            self._lock.wait_for(lambda: not self._connections, grace_s)
            for connection in self._connections:
                connection.shut_down()

    def _accept(self) -> None:
        while True:
            while (wait_s := self._rate.take()) and not self._closed:
                threading.Event().wait(wait_s)
            try:
                connected, _ = self._listening.accept()
            except OSError as error:
                if self._closed:
                    return
                logger.warning("tfps: a data connection could not be accepted: %s", error)  # out of files, perhaps
                threading.Event().wait(0.1)
                continue
            with self._lock:
                if self._closed:
                    connected.close()
                    return
                self._strangers.add(connected)
            try:
                threading.Thread(target=self._serve, args=(connected,), name="tfps-data", daemon=True).start()
            except RuntimeError as error:  # no more threads: this client may come again
                self._strangers.discard(connected)
                connected.close()
                if not self._said:
                    logger.warning("tfps: a data connection was closed at once, and so may be others: %s", error)
                self._said = True

    def _serve(self, connected: socket.socket) -> None:
        opened = None
        try:
            incarnation, rank = greet(connected, self._token, _GREETING_S)
            if (direction := direction_of(incarnation)) is not None:
                self._strangers.discard(connected)
                self._measure(connected, direction)
                return
            if given_up(connected):  # while it waited here: its worker may use gRPC by now
                connected.close()
                return
            opened = self._open_session(incarnation, rank)
            connection = admit(connected)
        except TfpsError as error:
            self._refused(error)
            refuse(connected, error)
            return
        except OSError:
            connected.close()
            if opened is not None:
                opened.ended()
            return
        finally:
            self._strangers.discard(connected)
        with self._lock:
            self._connections.add(connection)
            if self._closed:
                connection.shut_down()
        opened.queue.use_connection()
        received = threading.Event()  # all that comes
        sender = threading.Thread(
            target=self._send, args=(connection, opened, received, rank), name=f"tfps-data-send-{rank}", daemon=True
        )
        threading.current_thread().name = f"tfps-data-recv-{rank}"
        try:
            sender.start()
        except RuntimeError as error:  # no more threads
            connection.tell(opened.fail(error, f"while it began to send to rank {rank}"))
            opened.ended()
        else:
            opened.receive(connection.receive)
            received.set()
            sender.join()
        connection.close()
        with self._lock:
            self._connections.discard(connection)
            self._lock.notify_all()

    def _send(self, connection: Connection, session: Session, received: threading.Event, rank: int) -> None:
        try:
            connection.send(session.queue)
        except BrokenConnectionError:
            pass
        except Exception as error:
            connection.tell(session.fail(error, f"while it sent to rank {rank}"))
        session.ended()
        # The worker reads an ERROR before it ends its half. Closing at once could lose the ERROR: incoming data would
        # be answered with a reset.
        received.wait(_LINGER_S)
        connection.shut_down()
