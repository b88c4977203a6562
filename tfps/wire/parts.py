"""Frames on a data connection travel in parts, so that more urgent frames can go in between.

A part is its frame's header, a range of payload bytes (`Part`), and these bytes. Parts of one frame come in order;
those of several frames may alternate. Parts that are sent together say so, so that a payload and the next part's header
can be received together: system calls are what small slices cost most.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tfps.config import MAX_SLICE_BYTES
from tfps.errors import ProtocolError
from tfps.wire.frames import HEADER_BYTES, Header, pack_header, unpack_header

_REST = struct.Struct("<III")  # payload bytes of the frame, where this part begins, bytes of this part
PART_BYTES = HEADER_BYTES + _REST.size
_MORE = 2**31  # in the bytes of a part: the next part is sent together with it
_MAX_OPEN = 4096  # incomplete frames; at most one per priority level

_NOTHING = memoryview(b"")

Memory = Callable[[Header, int], "memoryview | None"]  # where a frame's payload belongs, if known


class Part(NamedTuple):
    """A part of a frame: bytes `offset` to `offset + nbytes` of its `total` of payload; `more`: another one follows."""

    header: Header
    total: int
    offset: int
    nbytes: int
    more: bool = False


def encode_part(part: Part) -> bytes:
    """The bytes that precede a part's payload."""
    header, total, offset, nbytes, more = part
    return pack_part(header, header.received, total, offset, nbytes, more)


def pack_part(header: Header, received: int, total: int, offset: int, nbytes: int, more: bool) -> bytes:
    """As `encode_part`, with `received` instead of the header's."""
    return pack_header(header, received) + _REST.pack(total, offset, nbytes | _MORE if more else nbytes)


def decode_part(data: bytes | bytearray | memoryview) -> Part:
    """The reverse of `encode_part`.

    Raises:
        ProtocolError: the header is malformed, or the part does not lie within its frame.
    """
    header = unpack_header(data)
    total, offset, nbytes = _REST.unpack_from(data, HEADER_BYTES)
    if more := nbytes >= _MORE:
        nbytes -= _MORE
    if total > MAX_SLICE_BYTES:
        raise ProtocolError(f"a frame must have at most {MAX_SLICE_BYTES} payload bytes, got {total}")
    if offset + nbytes > total or (nbytes == 0 and total > 0):
        raise ProtocolError(f"a part must lie within its frame of {total} bytes, got {nbytes} bytes at {offset}")
    return Part(header, total, offset, nbytes, more)


class Assembler:
    """Assembles frames from parts, where their payloads belong. For one thread.

    Args:
        memory: called for the first part of a frame with a payload. If it returns None, memory is allocated.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._open: dict[tuple[int, int, int, int], tuple[memoryview, int]] = {}  # payload and bytes received
        self._whole = _NOTHING  # the payload of a frame in one part

    def begin(self, part: Part) -> memoryview:
        """Where to write the bytes of `part`; call `end` once they are written.

        Raises:
            ProtocolError: it is not the next part of its frame, or too many frames are open.
        """
        header, total, nbytes = part.header, part.total, part.nbytes
        if nbytes == total:  # all in one part
            if self._open and _key(header) in self._open:
                raise ProtocolError(f"the next part of a frame must not begin it again, got {nbytes} of {total} bytes")
            self._whole = self._payload(header, total)
            if len(self._whole) != total:
                raise ProtocolError(f"a frame must have {len(self._whole)} payload bytes, got {total}")
            return self._whole
        key = _key(header)
        found = self._open.get(key)
        if found is None:
            if part.offset:
                raise ProtocolError(f"the first part of a frame must begin at byte 0, got one at {part.offset}")
            if len(self._open) >= _MAX_OPEN:
                raise ProtocolError(f"at most {_MAX_OPEN} frames may be under way at a time")
            found = self._open[key] = self._payload(header, total), 0
        payload, so_far = found
        if len(payload) != part.total or part.offset != so_far:
            raise ProtocolError(
                f"the next part of a frame must begin at byte {so_far} of {len(payload)}, got {part.offset} of "
                f"{part.total}"
            )
        return payload[part.offset : part.offset + part.nbytes]

    def _payload(self, header: Header, nbytes: int) -> memoryview:
        memory = self._memory(header, nbytes)
        return np.empty(nbytes, np.uint8).data if memory is None else memory

    def end(self, part: Part) -> memoryview | None:
        """The frame's payload, if `part` was its last."""
        if part.nbytes == part.total:
            whole, self._whole = self._whole, _NOTHING
            return whole
        key, so_far = _key(part.header), part.offset + part.nbytes
        payload, _ = self._open[key]
        if so_far < part.total:
            self._open[key] = payload, so_far
            return None
        del self._open[key]
        return payload


def _key(header: Header) -> tuple[int, int, int, int]:
    return header.kind, header.bucket, header.index, header.step
