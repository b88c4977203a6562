"""Codecs: how float32 slices become fewer bytes on the wire. The same numbers give the same bytes.

**Error feedback** (1-bit SGD, Seide et al., Interspeech 2014; EF-SignSGD, https://arxiv.org/abs/1901.09847): what a
codec could not express is its *residual*, added to the next step's numbers, so that it is late but not lost. The 16-bit
codecs round to nearest and have none.

**What is not finite is never lost.** The 16-bit codecs keep NaN and infinity, and `topk` sends them first. `int8` and
`onebit` send NaN for the whole block around one, whose residual stays as it was.
"""

from __future__ import annotations

import abc
import math
import threading
import weakref
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tfps.compression import NONE, kept_fraction
from tfps.errors import ConfigError, ProtocolError
from tfps.types import Array

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

PIECE = 64 * 1024  # numbers that are worked on at a time: 256 KiB; a multiple of all blocks
INT8_BLOCK, SIGN_BLOCK = 256, 1024  # numbers that share a scale
ITEM_BYTES = 4  # of a number that is not encoded
_LEAST_PEAK = 1e-30  # a block that has nothing larger is sent as zeros: 1 / scale would not be finite
_ROUND = np.float32(1.5 * 2**23)  # added to a number below 2**22, leaves it rounded to even in the low bits
_SIGNLESS, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_BFLOAT16_NAN = 0x7FC0


class _Scratch(threading.local):
    """A thread's memory for intermediate numbers."""

    def __init__(self) -> None:
        self.one: Floats = np.empty(PIECE, np.float32)
        self.two: Floats = np.empty(PIECE, np.float32)


_scratch = _Scratch()


class Codec(abc.ABC):
    """One codec, the same object for all who use one of its name; any thread."""

    name: str  # as in `Config.compression`
    feeds_back = False  # whether it leaves a residual

    @abc.abstractmethod
    def wire_bytes(self, items: int) -> int:
        """Size of so many encoded numbers; depends on nothing else."""

    def __str__(self) -> str:
        return self.name

    def encode(self, values: Floats, residual: Floats | None = None) -> Bytes:
        """Encodes flat `values` and the `residual` of the last time; leaves there what it cannot express now."""
        data = np.empty(self.wire_bytes(values.size), np.uint8)
        with np.errstate(all="ignore"):
            self._encode(values, residual if self.feeds_back else None, data)
        return data

    def check(self, data: Bytes, items: int) -> None:
        """Raises ProtocolError if `data` are not so many encoded numbers."""
        if data.size != (size := self.wire_bytes(items)):
            raise ProtocolError(f"{items} numbers encoded as {self.name} must have {size} bytes, got {data.size}")

    def decode(self, data: Bytes, out: Floats, *, add: bool = False) -> None:
        """Writes decoded `data` to `out`, or adds it; raises as `check`."""
        self.check(data, out.size)
        with np.errstate(all="ignore"):
            self._decode(data, out, add)

    @abc.abstractmethod
    def _encode(self, values: Floats, residual: Floats | None, data: Bytes) -> None: ...

    @abc.abstractmethod
    def _decode(self, data: Bytes, out: Floats, add: bool) -> None: ...


def _ranges(items: int, block: int = 1) -> Iterator[slice]:
    """Pieces of whole blocks, then the last block if it is shorter."""
    whole = items - items % block
    yield from (slice(begin, min(begin + PIECE, whole)) for begin in range(0, whole, PIECE))
    if whole < items:
        yield slice(whole, items)


