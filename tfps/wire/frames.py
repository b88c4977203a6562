"""The byte format of exchange frames and of their parts, known only here; documented in `protos/tfps.proto`."""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from tfps import errors
from tfps.config import MAX_SLICE_BYTES
from tfps.errors import ProtocolError, TfpsError
from tfps.wire.shared_memory import Place

_LAYOUT = struct.Struct("<BBHIIIQQ")  # kind, flags, generation, bucket, index, priority, step, received
HEADER_BYTES = _LAYOUT.size
MAX_FRAME_BYTES = HEADER_BYTES + MAX_SLICE_BYTES
_MAX_ERROR_BYTES = 64 * 1024

EMPTY = 1  # flag of a push: this rank contributes nothing
LAST = 2  # flag of a gather: no more pieces of this step follow
SHARED = 4  # flag of a slice: the payload is in the worker's memory, the frame says where
UNCODED = COMPLETE = 8  # flag of a slice of a bucket with a codec; of an answer with rows: it has all of them
LOOKUP = 16  # flag of a push to a table: it asks for rows
ENDED, SUSPECTED = 1, 2  # step of a LOST: its program has ended, or it may be alive; else 0
_ALL_FLAGS = EMPTY | LAST | SHARED | UNCODED | LOOKUP
_PLACE = struct.Struct("<QQ")


class Kind(enum.IntEnum):
    """What a frame is."""

    PUSH = 1
    REPLY = 2
    ACK = 3
    ERROR = 4
    LAYOUT = 5
    TRACE = 6
    SCALARS = 8
    BEAT = 9
    RANKS = 10
    LOST = 11
    ADMITTED = 12
    READY = 13
    AWAITED = 14
    OFFER = 15
    RECEIVED = 16


class Header(NamedTuple):
    """The header of a frame.

    An ACK uses only `received`, an ERROR `index` (a code), a TRACE `step` (number of the capture) and `index` (1
    begins, 0 ends), SCALARS `bucket` and `step`, RANKS `generation`, LOST `index` (a rank) and `step` (how), ADMITTED
    `index` (how many of its ranks took part before), AWAITED `bucket` and `step`, other control frames none.
    """

    kind: int
    flags: int = 0
    bucket: int = 0
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which nobody needs
    priority: int = 0
    step: int = 0
    received: int = 0  # payload bytes that the sender of this frame has received so far on the other stream
    generation: int = 0  # of a REPLY: the number of the set of ranks whose pushes are in it; see RankSets


BEAT = _LAYOUT.pack(Kind.BEAT, *[0] * 7)  # a sign of life

_KINDS = frozenset(Kind)
_CODES: dict[int, type[TfpsError]] = {  # part of the protocol: never change a number
    1: errors.ConfigError,
    2: errors.ConnectError,
    3: errors.MismatchError,
    4: errors.ProtocolError,
    5: errors.WaitTimeoutError,
    6: errors.WorkerLostError,
    7: errors.PserverLostError,
    8: errors.ClosedError,
    9: errors.UnsupportedError,
    10: errors.InterruptError,
    11: errors.NonFiniteError,
    12: errors.JoinError,
}


def encode(header: Header, payload: bytes | memoryview = b"") -> bytes:
    """One message: header and payload, copied once."""
    return b"".join((_pack(header), payload))


def _pack(header: Header, received: int | None = None) -> bytes:
    kind, flags, bucket, index, priority, step, own, generation = header
    return _LAYOUT.pack(kind, flags, generation, bucket, index, priority, step, own if received is None else received)


def shared(header: Header, place: Place) -> tuple[Header, bytes]:
    """Header and payload of a message for a slice whose payload has been written to `place`."""
    return header._replace(flags=header.flags | SHARED), _PLACE.pack(*place)


def decode_place(header: Header, payload: memoryview) -> Place | None:
    """The place of a shared slice; None if it is in the payload."""
    if not header.flags & SHARED:
        return None
    if len(payload) != _PLACE.size:
        raise ProtocolError(f"the place of a shared slice must have {_PLACE.size} bytes, got {len(payload)}")
    return Place(*_PLACE.unpack(payload))


def decode(message: bytes) -> tuple[Header, memoryview]:
    """Header and payload (a view, not a copy) of a message from the other end."""
    if not HEADER_BYTES <= len(message) <= MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame must have {HEADER_BYTES} to {MAX_FRAME_BYTES} bytes, got {len(message)}")
    return _unpack(message), memoryview(message)[HEADER_BYTES:]


def _unpack(data: bytes | bytearray | memoryview) -> Header:
    kind, flags, generation, bucket, index, priority, step, received = _LAYOUT.unpack_from(data)
    if kind not in _KINDS:
        raise ProtocolError(f"kind of a frame must be one of {', '.join(f'{k} ({k.name})' for k in Kind)}, got {kind}")
    if flags & ~_ALL_FLAGS:
        raise ProtocolError(f"unknown flags of a frame must be 0, got flags {flags}")
    return Header(kind, flags, bucket, index, priority, step, received, generation)


def encode_ranks(number: int, ranks: Collection[int]) -> bytes:
    """RANKS: `number` of a REPLY means these ranks."""
    return encode(Header(Kind.RANKS, generation=number), np.asarray(sorted(ranks), "<u4").tobytes())


def encode_admitted(before: Collection[int], present: Collection[int]) -> bytes:
    """ADMITTED: the ranks `present` take part from now on, of whom those `before` did already."""
    ranks = [*sorted(before), *sorted(set(present).difference(before))]
    return encode(Header(Kind.ADMITTED, index=len(before)), np.asarray(ranks, "<u4").tobytes())


