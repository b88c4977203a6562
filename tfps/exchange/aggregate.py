"""Combines the contributions of all ranks, step by step. No I/O and no locks: the caller holds the slice's."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tfps.errors import ProtocolError
from tfps.exchange.codecs import ITEM_BYTES, Codec
from tfps.membership.view import View
from tfps.types import Array, Buffer, DType

_PIECE_BYTES = 256  # that a piece of a gather takes beside its payload
_INDICES_SIZE = struct.Struct("<Q")


class Round:
    """The ranks that have contributed to the current step, and those of `view` that have not; `label`: for messages."""

    def __init__(self, label: str, view: View, step: int) -> None:
        self.label, self.step = label, step
        self.view = view
        self.arrived: set[int] = set()

    @property
    def view(self) -> View:
        """Who is awaited. One that has contributed and is in it no more counts."""
        return self._view

    @view.setter
    def view(self, view: View) -> None:
        self._view, self._awaited = view, frozenset(view.ranks)

    def missing(self) -> list[int]:
        """The ranks that have not contributed yet."""
        return [rank for rank in self.view.ranks if rank not in self.arrived]

    @property
    def complete(self) -> bool:
        """Whether all ranks have contributed."""
        return self.arrived >= self._awaited

    def _check(self, rank: int, step: int) -> None:
        if step != self.step:
            raise ProtocolError(f"step of {self.label} must be {self.step}, got {step}")
        if rank in self.arrived:
            raise ProtocolError(f"{self.label} must be pushed once in step {step}, got it twice")

    def _advance(self) -> None:
        self.step += 1
        self.arrived = set()


@dataclass(frozen=True, slots=True)
class SliceFormat:
    """How the numbers of a slice travel: as they are, or float32 encoded by a codec."""

    label: str  # for messages
    dtype: DType
    nbytes: int
    codec: Codec | None = None

    def part_bytes(self, uncoded: bool) -> int:
        """Size of a contribution, encoded unless it is `uncoded`."""
        return self.nbytes if uncoded or self.codec is None else self.codec.wire_bytes(self.nbytes // ITEM_BYTES)

    def part(self, payload: memoryview, uncoded: bool) -> Array:
        """A contribution as an array: of uint8 if it is encoded."""
        return np.frombuffer(payload, self.dtype if uncoded or self.codec is None else np.uint8)

    def decoded(self, part: Array) -> tuple[Array, bool]:
        """The numbers of `part`, and whether they are in new memory."""
        if self.codec is None or part.dtype == self.dtype:
            return part, False
        numbers = np.empty(self.nbytes // ITEM_BYTES, self.dtype)
        self.codec.decode(part, numbers)
        return numbers, True


class SumRound(Round):
    """Adds one slice over all ranks.

    Contributions are kept by reference and added as they arrive or, if `deterministic`, in rank order once all are
    there. An encoded one that comes first is added with the second: it takes less memory until then. The sum goes into
    the first of two that may be written to, or into new memory; never into memory that its rank may write to: that does
    so when it has the sum, and others may still be sent it.

    In an **uncoded** step of a format with a codec no contribution is encoded: they are the ranks' residuals.
    """

    def __init__(self, format_: SliceFormat, view: View, deterministic: bool, step: int = 0) -> None:
        super().__init__(format_.label, view, step)
        self.format = format_
        self.uncoded = False  # known once a rank has contributed
        self._deterministic = deterministic
        self._parts: dict[int, tuple[Array, bool]] = {}
        self._sum: Array | None = None
        self._owned = False  # whether _sum may be added to in place

    def add(self, rank: int, step: int, part: Array | None, *, uncoded: bool = False, owned: bool = False) -> None:
        """Takes what `rank` contributes, if anything: its residual if `uncoded`; it may be written to if `owned`."""
        self._check(rank, step)
        if not self.arrived:
            self.uncoded = uncoded
        elif uncoded != self.uncoded:
            one, other = ("collects", "trains") if uncoded else ("trains", "collects")
            raise ProtocolError(
                f"{self.label}, step {self.step}: rank {rank} {one} while rank {min(self.arrived)} {other}: residuals "
                "of compression are collected when a checkpoint is saved or restored; do so on every rank, or "
                "call strategy.combine() on every rank before"
            )
        codec = None if uncoded else self.format.codec
        if part is not None and codec is not None:
            codec.check(part, self.format.nbytes // ITEM_BYTES)  # decoded later, when it is not known whose it is
        self.arrived.add(rank)
        if part is None:
            return
        if self._deterministic or (codec is not None and not self.contributed):
            self._parts[rank] = part, owned
        else:
            self._add_kept()
            self._add(part, owned)

    @property
    def contributed(self) -> bool:
        """Whether any rank has contributed to the current step more than its presence."""
        return self._sum is not None or bool(self._parts)

    def finish(self) -> memoryview:
        """The bytes of the completed step's sum: those of the only contribution if there is one, zeros if none."""
        self._add_kept()
        result, owned = self._sum, self._owned
        self._sum, self._owned = None, False
        self._advance()
        if result is None:
            return memoryview(bytes(self.format.nbytes))
        if result.flags.writeable and not owned and self.view.workers > 1:
            result = result.copy()
        return result.view(np.uint8).data

    def _add_kept(self) -> None:
        for rank in sorted(self._parts):
            self._add(*self._parts.pop(rank))

    def _add(self, part: Array, owned: bool) -> None:
        codec = self.format.codec
        if codec is not None and not self.uncoded:
            if self._sum is not None:  # decoded, so it is ours
                codec.decode(part, self._sum, add=True)
                return
            part, owned = self.format.decoded(part)
        if self._sum is None:
            self._sum, self._owned = part, owned
        else:
            out = self._sum if self._owned else part if owned else np.empty_like(part)
            with np.errstate(all="ignore"):  # training that diverges is no business of a pserver's log
                self._sum, self._owned = np.add(self._sum, part, out=out), True