class _Pieces(Codec):
    """A codec that decodes piece by piece."""

    bits: int  # of an encoded number, beside its scale
    block = 1  # numbers that have a scale in common

    def wire_bytes(self, items: int) -> int:
        return self._body_bytes(items)

    def _body_bytes(self, items: int) -> int:
        return -(-items * self.bits // 8)

    def _decode(self, data: Bytes, out: Floats, add: bool) -> None:
        for where in _ranges(out.size, self.block):
            target = out[where]
            decoded = _scratch.one[: target.size] if add else target
            self._decode_piece(data, out.size, where, decoded)
            if add:
                np.add(target, decoded, out=target)

    @abc.abstractmethod
    def _decode_piece(self, data: Bytes, items: int, where: slice, out: Floats) -> None:
        """Decodes numbers `where` of `items`."""


class _Bfloat16(_Pieces):
    """The upper half of a float32, rounded to nearest, ties to even."""

    name = "bfloat16"
    bits = 16

    def _encode(self, values: Floats, residual: Floats | None, data: Bytes) -> None:
        halves = data.view(np.uint16)
        for where in _ranges(values.size):
            piece = values[where]
            bits, rounded = piece.view(np.uint32), _scratch.one[: piece.size].view(np.uint32)
            np.right_shift(bits, 16, out=rounded)
            rounded &= 1
            rounded += bits
            rounded += 0x7FFF
            halves[where] = rounded.view(np.uint16)[1::2]
            if np.isnan(piece.max()):  # adding may have carried a NaN into the sign: GPUs make 0x7FFFFFFF
                halves[where][np.isnan(piece)] = _BFLOAT16_NAN

    def _decode_piece(self, data: Bytes, items: int, where: slice, out: Floats) -> None:
        bits = out.view(np.uint32)
        bits[...] = data.view(np.uint16)[where]
        bits <<= 16


class _Float16(_Pieces):
    """IEEE half precision; above 65504 infinity."""

    name = "float16"
    bits = 16

    def _encode(self, values: Floats, residual: Floats | None, data: Bytes) -> None:
        data.view(np.float16)[...] = values

    def _decode_piece(self, data: Bytes, items: int, where: slice, out: Floats) -> None:
        out[...] = data.view(np.float16)[where]


class _Blocks(_Pieces):
    """A codec with one scale per block: first all scales, then the body."""

    feeds_back = True

    def wire_bytes(self, items: int) -> int:
        return 4 * -(-items // self.block) + self._body_bytes(items)

    def _encode(self, values: Floats, residual: Floats | None, data: Bytes) -> None:
        for where in _ranges(values.size, self.block):
            numbers, own = self._blocks(values[where]), None
            two = self._blocks(_scratch.two[: numbers.size])
            if residual is not None:
                own = self._blocks(residual[where])
                numbers = np.add(numbers, own, out=self._blocks(_scratch.one[: numbers.size]))
            scale, body = self._of_piece(data, values.size, where)
            self._encode_blocks(numbers, two, scale, body)  # leaves in `two` what will be decoded
            if own is None:
                continue
            if np.isnan(scale).any():
                np.subtract(numbers, two, out=own, where=~np.isnan(scale)[:, None])
            else:
                np.subtract(numbers, two, out=own)

    def _decode_piece(self, data: Bytes, items: int, where: slice, out: Floats) -> None:
        scale, body = self._of_piece(data, items, where)
        self._decode_blocks(scale[:, None], body, self._blocks(out))

    def _blocks(self, numbers: Floats) -> Floats:
        """The numbers of a piece, a row for each block."""
        return numbers.reshape(-1, min(self.block, numbers.size))

    def _of_piece(self, data: Bytes, items: int, where: slice) -> tuple[Floats, Bytes]:
        """The scales and the body of a piece, which begins with a byte."""
        scales, end = -(-items // self.block), -(-where.stop // self.block)
        body = slice(self._body_bytes(where.start), self._body_bytes(where.stop))
        return data[: 4 * scales].view(np.float32)[where.start // self.block : end], data[4 * scales :][body]

    @abc.abstractmethod
    def _encode_blocks(self, numbers: Floats, two: Floats, scale: Floats, body: Bytes) -> None:
        """Writes the scales, NaN for a block that is not finite, and the body."""

    @abc.abstractmethod
    def _decode_blocks(self, scale: Floats, body: Bytes, out: Floats) -> None: ...


class _Int8(_Blocks):
    """Whole numbers from -127 to 127 times a scale: the largest number of the block over 127."""

    name = "int8"
    bits, block = 8, INT8_BLOCK

    def _encode_blocks(self, numbers: Floats, two: Floats, scale: Floats, body: Bytes) -> None:
        np.abs(numbers, out=two)
        peak = two.max(axis=1)  # NaN if there is one
        small = peak < _LEAST_PEAK
        inverse = 127 / peak
        np.divide(peak, 127, out=scale)
        inverse[small] = scale[small] = 0
        scale[~np.isfinite(peak)] = np.nan
        np.multiply(numbers, inverse[:, None], out=two)
        two += _ROUND
        body.view(np.int8)[...] = two.reshape(-1).view(np.int8)[::4]  # the low byte of each, as of a whole number
        two -= _ROUND
        two *= scale[:, None]

    def _decode_blocks(self, scale: Floats, body: Bytes, out: Floats) -> None:
        out[...] = body.view(np.int8).reshape(out.shape)
        out *= scale


class _OneBit(_Blocks):
    """The sign of each number times a scale: the mean size of the block's numbers."""

    name = "onebit"
    bits, block = 1, SIGN_BLOCK

    def _encode_blocks(self, numbers: Floats, two: Floats, scale: Floats, body: Bytes) -> None:
        np.abs(numbers, out=two)
        two.mean(axis=1, out=scale)
        scale[~np.isfinite(scale)] = np.nan
        body[...] = np.packbits(np.signbit(numbers))
        np.copysign(scale[:, None], numbers, out=two)

    def _decode_blocks(self, scale: Floats, body: Bytes, out: Floats) -> None:
        bits = out.view(np.uint32)
        bits[...] = np.unpackbits(body, count=out.size).reshape(out.shape)
        bits <<= 31
        bits |= np.ascontiguousarray(scale).view(np.uint32)


class _TopK(Codec):
    """The largest numbers, as they are, and where they are (Deep Gradient Compression,
    https://arxiv.org/abs/1712.01887): `ceil(fraction * items)` of a slice, at least one.
    """

    feeds_back = True

    def __init__(self, fraction: float) -> None:
        self.name, self._fraction = f"topk:{fraction:g}", fraction

    def _kept(self, items: int) -> int:
        return min(max(math.ceil(items * self._fraction), 1), items)

    def wire_bytes(self, items: int) -> int:
        return 8 * self._kept(items)

    def check(self, data: Bytes, items: int) -> None:
        super().check(data, items)
        if items and (last := data[: 4 * self._kept(items)].view(np.uint32).max()) >= items:
            raise ProtocolError(f"a place encoded as {self.name} must be below {items}, got {last}")

    def _encode(self, values: Floats, residual: Floats | None, data: Bytes) -> None:
        finite = all(_sizes(values[where]).max() < _INFINITY for where in _ranges(values.size))
        numbers = values
        if residual is not None and finite:
            numbers = np.add(residual, values, out=residual)
        kept = self._kept(values.size)
        chosen = _largest(numbers, kept, self._fraction)
        data[: 4 * kept].view(np.uint32)[...] = chosen
        data[4 * kept :].view(np.float32)[...] = numbers[chosen]
        if residual is not None and finite:
            residual[chosen] = 0

    def _decode(self, data: Bytes, out: Floats, add: bool) -> None:
        kept = self._kept(out.size)
        places, numbers = data[: 4 * kept].view(np.uint32), data[4 * kept :].view(np.float32)
        if add:
            out[places] += numbers
        else:
            out[...] = 0
            out[places] = numbers


def _sizes(piece: Floats) -> NDArray[np.uint32]:
    """The sizes of numbers as whole numbers in the same order, infinity and then NaN above all; in scratch memory."""
    found: NDArray[np.uint32] = _scratch.one[: piece.size].view(np.uint32)
    return np.bitwise_and(piece.view(np.uint32), _SIGNLESS, out=found)


def _largest(numbers: Floats, count: int, fraction: float) -> Array:
    """Places of the `count` largest, ascending."""
    if count >= numbers.size:
        return np.arange(numbers.size)
    # A bound from every so many-th number leaves few candidates; they are usually enough.
    sample = _sizes(numbers[:: -(-numbers.size // PIECE)].copy())
    few = min(math.ceil(1.5 * fraction * sample.size) + 16, sample.size)
    bound = max(np.partition(sample, sample.size - few)[sample.size - few], np.uint32(1))
    candidates = _at_least(numbers, bound)
    if candidates.size < count:
        candidates = _at_least(numbers, np.uint32(1))
    if candidates.size < count:  # all that are not zero, as in a sum of a few numbers of each rank
        zeros = np.flatnonzero(numbers == 0)[: count - candidates.size]
        return np.sort(np.concatenate([candidates, zeros]))
    sizes = numbers[candidates].view(np.uint32) & _SIGNLESS
    places: Array = np.sort(candidates[np.argpartition(sizes, sizes.size - count)[sizes.size - count :]])
    return places


def _at_least(numbers: Floats, bound: np.uint32) -> NDArray[np.intp]:
    """Places of those whose size is at least `bound`, ascending."""
    found = [np.flatnonzero(_sizes(numbers[where]) >= bound) + where.start for where in _ranges(numbers.size)]
    return np.concatenate(found)


_PLAIN: dict[str, Codec] = {codec.name: codec for codec in (_Bfloat16(), _Float16(), _Int8(), _OneBit())}
_top_ks: weakref.WeakValueDictionary[float, _TopK] = weakref.WeakValueDictionary()  # by fraction, those in use
_top_ks_lock = threading.Lock()  # guards it


def codec_of(name: str) -> Codec | None:
    """The codec of this name; None for "none". Raises ConfigError if there is no such codec."""
    return None if name == NONE else known(name)


def known(name: str) -> Codec:
    """As `codec_of`, for a name that is not "none"."""
    if (codec := _PLAIN.get(name)) is not None:
        return codec
    if (fraction := kept_fraction(name)) is not None:
        with _top_ks_lock:
            if (found := _top_ks.get(fraction)) is None:
                found = _top_ks[fraction] = _TopK(fraction)
            return found
    raise ConfigError(f"codec must be one of none, {', '.join(_PLAIN)}, topk:0.01, got {name!r}")


def sent_bytes(codec: Codec | None, nbytes: int) -> int:
    """About how many bytes the `nbytes` of a bucket are on the wire: as if it were one slice."""
    return nbytes if codec is None else codec.wire_bytes(nbytes // ITEM_BYTES)