def pack_counts(counts: Sequence[int]) -> bytes:
    """The payload of a RECEIVED: how many results of each bucket have come, at one worker or at all."""
    return np.asarray(counts, "<u8").tobytes()


def unpack_counts(payload: memoryview) -> tuple[int, ...]:
    """The reverse of `pack_counts`."""
    if len(payload) % 8:
        raise ProtocolError(f"RECEIVED must have 8 bytes for each bucket, got {len(payload)} bytes")
    return tuple(np.frombuffer(payload, "<u8").tolist())


def decode_ranks(payload: memoryview) -> tuple[int, ...]:
    """The ranks in a RANKS or ADMITTED frame."""
    if not len(payload) or len(payload) % 4:
        raise ProtocolError(f"RANKS must have 4 bytes for each rank, got {len(payload)} bytes")
    return tuple(np.frombuffer(payload, "<u4").tolist())


def error_code(error: TfpsError) -> int:
    """The number of the error's class; 0 for the base class."""
    return next((code for code, kind in _CODES.items() if isinstance(error, kind)), 0)


def error_from(code: int, text: str) -> TfpsError:
    """The error of a received code; the base class if unknown (the other end is newer)."""
    return _CODES.get(code, TfpsError)(text)


def encode_error(error: TfpsError) -> bytes:
    """An ERROR frame, the last one on a stream."""
    text = str(error).encode("utf-8", "replace")[:_MAX_ERROR_BYTES]
    return encode(Header(Kind.ERROR, index=error_code(error)), text)


def decode_error(header: Header, payload: memoryview) -> TfpsError:
    """The error in an ERROR frame."""
    return error_from(header.index, bytes(payload).decode("utf-8", "replace"))


# Parts: on a data connection more urgent frames go in between. Parts of one frame come in order, those of several may
# alternate. A part that is sent together with the next says so: its payload and the next header can be received at
# once, as system calls are what small slices cost most.

_REST = struct.Struct("<III")  # payload bytes of the frame, where this part begins, bytes of this part
PART_BYTES = HEADER_BYTES + _REST.size
_MORE = 2**31  # in the bytes of a part: the next part is sent together with it
_MAX_OPEN = 4096  # incomplete frames; at most one per priority level

Memory = Callable[[Header, int], "memoryview | None"]  # where a frame's payload belongs, if known


class Part(NamedTuple):
    """A part of a frame: bytes `offset` to `offset + nbytes` of its `total` of payload; `more`: another one follows."""

    header: Header
    total: int
    offset: int
    nbytes: int
    more: bool = False


def encode_part(
    header: Header, total: int, offset: int, nbytes: int, more: bool = False, received: int | None = None
) -> bytes:
    """The bytes that precede the payload of a `Part`; with `received` instead of the header's if given."""
    return _pack(header, received) + _REST.pack(total, offset, nbytes | _MORE if more else nbytes)


def decode_part(data: bytes | bytearray | memoryview) -> Part:
    """The reverse of `encode_part`."""
    header = _unpack(data)
    total, offset, nbytes = _REST.unpack_from(data, HEADER_BYTES)
    if more := nbytes >= _MORE:
        nbytes -= _MORE
    if total > MAX_SLICE_BYTES:
        raise ProtocolError(f"a frame must have at most {MAX_SLICE_BYTES} payload bytes, got {total}")
    if offset + nbytes > total or (nbytes == 0 and total > 0):
        raise ProtocolError(f"a part must lie within its frame of {total} bytes, got {nbytes} bytes at {offset}")
    return Part(header, total, offset, nbytes, more)


class Assembler:
    """Assembles frames from parts. `memory` is called once per frame; None: memory is allocated. For one thread."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._open: dict[tuple[int, int, int, int], tuple[memoryview, int]] = {}  # payload and bytes received

    def begin(self, part: Part) -> memoryview:
        """The payload of the frame whose next part is `part`; call `end` once that is written to its place."""
        header, total, offset, nbytes, _ = part
        if nbytes == total:  # all in one part
            if self._open and _key(header) in self._open:
                raise ProtocolError(f"the next part of a frame must not begin it again, got {nbytes} of {total} bytes")
            payload = self._payload(header, total)
            if len(payload) != total:
                raise ProtocolError(f"a frame must have {len(payload)} payload bytes, got {total}")
            return payload
        key = _key(header)
        found = self._open.get(key)
        if found is None:
            if offset:
                raise ProtocolError(f"the first part of a frame must begin at byte 0, got one at {offset}")
            if len(self._open) >= _MAX_OPEN:
                raise ProtocolError(f"at most {_MAX_OPEN} frames may be under way at a time")
            found = self._open[key] = self._payload(header, total), 0
        payload, so_far = found
        if len(payload) != total or offset != so_far:
            raise ProtocolError(
                f"the next part of a frame must begin at byte {so_far} of {len(payload)}, got {offset} of {total}"
            )
        return payload

    def _payload(self, header: Header, nbytes: int) -> memoryview:
        memory = self._memory(header, nbytes)
        return np.empty(nbytes, np.uint8).data if memory is None else memory

    def end(self, part: Part, payload: memoryview, so_far: int) -> bool:
        """Notes that bytes 0 to `so_far` of `part`'s frame are there; whether these are all of it."""
        if so_far < part.total:
            self._open[_key(part.header)] = payload, so_far
            return False
        if part.nbytes < part.total:
            del self._open[_key(part.header)]
        return True


def _key(header: Header) -> tuple[int, int, int, int]:
    return header.kind, header.bucket, header.index, header.step
