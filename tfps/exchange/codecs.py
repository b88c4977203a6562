"""Codecs: how float32 slices become fewer bytes on the wire, and what of them does not get through.

All are deterministic: the same numbers give the same bytes. They work in pieces that fit into a processor's cache,
without arrays of the slice's size beside the result (`topk` apart).

**Error feedback** (1-bit SGD, Seide et al., Interspeech 2014; EF-SignSGD, https://arxiv.org/abs/1901.09847): what a
codec could not express is its *residual*, added to the next step's numbers, so that it is late but not lost. `bfloat16`
and `float16` round to nearest and have none.

**What is not finite is never lost.** The 16-bit codecs keep NaN and infinity, and `topk` sends them first. `int8` and
`onebit` send NaN for the whole block around one. The residual there stays as it was: one such step does not spoil
later ones.
"""

from __future__ import annotations

import abc
import functools
import math
import threading
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
        self.flags: NDArray[np.bool_] = np.empty(PIECE, np.bool_)


_scratch = _Scratch()


class Codec(abc.ABC):
    """One codec, always the same object for one name; any thread.

    Attributes:
        name: as in `Config.compression`.
        feeds_back: whether it leaves a residual.
    """

    name: str
    feeds_back = False

    @abc.abstractmethod
    def wire_bytes(self, items: int) -> int:
        """Size of so many encoded numbers; depends on nothing else."""

    def __str__(self) -> str:
        return self.name

    def encode(self, values: Floats, residual: Floats | None = None) -> Bytes:
        """Encodes `values` and the `residual` of the last time; leaves there what cannot be expressed this time.

        Args:
            values: flat, not changed.
            residual: of the same size, changed in place; None: what cannot be expressed is lost.

        Returns:
            `wire_bytes(values.size)` bytes.
        """
        data = np.empty(self.wire_bytes(values.size), np.uint8)
        with np.errstate(all="ignore"):
            self._encode(values, residual if self.feeds_back else None, data)
        return data

    def decode(self, data: Bytes, out: Floats, *, add: bool = False) -> None:
        """Writes decoded `data` to `out`, or adds it.

        Raises:
            ProtocolError: `data` is not what `encode` makes of so many numbers.
        """
        if data.size != self.wire_bytes(out.size):
            raise ProtocolError(
                f"{out.size} numbers encoded as {self.name} must have {self.wire_bytes(out.size)} bytes, got "
                f"{data.size}"
            )
        with np.errstate(all="ignore"):
            self._decode(data, out, add)

    @abc.abstractmethod
    def _encode(self, values: Floats, residual: Floats | None, data: Bytes) -> None: ...

    @abc.abstractmethod
    def _decode(self, data: Bytes, out: Floats, add: bool) -> None: ...


def _ranges(items: int) -> Iterator[slice]:
    return (slice(begin, min(begin + PIECE, items)) for begin in range(0, items, PIECE))


class _Bfloat16(Codec):
    """The upper half of a float32, rounded to nearest, ties to even."""

    name = "bfloat16"

    def wire_bytes(self, items: int) -> int:
        return 2 * items

    def _encode(self, values: Floats, residual: Floats | None, data: Bytes) -> None:
        halves = data.view(np.uint16)
        for where in _ranges(values.size):
            piece = values[where]
            bits, rounded = piece.view(np.uint32), _scratch.one[: piece.size].view(np.uint32)
            np.right_shift(bits, 16, out=rounded)
            np.bitwise_and(rounded, 1, out=rounded)
            np.add(rounded, bits, out=rounded)
            np.add(rounded, 0x7FFF, out=rounded)
            halves[where] = rounded.view(np.uint16)[1::2]
            if np.isnan(piece.max()):  # adding may have carried a NaN into the sign: GPUs make 0x7FFFFFFF
                halves[where][np.isnan(piece)] = _BFLOAT16_NAN

    def _decode(self, data: Bytes, out: Floats, add: bool) -> None:
        halves = data.view(np.uint16)
        for where in _ranges(out.size):
            target = out[where]
            bits = (_scratch.one[: target.size] if add else target).view(np.uint32)
            bits[...] = halves[where]
            np.left_shift(bits, 16, out=bits)
            if add:
                np.add(target, bits.view(np.float32), out=target)


class _Float16(Codec):
    """IEEE half precision; above 65504 infinity."""

    name = "float16"

    def wire_bytes(self, items: int) -> int:
        return 2 * items

    def _encode(self, values: Floats, residual: Floats | None, data: Bytes) -> None:
        data.view(np.float16)[...] = values

    def _decode(self, data: Bytes, out: Floats, add: bool) -> None:
        halves = data.view(np.float16)
        for where in _ranges(out.size):
            if add:
                decoded = _scratch.one[: out[where].size]
                decoded[...] = halves[where]
                np.add(out[where], decoded, out=out[where])
            else:
                out[where] = halves[where]


