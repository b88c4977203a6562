"""Measures the bytes per second between two processes, both ends: one sends, the other counts (docs/transport.md).

Tested in tests/wire/test_measuring.py and tests/pserver/test_measuring.py.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal

import grpc

from tfps.errors import ConnectError, ProtocolError, TfpsError, WaitTimeoutError
from tfps.wire.connection import acknowledge, refuse
from tfps.wire.control import MEASURE, Pserver, lost, method
from tfps.wire.send_queue import Throughput

Direction = Literal["push", "pull"]  # as of slices: a worker pushes

SECONDS = 1.0  # the most that one direction takes
MAX_BYTES = 512 * 2**20  # of one direction; a fifth of a second at 25 Gbit/s
CHUNK = bytes(128 * 1024)  # what is sent at a time; over gRPC a message
DEADLINE_S = 5.0  # the most that a call of Measure may have: until then it keeps others from measuring
DIRECTION_KEY = "tfps-direction"  # metadata of Measure
_RESULT = struct.Struct("<QQ")  # bytes and nanoseconds that the receiver has counted
RESULT_BYTES = _RESULT.size
_TICK_NS = 2_000_000  # between two points of a measurement
_SKIPPED = 4  # one part of so many, the first, does not count: connections start slowly
_DROP = struct.pack("ii", 1, 0)  # SO_LINGER: what is still to be sent is thrown away at close
_SERVED_S = 2 * SECONDS  # the most that a pserver gives one client
_LOOK_S = 0.1  # how long a socket may be silent before a look at what else has happened
_END_S = 1.0  # for a client to close its end
_NOT_SENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", None)
_PURPOSES: dict[str, Direction] = {"measure push": "push", "measure pull": "pull"}  # an incarnation has no space


def pack_result(counted: Throughput) -> bytes:
    """What the receiver has counted, as it tells the sender."""
    return _RESULT.pack(counted.nbytes, round(counted.seconds * 1e9))


def unpack_result(data: bytes) -> Throughput:
    """The reverse of `pack_result`."""
    if len(data) != RESULT_BYTES:
        raise ProtocolError(f"the result of a measurement must have {RESULT_BYTES} bytes, got {len(data)}")
    nbytes, nanoseconds = _RESULT.unpack(data)
    return Throughput(nbytes, nanoseconds / 1e9)


class Meter:
    """Counts what arrives. For one thread."""

    def __init__(self) -> None:
        self.nbytes = 0  # so far
        self._points: list[tuple[int, int]] = []  # time and bytes by then
        self._last = (0, 0)

    def add(self, nbytes: int, now_ns: int) -> None:
        self.nbytes += nbytes
        self._last = now_ns, self.nbytes
        if not self._points or now_ns - self._points[-1][0] >= _TICK_NS:
            self._points.append(self._last)

    @property
    def seconds(self) -> float:
        """Between the first and the last bytes."""
        return (self._last[0] - self._points[0][0]) / 1e9 if self._points else 0.0

    @property
    def over(self) -> bool:
        """Whether that is enough."""
        return self.nbytes >= MAX_BYTES or self.seconds >= SECONDS

    def measured(self) -> Throughput:
        """What came after the first quarter of the time; all of it, in no time, if it came at once."""
        points = [*self._points, self._last]
        first_ns, last_ns = points[0][0], points[-1][0]
        begin_ns = first_ns + (last_ns - first_ns) / _SKIPPED
        then_ns, before = next(point for point in points if point[0] >= begin_ns)
        if then_ns == last_ns:
            return Throughput(self.nbytes, 0.0)
        return Throughput(self.nbytes - before, (last_ns - then_ns) / 1e9)


def purpose(direction: Direction) -> str:
    """What a client that wants to measure sends in its greeting instead of an incarnation."""
    return f"measure {direction}"


def direction_of(text: str) -> Direction | None:
    """The direction, if `text` is from `purpose`."""
    return _PURPOSES.get(text)


def drop(connected: socket.socket) -> None:
    """Closes at once, together with what the kernel has not sent yet: it would be in the way of what comes next."""
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP)
    connected.close()


# The client's end


def measure_connection(connected: socket.socket, direction: Direction, seconds: float, timeout_s: float) -> Throughput:
    """Measures over a data connection that was greeted with `purpose(direction)`, and closes it.

    TimeoutError: nothing came within `timeout_s`, or nothing of what was sent has arrived.
    """
    try:
        connected.settimeout(timeout_s)
        return _pull(connected, seconds) if direction == "pull" else _push(connected, seconds, timeout_s)
    finally:
        drop(connected)


def _pull(connected: socket.socket, seconds: float) -> Throughput:
    meter, memory = Meter(), bytearray(len(CHUNK))
    try:
        while meter.seconds < seconds and (count := connected.recv_into(memory)):
            meter.add(count, time.monotonic_ns())
    except ConnectionResetError:
        if not meter.nbytes:
            raise TimeoutError("the pserver has given up, as nothing of what it sent has arrived") from None
        raise
    return meter.measured()


def _push(connected: socket.socket, seconds: float, timeout_s: float) -> Throughput:
    """Sends until the pserver tells its result; it counts, as only the receiver knows what has arrived."""
    connected.setblocking(False)
    poll = select.poll()
    poll.register(connected, select.POLLIN | select.POLLOUT)
    end_s = time.monotonic() + seconds
    sending, sent, result = True, 0, b""
    while len(result) < RESULT_BYTES:
        now_s = time.monotonic()
        if sending and now_s >= end_s:
            sending = False
            connected.shutdown(socket.SHUT_WR)
            poll.modify(connected, select.POLLIN)
        if now_s >= end_s + timeout_s:
            raise TimeoutError(f"no result within {timeout_s:.3g} s")
        for _, event in poll.poll(50):
            if event & ~select.POLLOUT:
                if not (piece := connected.recv(RESULT_BYTES - len(result))):
                    raise ConnectionResetError("the connection ended before the result came")
                result += piece
            elif sending:
                with contextlib.suppress(BlockingIOError):
                    sent += connected.send(CHUNK)
    measured = unpack_result(result)
    if sent and not measured.nbytes:
        raise TimeoutError(f"nothing of {sent} bytes has arrived")
    return measured


def measure_grpc(pserver: Pserver, direction: Direction, seconds: float) -> Throughput:
    """As `measure_connection`, over gRPC; WaitTimeoutError: the pserver has a job, or somebody else measures."""

    def messages() -> Iterator[bytes]:
        end_s = time.monotonic() + seconds
        while direction == "push" and time.monotonic() < end_s:
            yield CHUNK

    call = pserver.channel.stream_stream(method(MEASURE))(
        messages(), metadata=(*pserver.metadata, (DIRECTION_KEY, direction)), timeout=DEADLINE_S
    )
    meter = Meter()
    try:
        for message in call:
            if not message:  # of a refusal, whose reason follows
                continue
            if direction == "push":
                return unpack_result(message)
            meter.add(len(message), time.monotonic_ns())
            if meter.seconds >= seconds:
                break
    except grpc.RpcError as error:
        code, details = error.code(), str(error.details())
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise WaitTimeoutError(details) from error
        if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED):
            raise ConnectError(details) from error
        raise lost(pserver.address, error, "while measuring") from error
    finally:
        call.cancel()
    return meter.measured()


# The pserver's end


class Measuring:
    """Serves one measurement at a time, and none while there is a job, which it would slow; any thread."""

    def __init__(self, has_job: Callable[[], bool], wait_s: Callable[[], float]) -> None:
        self._has_job, self._wait_s = has_job, wait_s
        self._turn = threading.Lock()  # held by who measures
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
                end_s, memory = time.monotonic() + _SERVED_S, bytearray(len(CHUNK))
                if direction == "pull":
                    if _NOT_SENT_LOWAT is not None:  # else the client still gets megabytes after the end
                        connected.setsockopt(socket.IPPROTO_TCP, _NOT_SENT_LOWAT, len(CHUNK))
                    self._count(lambda: connected.send(CHUNK), end_s)
                else:
                    connected.sendall(pack_result(self._count(lambda: connected.recv_into(memory), end_s)))
                if not self._may_go_on():
                    return
                connected.shutdown(socket.SHUT_WR)
                end_s = time.monotonic() + _END_S
                while time.monotonic() < end_s:  # until the client closes: to do so first could take the last from it
                    with contextlib.suppress(TimeoutError):
                        if not connected.recv_into(memory):
                            return
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
                    yield pack_result(self._count(lambda: _next_bytes(messages)))
                    return
                meter = Meter()
                while not meter.over and self._may_go_on():
                    meter.add(len(CHUNK), time.monotonic_ns())
                    yield CHUNK
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
            if wait_s := self._wait_s():
                raise WaitTimeoutError(f"too many measurements have been made here; the next may in {wait_s:.2g} s")
            yield
        finally:
            self._turn.release()

    def _may_go_on(self) -> bool:
        return not self._closed.is_set() and not self._has_job()

    def _count(self, transfer: Callable[[], int], end_s: float = float("inf")) -> Throughput:
        """Calls `transfer`, which returns how many bytes it has moved, 0 at their end, until that is enough."""
        meter = Meter()
        while not meter.over and time.monotonic() < end_s and self._may_go_on():
            with contextlib.suppress(TimeoutError):
                if not (nbytes := transfer()):
                    break
                meter.add(nbytes, time.monotonic_ns())
        return meter.measured()


def _next_bytes(messages: Iterator[bytes]) -> int:
    with contextlib.suppress(Exception):  # gRPC raises when the client is gone or its deadline over
        return len(next(messages, b""))
    return 0
