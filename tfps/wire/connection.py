"""A data connection between a worker and a pserver: plain TCP, one thread per direction at either end.

The next part of a slice is chosen when the socket can take it, so an urgent slice waits for one part. TCP_NOTSENT_LOWAT
keeps the kernel from holding megabytes before it. What both ends do with frames is the same on gRPC's streams.

Tested in tests/wire/test_connection.py.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from tfps.errors import ConnectError, ProtocolError, TfpsError
from tfps.wire import frames
from tfps.wire.frames import EMPTY, PART_BYTES, Assembler, Header, Kind, Part, decode_part, encode_part
from tfps.wire.job_token import MAX_TOKEN_BYTES, JobToken
from tfps.wire.reach import split
from tfps.wire.send_queue import Next, Run, SendQueue
from tfps.wire.shared_memory import Place, Target

try:
    from tfps.wire import _native
except ImportError:
    _native = None  # type: ignore[assignment]  # installed where there was no C compiler

IN_C = _native is not None  # whether the loops over the parts of a frame run in C


class Receiver(Protocol):
    """Takes incoming frames."""

    def memory(self, header: Header, nbytes: int) -> memoryview | None:
        """Where the `nbytes` of a data frame's payload belong, if known; called before they are received."""

    def data(self, header: Header, payload: memoryview, place: Place | None) -> None:
        """Takes a data frame; its payload is where `memory` said, or in shared memory at `place`, else new."""

    def control(self, header: Header, payload: memoryview) -> None:
        """Takes a notice, such as a LAYOUT, or SCALARS, which only pservers get."""


_NOTICES = frozenset(
    (
        *(Kind.LAYOUT, Kind.TRACE, Kind.SCALARS, Kind.RANKS, Kind.LOST, Kind.ADMITTED, Kind.READY, Kind.AWAITED),
        *(Kind.OFFER, Kind.RECEIVED),
    )
)


def take(header: Header, payload: memoryview, data: Kind, queue: SendQueue, receiver: Receiver) -> TfpsError | None:
    """Dispatches an incoming frame: of kind `data` to `receiver`, receipts to `queue`; an error is returned."""
    if header.kind == data:
        nbytes = len(payload)
        if (place := frames.decode_place(header, payload)) is not None:
            nbytes = 0 if header.flags & EMPTY else place.nbytes
        queue.received(nbytes, header.received)
        receiver.data(header, payload, place)
    elif header.kind == Kind.ACK:
        if payload:
            raise ProtocolError(f"an ACK must have no payload, got {len(payload)} bytes")
        queue.acked(header.received)
    elif header.kind == Kind.BEAT:
        pass
    elif header.kind in _NOTICES:
        receiver.control(header, payload)
    elif header.kind == Kind.ERROR:
        return frames.decode_error(header, payload)
    else:
        raise not_expected(header, data)
    return None


def not_expected(header: Header, data: Kind) -> ProtocolError:
    """The error for a frame of the wrong kind in a direction whose data frames are of kind `data`."""
    return ProtocolError(f"kind of a frame must be {data.name}, ACK or ERROR here, got {Kind(header.kind).name}")


def write_shared(header: Header, payload: memoryview | None, target: Target) -> tuple[Header, bytes]:
    """Writes a slice to its `target` in shared memory; returns header and payload of the frame that says where."""
    if payload is not None:
        np.copyto(target.memory, np.frombuffer(payload, np.uint8))
    return frames.shared(header, target.place)


# Over gRPC: frames as messages


def outgoing(queue: SendQueue) -> Iterator[bytes]:
    """Yields the messages to send until the queue is closed; raises the error with which it fails."""
    while (taken := queue.take()) is not None:
        item = taken.item
        if item is None:
            yield frames.encode(Header(Kind.ACK, received=taken.received))
        elif isinstance(item, bytes):
            yield item
        elif item.frame is not None:
            yield item.frame
        else:
            header = item.header._replace(received=taken.received)
            if item.target is not None:
                yield frames.encode(*write_shared(header, item.payload, item.target))
            else:
                yield frames.encode(header, item.encoding.data() if item.encoding else item.payload or b"")
        item = taken = None  # frees the payload while waiting for the next