class _Blocks(Codec):
    """A codec with one scale per block; the last block may be shorter."""

    feeds_back = True
    block: int

    def _parts(self, items: int) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
        """Yields ranges of numbers and of their blocks, and the shape (blocks, numbers in each) of such a range."""
        whole = items - items % self.block
        for where in _ranges(whole):
            blocks = slice(where.start // self.block, where.stop // self.block)
            yield where, blocks, (blocks.stop - blocks.start, self.block)
        if whole < items:
            yield slice(whole, items), slice(whole // self.block, whole // self.block + 1), (1, items - whole)

    def _count(self, items: int) -> int:
        return -(-items // self.block)

    def _encode(self, values: Floats, residual: Floats | None, data: Bytes) -> None:
        scales = data[: 4 * self._count(values.size)].view(np.float32)
        body = data[4 * self._count(values.size) :]
        for where, blocks, shape in self._parts(values.size):
            one = _scratch.one[: shape[0] * shape[1]].reshape(shape)
            two = _scratch.two[: one.size].reshape(shape)
            numbers, own = values[where].reshape(shape), None
            if residual is not None:
                own = residual[where].reshape(shape)
                numbers = np.add(numbers, own, out=one)
            scale = scales[blocks]
            self._encode_blocks(numbers, two, scale, body, where)  # leaves in `two` what will be decoded
            if own is None:
                continue
            if np.isnan(scale).any():
                np.subtract(numbers, two, out=own, where=~np.isnan(scale)[:, None])
            else:
                np.subtract(numbers, two, out=own)

    def _decode(self, data: Bytes, out: Floats, add: bool) -> None:
        scales = data[: 4 * self._count(out.size)].view(np.float32)
        body = data[4 * self._count(out.size) :]
        for where, blocks, shape in self._parts(out.size):
            target = out[where].reshape(shape)
            decoded = _scratch.one[: target.size].reshape(shape) if add else target
            self._decode_blocks(scales[blocks][:, None], body, where, decoded)
            if add:
                np.add(target, decoded, out=target)

    @abc.abstractmethod
    def _encode_blocks(self, numbers: Floats, two: Floats, scale: Floats, body: Bytes, where: slice) -> None:
        """Writes the scales, NaN for a block that is not finite, and the range `where` of `body`."""

    @abc.abstractmethod
    def _decode_blocks(self, scale: Floats, body: Bytes, where: slice, out: Floats) -> None: ...


class _Int8(_Blocks):
    """Whole numbers from -127 to 127 times a scale: the largest number of the block over 127."""

    name = "int8"
    block = INT8_BLOCK

    def wire_bytes(self, items: int) -> int:
        return 4 * self._count(items) + items

    def _encode_blocks(self, numbers: Floats, two: Floats, scale: Floats, body: Bytes, where: slice) -> None:
        np.abs(numbers, out=two)
        peak = two.max(axis=1)  # NaN if there is one
        small = peak < _LEAST_PEAK
        inverse = 127 / peak
        np.divide(peak, 127, out=scale)
        inverse[small] = scale[small] = 0
        scale[~np.isfinite(peak)] = np.nan
        np.multiply(numbers, inverse[:, None], out=two)
        np.add(two, _ROUND, out=two)
        body.view(np.int8)[where] = two.reshape(-1).view(np.int8)[::4]  # the low byte of each, as of a whole number
        np.subtract(two, _ROUND, out=two)
        np.multiply(two, scale[:, None], out=two)

    def _decode_blocks(self, scale: Floats, body: Bytes, where: slice, out: Floats) -> None:
        out[...] = body.view(np.int8)[where].reshape(out.shape)
        np.multiply(out, scale, out=out)


class _OneBit(_Blocks):
    """The sign of each number times a scale: the mean size of the block's numbers."""

    name = "onebit"
    block = SIGN_BLOCK

    def wire_bytes(self, items: int) -> int:
        return 4 * self._count(items) + -(-items // 8)

    def _encode_blocks(self, numbers: Floats, two: Floats, scale: Floats, body: Bytes, where: slice) -> None:
        np.abs(numbers, out=two)
        two.mean(axis=1, out=scale)
        scale[~np.isfinite(scale)] = np.nan
        flags = _scratch.flags[: numbers.size]
        np.signbit(numbers.reshape(-1), out=flags)
        body[_bits(where)] = np.packbits(flags)
        np.copysign(scale[:, None], numbers, out=two)

    def _decode_blocks(self, scale: Floats, body: Bytes, where: slice, out: Floats) -> None:
        bits = out.view(np.uint32)
        bits[...] = np.unpackbits(body[_bits(where)], count=out.size).reshape(out.shape)
        np.left_shift(bits, 31, out=bits)
        np.bitwise_or(bits, np.ascontiguousarray(scale).view(np.uint32), out=bits)


def _bits(where: slice) -> slice:
    """The bytes with the bits of a range, which begins with a byte."""
    return slice(where.start // 8, -(-where.stop // 8))


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
        if kept and places.max() >= out.size:
            raise ProtocolError(f"a place encoded as {self.name} must be below {out.size}, got {places.max()}")
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


_top_k = functools.cache(_TopK)  # one object for all spellings of a fraction


def codec_of(name: str) -> Codec | None:
    """The codec of this name; None for "none".

    Raises:
        ConfigError: there is no such codec.
    """
    return None if name == NONE else known(name)


def known(name: str) -> Codec:
    """As `codec_of`, for a name that is not "none"."""
    if (codec := _PLAIN.get(name)) is not None:
        return codec
    if (fraction := kept_fraction(name)) is not None:
        return _top_k(fraction)
    raise ConfigError(f"codec must be one of none, {', '.join(_PLAIN)}, topk:0.01, got {name!r}")


def sent_bytes(codec: Codec | None, nbytes: int) -> int:
    """About how many bytes the `nbytes` of a bucket are on the wire: as if it were one slice."""
    return nbytes if codec is None else codec.wire_bytes(nbytes // ITEM_BYTES)
