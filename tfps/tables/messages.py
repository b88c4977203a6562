"""The payloads of frames about rows of a table: ids, rows in their order, and which of them an answer has.

Ids go sorted, as the first one and the differences of neighbours in 1, 2, 4 or 8 bytes, whatever the largest needs: a
batch of ids from a million takes 1 or 2 bytes for each, instead of 8.

Tested in tests/tables/test_messages.py.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfps.errors import ProtocolError
from tfps.exchange.codecs import Codec, Floats
from tfps.exchange.requests import Ids
from tfps.types import Buffer, DType

_IDS = struct.Struct("<IIq")  # how many, bytes of a difference, the first id
_PUSH = struct.Struct("<II")  # bytes of the step's scalars, bytes of the ids
_DIFFERENCES: dict[int, DType] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_ROWS_BYTES = 2 * 2**20  # of rows in one frame, about: what is more urgent need not wait for long
_ALIGNED = 8  # rows begin at a multiple of it, so that they are read where they are


def rows_of_frame(dim: int) -> int:
    """How many rows of `dim` floats one frame has at most."""
    return max(_ROWS_BYTES // (4 * dim), 1)


def encode_ids(ids: Ids) -> bytes:
    """The bytes of `ids`, int64 [n], ascending and each once."""
    if not len(ids):
        return _IDS.pack(0, 1, 0)
    # As unsigned numbers: the difference of two int64 may be above 2**63.
    differences = np.diff(ids.view(np.uint64))
    most = int(differences.max()) if len(differences) else 0
    size = next(size for size in _DIFFERENCES if most < 1 << (8 * size))
    packed: bytes = differences.astype(_DIFFERENCES[size]).tobytes()
    return _IDS.pack(len(ids), size, int(ids[0])) + packed


def decode_ids(data: Buffer) -> tuple[Ids, int]:
    """The ids at the beginning of `data`, and how many bytes they take. ProtocolError: these are none."""
    view = memoryview(data)
    if len(view) < _IDS.size:
        raise ProtocolError(f"ids of rows must have at least {_IDS.size} bytes, got {len(view)}")
    count, size, first = _IDS.unpack_from(view)
    end = _IDS.size + max(count - 1, 0) * size
    if size not in _DIFFERENCES or len(view) < end:
        raise ProtocolError(f"{count} ids in differences of {size} bytes must have {end} bytes, got {len(view)}")
    if not count:
        return np.empty(0, np.int64), end
    differences = np.frombuffer(view, _DIFFERENCES[size], count - 1, _IDS.size)
    ids = np.empty(count, np.uint64)
    ids[0] = np.int64(first).view(np.uint64)
    ids[1:] = differences
    np.cumsum(ids, out=ids)  # wraps, as the differences do
    found = ids.view(np.int64)
    if count > 1 and not (found[1:] > found[:-1]).all():
        raise ProtocolError("ids of rows must be ascending, each once")
    return found, end


class PushedRows(NamedTuple):
    """A part of what one rank adds to a table in a step."""

    scalars: bytes  # `StepScalars.pack`
    ids: Ids  # ascending
    gradients: Floats  # [len(ids), dim]


def encode_push(scalars: bytes, ids: Ids, gradients: Floats, codec: Codec | None) -> bytes:
    """The payload of a push: `gradients`, float32 [n, dim], of `ids`, as `codec` encodes them."""
    encoded_ids = encode_ids(ids)
    head = _PUSH.pack(len(scalars), len(encoded_ids)) + scalars + encoded_ids
    flat = np.ascontiguousarray(gradients).reshape(-1)
    values = flat.view(np.uint8) if codec is None else codec.encode(flat)
    return b"".join((head, bytes(-len(head) % _ALIGNED), values.data))


def decode_push(data: memoryview, dim: int, codec: Codec | None) -> PushedRows:
    """The reverse of `encode_push`. ProtocolError: it is not of rows of `dim` floats."""
    if len(data) < _PUSH.size:
        raise ProtocolError(f"a push of rows must have at least {_PUSH.size} bytes, got {len(data)}")
    scalars_bytes, ids_bytes = _PUSH.unpack_from(data)
    begin = _PUSH.size + scalars_bytes
    ids, size = decode_ids(data[begin : begin + ids_bytes])
    if size != ids_bytes:
        raise ProtocolError(f"ids of a push must take {size} bytes, got {ids_bytes}")
    first = begin + ids_bytes
    values = np.frombuffer(data[first + -first % _ALIGNED :], np.uint8)
    items = len(ids) * dim
    if codec is not None:
        gradients = np.empty(items, np.float32)
        codec.decode(values, gradients)
    elif values.size != 4 * items:
        raise ProtocolError(f"{len(ids)} rows of {dim} floats must have {4 * items} bytes, got {values.size}")
    else:
        gradients = values.view(np.float32)
    return PushedRows(bytes(data[_PUSH.size : begin]), ids, gradients.reshape(len(ids), dim))


def encode_some(chosen: NDArray[np.bool_], rows: Floats) -> bytes:
    """The payload of an answer with the `rows` of the ids that are `chosen`, of all that were asked for."""
    mask = np.packbits(chosen)
    values = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    return b"".join((mask.data, bytes(-mask.size % _ALIGNED), values.data))


def decode_some(data: memoryview, asked: int, dim: int) -> tuple[NDArray[np.bool_], Floats]:
    """The reverse of `encode_some`: which of so many ids, and their rows [n, dim]."""
    size = -(-asked // 8)
    if len(data) < size:
        raise ProtocolError(f"an answer to {asked} ids must say in {size} bytes which it has, got {len(data)} bytes")
    chosen = np.unpackbits(np.frombuffer(data, np.uint8, size), count=asked).view(np.bool_)
    return chosen, decode_rows(data[size + -size % _ALIGNED :], int(chosen.sum()), dim)


def decode_plain_ids(data: bytes) -> Ids:
    """Ids in any order, of 8 bytes each. ProtocolError: these are none."""
    if len(data) % 8:
        raise ProtocolError(f"ids of rows must have 8 bytes each, got {len(data)} bytes")
    return np.frombuffer(data, "<i8").astype(np.int64)


def decode_rows(data: memoryview, count: int, dim: int) -> Floats:
    """`count` rows of `dim` floats, [count, dim], where they are."""
    if len(data) != 4 * count * dim:
        raise ProtocolError(f"{count} rows of {dim} floats must have {4 * count * dim} bytes, got {len(data)}")
    return np.frombuffer(data, np.float32).reshape(count, dim)