def receive(messages: Iterable[bytes], data: Kind, queue: SendQueue, receiver: Receiver) -> TfpsError | None:
    """Takes incoming frames of a stream to its end, or to the error that the other end sends, which it returns."""
    for message in messages:
        queue.heard()
        header, payload = frames.decode(message)
        del message
        if (error := take(header, payload, data, queue, receiver)) is not None:
            return error
        del payload  # frees its memory for the next message
    return None


_HELLO = struct.Struct("<4sHHHI")  # magic, version, bytes of the job token and of the incarnation, rank; then these two
_MAGIC, _VERSION, _MAX_INCARNATION_BYTES = b"tfps", 4, 256
_LINGER_S, _UNREAD, _MAX_UNREAD = 1.0, 4096, 64 * 1024  # seconds and bytes that a refused connection may still send
_ACK = Header(Kind.ACK)
_NOTHING = memoryview(b"")
_IDLE_S = 5e-4  # a longer wait for data means an idle link
_LINUX = ("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)  # s, s, -, ms
# TCP doubles the time after which it sends again: a network that is back after 3.1 s would be used after 6.3 s, when
# the other end is taken for lost (SILENT_S). Linux has a bound for that time from 6.15 on; `socket` has no name for it.
RTO_MAX_MS = 44, 1000
_WAIT_ALL, _DO_NOT_WAIT = socket.MSG_WAITALL, getattr(socket, "MSG_DONTWAIT", 0)
_NOT_SENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", None)
PART_S, SLOW_PART_S = 0.5e-3, 3e-3  # link time of one part, and of one that is larger to save CPU
UNSENT_S = 0.75e-3  # link time of what the kernel holds unsent (TCP_NOTSENT_LOWAT)
MIN_PART_BYTES, CHEAP_PART_BYTES, MAX_PART_BYTES = 16 * 1024, 64 * 1024, 1024 * 1024
_LEAST_RATE_S = 5e-3  # shortest time to measure a rate
_RATE_SMOOTHING = 0.3
_GROW_AFTER = 16  # after so many parts in a row without a wait they grow
_MAX_RUN = 16  # parts that C code sends before the rate is looked at
LARGE_PARTS = 4  # times the size of a part, while nothing more urgent is expected
_UNLIMITED_AFTER = 4  # so many mean that nothing need be asked before the next


class BrokenConnectionError(OSError):
    """A data connection broke or ended. Any other OSError has nothing to do with it."""


class RateEstimator:
    """Sizes the parts: half a millisecond of the link; 64 KiB if that is more, in up to 3 ms (docs/transport.md).

    An urgent slice cannot overtake what the kernel holds, but too little there leaves the link idle.
    """

    def __init__(self) -> None:
        self.part_bytes = CHEAP_PART_BYTES
        self.free = 0  # parts taken in a row without a wait
        self._rate = 0.0  # bytes per second
        self._since_s: float | None = None  # the socket has been full at each check since
        self._nbytes = 0  # taken since

    @property
    def unsent_bytes(self) -> int:
        """The most that the kernel may hold unsent."""
        return int(self.part_bytes * UNSENT_S / PART_S)

    @property
    def large_part_bytes(self) -> int:
        """Bytes of a part while nothing more urgent is expected; the same where even the smallest takes long."""
        slow = self.part_bytes == MIN_PART_BYTES
        return self.part_bytes if slow else min(LARGE_PARTS * self.part_bytes, MAX_PART_BYTES)

    def idle(self) -> None:
        """Notes that there was nothing to send: that a socket takes what comes now and then does not show its rate."""
        self._since_s, self.free = None, 0

    def sent(self, nbytes: int, *, waited: bool, now_s: float, parts: int = 1) -> None:
        """Notes that the socket took `nbytes`, at once or after it `waited`."""
        if not waited:
            self._nbytes += nbytes
            self.free += parts
            if self.free >= _GROW_AFTER and self.part_bytes < MAX_PART_BYTES:
                self.free = 0
                self._set(2 * self.part_bytes)
            return
        self.free = 0
        if self._since_s is None:
            self._since_s, self._nbytes = now_s, nbytes
            return
        passed_s = now_s - self._since_s
        if passed_s < _LEAST_RATE_S:
            self._nbytes += nbytes
            return
        rate = self._nbytes / passed_s
        self._rate = rate if not self._rate else (1 - _RATE_SMOOTHING) * self._rate + _RATE_SMOOTHING * rate
        self._since_s, self._nbytes = now_s, nbytes
        self._set(max(self._rate * PART_S, min(CHEAP_PART_BYTES, self._rate * SLOW_PART_S)))

    def _set(self, nbytes: float) -> None:
        """Rounds to a power of two, so that small changes of the rate have no effect."""
        part = MIN_PART_BYTES
        while part < MAX_PART_BYTES and 1.5 * part < nbytes:
            part *= 2
        self.part_bytes = part


class Connection:
    """One end. `send` and `receive` each run on their own thread; `shut_down` and `close` may be called on any."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _LINUX:  # a host that vanishes without closing its connections is noticed after 30 s
            if (option := getattr(socket, name, None)) is not None:
                connected.setsockopt(socket.IPPROTO_TCP, option, value)
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # an older kernel
                connected.setsockopt(socket.IPPROTO_TCP, *RTO_MAX_MS)
        self._poll = select.poll()
        self._poll.register(connected, select.POLLOUT)
        self._rate = RateEstimator()
        self._unsent_bytes = 0
        self._limit_unsent()

    def send(self, queue: SendQueue) -> None:
        """Sends what `queue` gives out until it is closed or fails, which the other end is told."""
        try:
            while self._send_parts(queue):
                pass
        except TfpsError as error:
            self.tell(error)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def tell(self, error: TfpsError) -> None:
        """Sends `error` as the last frame; for the sending thread."""
        with contextlib.suppress(OSError):
            self._send(_whole(frames.encode_error(error)))

    def _send_parts(self, queue: SendQueue) -> bool:
        """Waits for something to send and sends what is most urgent; False once `queue` is closed."""
        if not queue.waiting:
            began_s = time.monotonic()
            if not queue.wait():
                return False
            if time.monotonic() - began_s > _IDLE_S:
                self._rate.idle()
        small, large = self._rate.part_bytes, self._rate.large_part_bytes
        if _native is not None and (run := queue.take_run(small, large, _MAX_RUN)) is not None:
            nbytes, parts, waited = self._send_run(queue, run)
        else:
            # A socket that has taken everything for a while is not asked first.
            if waited := not (self._rate.free >= _UNLIMITED_AFTER or self._poll.poll(0)):
                queue.prepare()
                self._poll.poll()
            # Chosen only now: something more urgent may have come while the socket was full.
            if (taken := queue.take_parts(large if _native is None and queue.settled else small)) is None:
                return False
            nbytes, parts = sum(each.end - each.begin for each in taken), 1
            waited |= self._send([buffer for each in taken for buffer in _encoded(each, each is not taken[-1])])
        self._rate.sent(nbytes, waited=waited, now_s=time.monotonic(), parts=parts)
        self._limit_unsent()
        return True

    def _send_run(self, queue: SendQueue, run: Run) -> tuple[int, int, bool]:
        """Sends several parts of one frame in C until something more urgent comes.

        Returns their bytes and number, and whether the socket was full meanwhile.
        """
        if run.entry[2].encoding is not None and not self._poll.poll(0):
            queue.prepare()
        head, payload = _encoded(run.parts, False)
        try:
            sent, waits = _native.send(self._socket.fileno(), head, payload, run.part_bytes, queue.overtaken)
        except OSError as error:
            raise BrokenConnectionError(*error.args) from error
        queue.ran(run, run.parts.begin + sent)
        return sent, -(-sent // run.part_bytes), waits > 0

    def _send(self, buffers: Sequence[bytes | memoryview]) -> bool:
        """Sends all of `buffers`; returns whether the socket was full meanwhile."""
        rest, full = list(buffers), False
        while rest:
            try:
                sent = self._socket.sendmsg(rest, [], _DO_NOT_WAIT)
            except BlockingIOError:
                full = True
                self._poll.poll()
                continue
            except OSError as error:
                raise BrokenConnectionError(*error.args) from error
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if sent:
                rest[0] = memoryview(rest[0])[sent:]
        return full

    def _limit_unsent(self) -> None:
        """Has the kernel hold what suits the rate: for large parts, too, or TCP would queue more in the network."""
        if self._rate.unsent_bytes != self._unsent_bytes and _NOT_SENT_LOWAT is not None:
            self._unsent_bytes = self._rate.unsent_bytes
            with contextlib.suppress(OSError):  # it broke, which the next call notices
                self._socket.setsockopt(socket.IPPROTO_TCP, _NOT_SENT_LOWAT, self._unsent_bytes)

    def receive(self, data: Kind, queue: SendQueue, receiver: Receiver) -> TfpsError | None:
        """As the function `receive`; BrokenConnectionError: the connection broke, maybe within a frame."""
        assembler = Assembler(receiver.memory)
        head = memoryview(bytearray(PART_BYTES))
        more = False  # whether `head` has been received already
        while more or self._fill(head, may_end=True):
            queue.heard()
            part = decode_part(head)
            payload, whole, more = _NOTHING, True, part.more
            if part.nbytes:
                payload = assembler.begin(part)
                so_far, more = self._receive_part(part, head, payload)
                whole = assembler.end(part, payload, so_far)
            elif more:
                self._fill(head)
            if whole and (error := take(part.header, payload, data, queue, receiver)) is not None:
                return error
            payload = _NOTHING  # frees its memory while waiting for the next
        return None

    def _receive_part(self, part: Part, head: memoryview, payload: memoryview) -> tuple[int, bool]:
        """Receives `part`, maybe more of its frame's `payload`; returns its end, and whether `head` is the next."""
        if _native is not None:
            try:
                return _native.receive(self._socket.fileno(), head, payload)
            except OSError as error:
                raise BrokenConnectionError(*error.args) from error
        so_far = part.offset + part.nbytes
        more = part.more or so_far < part.total  # within a frame there is always another part
        self._fill(payload[part.offset : so_far], head if more else None)
        return so_far, more

    def _fill(self, memory: memoryview, head: memoryview | None = None, *, may_end: bool = False) -> bool:
        """Receives `memory`, and then `head`; False if the connection ends before the first byte and `may_end`."""
        so_far, size = 0, len(memory)
        while so_far < size:
            rest = memory[so_far:] if so_far else memory
            try:
                if head is None:
                    count = self._socket.recv_into(rest, 0, _WAIT_ALL)
                else:
                    count = self._socket.recvmsg_into([rest, head], 0, _WAIT_ALL)[0]
            except OSError as error:
                raise BrokenConnectionError(*error.args) from error
            if not count:
                if may_end and not so_far:
                    return False
                raise BrokenConnectionError(f"the connection ended within a frame, after {so_far} of {size} bytes")
            so_far += count
        if head is not None and so_far < size + len(head):
            self._fill(head[so_far - size :])
        return True

    def shut_down(self) -> None:
        """Ends both directions; wakes sender and receiver."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """After both threads have ended."""
        self._socket.close()


def _encoded(part: Next, more: bool) -> tuple[bytes | memoryview, ...]:
    item, received, begin, end = part
    if item is None:
        return (encode_part(_ACK, 0, 0, 0, more, received),)
    if isinstance(item, bytes):
        return _whole(item, more)
    if item.target is not None:
        header, place = write_shared(item.header, item.payload, item.target)
        return encode_part(header, len(place), 0, len(place), more, received), place
    head = encode_part(item.header, item.nbytes, begin, end - begin, more, received)
    payload = item.payload if item.encoding is None else item.encoding.data()
    return (head, payload[begin:end]) if end > begin and payload is not None else (head,)


def _whole(frame: bytes, more: bool = False) -> tuple[bytes | memoryview, ...]:
    """An encoded frame as one part."""
    header, payload = frames.decode(frame)
    return encode_part(header, len(payload), 0, len(payload), more), payload


def dial(address: str, port: int, token: JobToken, incarnation: str, rank: int, timeout_s: float) -> Connection:
    """Opens a worker's data connection to `port` of the pserver at `address` (`host:port`); raises as `introduce`."""
    return Connection(introduce(address, port, token, incarnation, rank, timeout_s))


def introduce(address: str, port: int, token: JobToken, incarnation: str, rank: int, timeout_s: float) -> socket.socket:
    """The socket of an accepted connection, with `timeout_s`; raises the error with which the pserver refuses."""
    connected = socket.create_connection((split(address)[0], port), timeout_s)
    try:
        names = token.reveal(), incarnation.encode()
        connected.sendall(_HELLO.pack(_MAGIC, _VERSION, *map(len, names), rank) + b"".join(names))
        part = decode_part(_exactly(connected, PART_BYTES))
        if part.header.kind == Kind.ERROR:
            raise frames.decode_error(part.header, memoryview(_exactly(connected, part.total)))
        if part.header.kind != Kind.ACK or part.total:
            raise ProtocolError(f"a pserver must greet with ACK or ERROR, got {part}")
        return connected
    except BaseException as error:
        connected.close()
        if isinstance(error, ProtocolError):
            raise ConnectionRefusedError(f"what answers there is not a tfps pserver: {error}") from error
        raise


def greet(connected: socket.socket, token: JobToken, timeout_s: float) -> tuple[str, int]:
    """On a pserver: receives the client's incarnation and rank; OSError if none come within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    head = _exactly(connected, _HELLO.size, deadline_s)
    magic, version, token_bytes, size, rank = _HELLO.unpack(head)
    if magic != _MAGIC or token_bytes > MAX_TOKEN_BYTES or size > _MAX_INCARNATION_BYTES:
        raise ConnectError("the client that connected is not a tfps worker")
    if version != _VERSION:
        raise ConnectError(f"data connections are of version {_VERSION} here, the worker's of version {version}")
    if (why := token.refusal(_exactly(connected, token_bytes, deadline_s))) is not None:
        raise ConnectError(f"the pserver {why}")
    return _exactly(connected, size, deadline_s).decode("utf-8", "replace"), rank


def given_up(connected: socket.socket) -> bool:
    """Whether a client that has greeted has closed the connection since, as it waited too long for the answer."""
    connected.setblocking(False)
    try:
        return not connected.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False


def admit(connected: socket.socket) -> Connection:
    """Accepts a known worker; returns the pserver's end."""
    connected.settimeout(None)
    acknowledge(connected)
    return Connection(connected)


def acknowledge(connected: socket.socket) -> None:
    """Answers a greeting."""
    connected.sendall(encode_part(_ACK, 0, 0, 0))


def refuse(connected: socket.socket, error: TfpsError) -> None:
    """Sends the error, and closes once the other end has, within a second: unread data would reset the connection."""
    deadline_s, unread = time.monotonic() + _LINGER_S, 0
    with contextlib.suppress(OSError):
        connected.settimeout(_LINGER_S)
        connected.sendall(b"".join(_whole(frames.encode_error(error))))
        connected.shutdown(socket.SHUT_WR)
        while unread < _MAX_UNREAD and (left_s := deadline_s - time.monotonic()) > 0:
            connected.settimeout(left_s)
            if not (count := len(connected.recv(_UNREAD))):
                break
            unread += count
    connected.close()


def _exactly(connected: socket.socket, nbytes: int, deadline_s: float | None = None) -> bytes:
    """Receives `nbytes`, within the socket's timeout per call or by `deadline_s`."""
    found = b""
    while len(found) < nbytes:
        if deadline_s is not None:
            connected.settimeout(max(deadline_s - time.monotonic(), 1e-3))
        piece = connected.recv(nbytes - len(found))
        if not piece:
            raise ConnectionResetError("the connection ended during the greeting")
        found += piece
    return found
