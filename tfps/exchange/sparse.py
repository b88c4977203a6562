"""Packs a rank's rows of a sparse gradient into one payload of a gather."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from tfps.types import Array, Buffer

_INDICES_SIZE = struct.Struct("<Q")
_NO_BYTES = np.empty(0, np.uint8)


def pack_sparse(indices: Buffer, data: Buffer) -> bytes:
    """One rank's part of a gather: size of the indices in bytes, indices, data."""
    indices = memoryview(indices)
    return b"".join((_INDICES_SIZE.pack(indices.nbytes), indices, memoryview(data)))


def unpack_sparse(parts: Sequence[Buffer]) -> tuple[Array, Array]:
    """Indices and data of all ranks in rank order, each flat uint8."""
    indices, data = [], []
    for part in parts:
        view = np.frombuffer(part, np.uint8)
        if not len(view):
            continue
        end = _INDICES_SIZE.size + _INDICES_SIZE.unpack_from(part)[0]
        indices.append(view[_INDICES_SIZE.size : end])
        data.append(view[end:])
    if not data:
        return _NO_BYTES, _NO_BYTES
    return np.concatenate(indices), np.concatenate(data)
