"""A pserver's end of measurements of bytes per second: when it takes part, how long, and for how many bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from tfps.errors import ConnectError, TfpsError, WaitTimeoutError
from tfps.pserver.guard import Rate
from tfps.wire.connection import acknowledge, refuse
from tfps.wire.measuring import (
    CHUNK,
    DEADLINE_S,
    DIRECTION_KEY,
    SECONDS,
    Direction,
    Measured,
    Meter,
    drop,
)

_PER_S, _BURST = 0.2, 32.0  # measurements, one direction each
_LOOK_S = 0.1  # how long a socket may be silent before a look at what else has happened
_END_S = 1.0  # for a client to close its end
_NOT_SENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", None)


class Measuring:
    """Serves one measurement at a time, and none while there is a job, which it would slow; any thread.

    Args:
        has_job: whether workers have joined that have not all left.
    """

    def __init__(self, has_job: Callable[[], bool]) -> None:
        self._has_job = has_job
        self._turn = threading.Lock()  # held by who measures
        self._rate = Rate(_PER_S, _BURST)
        self._closed = threading.Event()

    def close(self) -> None:
        """Ends the current measurement soon."""
        self._closed.set()

    def connection(self, connected: socket.socket, direction: Direction) -> None:
        """Serves a data connection whose greeting asked for it, and closes it."""
        try:
            with self._taken():
                connected.settimeout(_LOOK_S)
                acknowledge(connected)
                end_s = time.monotonic() + 2 * SECONDS
                if direction == "pull":
                    self._send(connected, end_s)
                else:
                    connected.sendall(self._receive(connected, end_s).encode())
                if self._may_go_on():
                    _wait_for_end(connected)
        except TfpsError as error:
            refuse(connected, error)
        except OSError:
            pass  # the client is gone
        finally:
            drop(connected)

    def call(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Serves Measure over gRPC, whose deadline ends a client that is silent."""
        metadata = dict(context.invocation_metadata())
        try:
            direction = metadata.get(DIRECTION_KEY)
            if direction not in ("push", "pull"):
                raise ConnectError(f"metadata {DIRECTION_KEY} must be push or pull, got {str(direction)[:20]!a}")
            left_s = context.time_remaining()
            if left_s is None or left_s > DEADLINE_S + 1.0:
                raise ConnectError(f"a call of Measure must have a deadline of at most {DEADLINE_S:.0f} s")
            with self._taken():
                if direction == "push":
                    yield self._count(messages).encode()
                else:
                    yield from self._chunks()
        except WaitTimeoutError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except TfpsError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    @contextlib.contextmanager
    def _taken(self) -> Iterator[None]:
        """Raises WaitTimeoutError if there is a job, or it is not this client's turn."""
        if self._has_job():
            raise WaitTimeoutError("the pserver has a job, which a measurement would slow")
        if not self._turn.acquire(blocking=False):
            raise WaitTimeoutError("another client measures at the moment")
        try:
            if wait_s := self._rate.take():
                raise WaitTimeoutError(f"too many measurements have been made here; the next may in {wait_s:.2g} s")
            yield
        finally:
            self._turn.release()

    def _may_go_on(self) -> bool:
        return not self._closed.is_set() and not self._has_job()

    def _receive(self, connected: socket.socket, end_s: float) -> Measured:
        meter, memory = Meter(), bytearray(len(CHUNK))
        while not meter.over and time.monotonic() < end_s and self._may_go_on():
            with contextlib.suppress(TimeoutError):
                if not (count := connected.recv_into(memory)):
                    break
                meter.add(count, time.monotonic_ns())
        return meter.measured()

    def _send(self, connected: socket.socket, end_s: float) -> None:
        if _NOT_SENT_LOWAT is not None:  # else the client still gets megabytes after the end
            connected.setsockopt(socket.IPPROTO_TCP, _NOT_SENT_LOWAT, len(CHUNK))
        meter = Meter()
        while not meter.over and time.monotonic() < end_s and self._may_go_on():
            with contextlib.suppress(TimeoutError):
                meter.add(connected.send(CHUNK), time.monotonic_ns())

    def _count(self, messages: Iterator[bytes]) -> Measured:
        meter = Meter()
        with contextlib.suppress(Exception):  # gRPC raises when the client is gone or its deadline over
            for message in messages:
                meter.add(len(message), time.monotonic_ns())
                if meter.over or not self._may_go_on():
                    break
        return meter.measured()

    def _chunks(self) -> Iterator[bytes]:
        meter = Meter()
        while not meter.over and self._may_go_on():
            meter.add(len(CHUNK), time.monotonic_ns())
            yield CHUNK


def _wait_for_end(connected: socket.socket) -> None:
    """Reads on until the client has closed its end: closing first could take from it what was sent last.

    Raises:
        OSError: the client is gone, or does not close for too long.
    """
    connected.shutdown(socket.SHUT_WR)
    end_s, memory = time.monotonic() + _END_S, bytearray(len(CHUNK))
    while time.monotonic() < end_s:
        with contextlib.suppress(TimeoutError):
            if not connected.recv_into(memory):
                return