class GatherRound(Round):
    """Collects one payload of any size from every rank, each cut into pieces of `slice_bytes` (the last one shorter).

    The result is the payloads' sizes, one little-endian u64 per rank that has contributed, followed by the payloads in
    rank order.
    """

    def __init__(self, label: str, view: View, slice_bytes: int, most_bytes: int = 2**63, step: int = 0) -> None:
        super().__init__(label, view, step)
        self.slice_bytes, self._most_bytes = slice_bytes, most_bytes
        self._kept_bytes = 0  # by the pieces of the current step
        self._pieces: dict[int, list[memoryview]] = {}

    def add(self, rank: int, step: int, index: int, piece: memoryview, last: bool) -> None:
        """Takes the next piece of `rank`."""
        self._check(rank, step)
        pieces = self._pieces.setdefault(rank, [])
        if index != len(pieces):
            raise ProtocolError(f"index of {self.label} must be {len(pieces)}, got {index}")
        if len(piece) > self.slice_bytes or (not last and len(piece) < self.slice_bytes):
            rule = f"at most {self.slice_bytes}" if last else f"{self.slice_bytes}"
            raise ProtocolError(f"a piece of {self.label} must have {rule} bytes, got {len(piece)}")
        self._kept_bytes += len(piece) + _PIECE_BYTES
        if self._kept_bytes > self._most_bytes:
            raise ProtocolError(
                f"the pieces of {self.label} in step {step} must fit into the {self._most_bytes} bytes that a pserver "
                f"may use (--max-memory), got {self._kept_bytes} bytes"
            )
        pieces.append(piece)
        if last:
            self.arrived.add(rank)

    def finish(self) -> memoryview:
        """The bytes of the completed step's result."""
        result = join_gathered([self._pieces[rank] for rank in sorted(self.arrived)])
        self._pieces, self._kept_bytes = {}, 0
        self._advance()
        return memoryview(result)


def join_gathered(parts: Sequence[Sequence[Buffer]]) -> bytes:
    """The result of a gather: the payloads' sizes, and the payloads in rank order, each given in pieces (bytes)."""
    sizes = struct.pack(f"<{len(parts)}Q", *(sum(map(len, pieces)) for pieces in parts))
    return b"".join([sizes, *(piece for pieces in parts for piece in pieces)])


def split_gathered(result: memoryview, ranks: Sequence[int]) -> dict[int, Buffer]:
    """The payloads of `ranks` in the result of a gather, as views."""
    head = 8 * len(ranks)
    if len(result) < head:
        raise ProtocolError(f"a gather of {len(ranks)} workers must have at least {head} bytes, got {len(result)}")
    sizes = struct.unpack(f"<{len(ranks)}Q", result[:head])
    if sum(sizes) != len(result) - head:
        raise ProtocolError(f"the sizes in a gather must add up to {len(result) - head} bytes, got {sum(sizes)}")
    ends = list(itertools.accumulate(sizes, initial=head))
    return {rank: result[start:end] for rank, (start, end) in zip(ranks, itertools.pairwise(ends), strict=True)}


def pack_sparse(indices: Buffer, data: Buffer) -> bytes:
    """One rank's part of a gather: size of the indices in bytes, indices, data."""
    indices = memoryview(indices)
    return b"".join((_INDICES_SIZE.pack(indices.nbytes), indices, memoryview(data)))


def unpack_sparse(parts: Iterable[Buffer]) -> tuple[Array, Array]:
    """Indices and data of all ranks in rank order, each flat uint8."""
    indices, data = [np.empty(0, np.uint8)], [np.empty(0, np.uint8)]
    for view in (np.frombuffer(part, np.uint8) for part in parts):
        if len(view):
            end = _INDICES_SIZE.size + _INDICES_SIZE.unpack_from(view.data)[0]
            indices.append(view[_INDICES_SIZE.size : end])
            data.append(view[end:])
    return np.concatenate(indices), np.concatenate(data)
