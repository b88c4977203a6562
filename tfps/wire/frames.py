"""The byte format of exchange frames, known only here; documented in `protos/tfps.proto`."""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from tfps import errors
from tfps.config import MAX_SLICE_BYTES
from tfps.errors import ProtocolError, TfpsError
from tfps.wire.shared_memory import Place

_LAYOUT = struct.Struct("<BBHIIIQQ")  # kind, flags, reserved, bucket, index, priority, step, received
HEADER_BYTES = _LAYOUT.size
MAX_FRAME_BYTES = HEADER_BYTES + MAX_SLICE_BYTES
_MAX_ERROR_BYTES = 64 * 1024

EMPTY = 1  # flag of a push: this rank contributes nothing
LAST = 2  # flag of a gather: no more pieces of this step follow
SHARED = 4  # flag of a slice: the payload is in the worker's memory, the frame says where
WHOLE = 8  # flag of a slice of a bucket with a codec: it is not encoded
_ALL_FLAGS = EMPTY | LAST | SHARED | WHOLE
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


class Header(NamedTuple):
    """The header of a frame.

    An ACK uses only `received`, an ERROR `index` (a code), a LAYOUT none; a TRACE `step` (number of the capture) and
    `index` (1 begins, 0 ends); SCALARS `bucket` and `step`.
    """

    kind: int
    flags: int = 0
    bucket: int = 0
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which nobody needs
    priority: int = 0
    step: int = 0
    received: int = 0  # payload bytes that the sender of this frame has received so far on the other stream


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
}


def encode(header: Header, payload: bytes | memoryview = b"") -> bytes:
    """One message: header and payload, copied once."""
    return b"".join((pack_header(header), payload))


def pack_header(header: Header, received: int | None = None) -> bytes:
    """The first `HEADER_BYTES` of a frame, with `received` instead of the header's if given."""
    kind, flags, bucket, index, priority, step, own = header
    return _LAYOUT.pack(kind, flags, 0, bucket, index, priority, step, own if received is None else received)


def encode_shared(header: Header, place: Place) -> bytes:
    """A message for a slice whose payload has been written to `place`."""
    return encode(header._replace(flags=header.flags | SHARED), _PLACE.pack(*place))


def decode_place(header: Header, payload: memoryview) -> Place | None:
    """The place of a shared slice; None if it is in the payload.

    Raises:
        ProtocolError: the payload is not a place.
    """
    if not header.flags & SHARED:
        return None
    if len(payload) != _PLACE.size:
        raise ProtocolError(f"the place of a shared slice must have {_PLACE.size} bytes, got {len(payload)}")
    return Place(*_PLACE.unpack(payload))


def decode(message: bytes) -> tuple[Header, memoryview]:
    """Header and payload (a view, not a copy) of a message from the other end.

    Raises:
        ProtocolError: the message is truncated, too long, or of an unknown kind.
    """
    if not HEADER_BYTES <= len(message) <= MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame must have {HEADER_BYTES} to {MAX_FRAME_BYTES} bytes, got {len(message)}")
    return unpack_header(message), memoryview(message)[HEADER_BYTES:]


def unpack_header(data: bytes | bytearray | memoryview) -> Header:
    """The reverse of `pack_header`; ignores what follows in `data`.

    Raises:
        ProtocolError: the kind or a flag is unknown.
    """
    kind, flags, reserved, bucket, index, priority, step, received = _LAYOUT.unpack_from(data)
    if kind not in _KINDS:
        raise ProtocolError(f"kind of a frame must be one of {', '.join(f'{k} ({k.name})' for k in Kind)}, got {kind}")
    if flags & ~_ALL_FLAGS or reserved:
        raise ProtocolError(f"unknown flags of a frame must be 0, got flags {flags} and reserved {reserved}")
    return Header(kind, flags, bucket, index, priority, step, received)


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
