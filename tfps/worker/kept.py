"""Puts and gets what pservers keep of buckets with an update.

Tested in tests/worker/test_kept.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tfps.errors import ProtocolError
from tfps.exchange.interface import Payload, as_bytes
from tfps.protos import tfps_pb2 as pb
from tfps.types import Array
from tfps.wire.control import KEPT_PIECE_BYTES
from tfps.worker.questions import Questions


class _Piece(NamedTuple):
    """Bytes `begin` to `end` of a slice, which are at `at` in the part of the bucket."""

    pserver: int
    slice: int
    begin: int
    end: int
    at: int


class Kept(Questions):
    """Buckets with an update are never cut anew, and one call is for at most `KEPT_PIECE_BYTES`. See `Questions`."""

    def put(self, bucket: int, number: int, begin: int, values: Payload) -> None:
        """See `Exchange.put`."""
        view = as_bytes(values) or memoryview(b"")
        for piece in self._pieces(bucket, begin, len(view)):
            request = pb.PutRequest(
                incarnation=self._membership.incarnation,
                rank=self._membership.rank,
                bucket=bucket,
                slice=piece.slice,
                number=number,
                begin=piece.begin,
                values=bytes(view[piece.at : piece.at + piece.end - piece.begin]),
            )
            self._pservers[piece.pserver].call("Put", request, self._timeout_s)

    def get(self, bucket: int, number: int, begin: int, nbytes: int) -> Array:
        """See `Exchange.get`."""
        found = np.empty(nbytes, np.uint8)
        for piece in self._pieces(bucket, begin, nbytes):
            request = pb.GetRequest(
                incarnation=self._membership.incarnation,
                rank=self._membership.rank,
                bucket=bucket,
                slice=piece.slice,
                number=number,
                begin=piece.begin,
                nbytes=piece.end - piece.begin,
            )
            values = self._pservers[piece.pserver].call("Get", request, self._timeout_s).values
            if len(values) != piece.end - piece.begin:
                raise ProtocolError(f"Get must return {piece.end - piece.begin} bytes, got {len(values)}")
            found[piece.at : piece.at + len(values)] = np.frombuffer(values, np.uint8)
        return found

    def _pieces(self, bucket: int, begin: int, nbytes: int) -> Iterator[_Piece]:
        self._check_open()
        if not 0 <= bucket < len(self._buckets):
            raise ProtocolError(f"bucket must be one of the {len(self._buckets)} declared ones, got {bucket}")
        target = self._buckets[bucket]
        if begin < 0 or begin + nbytes > target.spec.nbytes:
            raise ProtocolError(
                f"bucket '{target.spec.name}' has {target.spec.nbytes} bytes, got {begin} to {begin + nbytes}"
            )
        for index, (part, owner) in enumerate(zip(target.cutting.slices, target.cutting.owners, strict=True)):
            first, last = max(begin, part.offset), min(begin + nbytes, part.offset + part.nbytes)
            for start in range(first, last, KEPT_PIECE_BYTES):
                end = min(start + KEPT_PIECE_BYTES, last)
                yield _Piece(owner, index, start - part.offset, end - part.offset, start - begin)
