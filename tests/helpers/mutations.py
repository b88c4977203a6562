"""Inputs that are nearly valid: changed copies of frames, parts and messages. Number n of a seed is always the same."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tfps.config import MAX_SLICE_BYTES
from tfps.types import Argument
from tfps.wire import frames
from tfps.wire.frames import Header, Kind, encode_part

SEED = 20_261
EDGES = (
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    15,
    16,
    31,
    32,
    64,
    255,
    256,
    1023,
    1024,
    2**16 - 1,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
)
WIDE_EDGES = (*EDGES, 2**26, 2**26 + 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e-320, 1e30, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    *("", "x", "none", "sum", "gather", "float32", "float64", "uint8", "bool", "complex64", "bfloat16", "float16"),
    *("int8", "onebit", "topk:0.5", "topk:1e-300", "topk:nan", "topk", "priority", "fifo", "balanced", "server"),
    *("async", "sync", "diloco", "worker", "é" * 50, "\x00", "\x1b[2J", "x" * 300, "9" * 5000, "f4,(", "[" * 5000),
    *("(1000000000,1000000000)f4", "object", "M8[s]", "longdouble", "float8_e4m3fn", "int4", "/measure push", "{}"),
)


def draw(name: str, number: int, seed: int = SEED) -> random.Random:
    """The random numbers of input `number` of a test."""
    return random.Random(f"{seed} {name} {number}")


@contextlib.contextmanager
def replayable(name: str, number: int, inputs: Sequence[object]) -> Iterator[None]:
    """Says of which input an error is, in hex: `draw(name, number)` gives it again."""
    try:
        yield
    except Exception as error:
        shown = [each.hex() if isinstance(each, (bytes, bytearray)) else str(each) for each in inputs]
        text = f"input {number} of {name!r}, seed {SEED}: {type(error).__name__}: {error}; it was"
        raise AssertionError("\n".join([text, *(each[:4000] for each in shown)])) from error


def changed(random_: random.Random, data: bytes) -> bytes:
    """A copy with one to three faults."""
    found = bytearray(data)
    for _ in range(random_.choice((1, 1, 1, 2, 3))):
        at = random_.randrange(len(found)) if found else 0
        fault = random_.randrange(7)
        if fault == 0 and found:
            found[at] ^= 1 << random_.randrange(8)
        elif fault == 1 and found:
            found[at] = random_.choice((0, 1, 127, 128, 255))
        elif fault == 2:
            del found[at:]
        elif fault == 3:
            found += random_.randbytes(random_.choice((1, 4, 44, 300)))
        elif fault == 4:  # a piece twice
            found[at:at] = found[at : at + random_.randrange(1, 48)]
        elif fault == 5:  # a piece less
            del found[at : at + random_.randrange(1, 48)]
        else:  # a number at its limit
            size = random_.choice((2, 4, 8))
            at -= at % size
            found[at : at + size] = (random_.choice(WIDE_EDGES) % 256**size).to_bytes(size, "little")
    return bytes(found)


def some_header(random_: random.Random, **known: int) -> Header:
    """Of any kind, with numbers that are small or at their limits; `known` ones as they are."""
    small = random_.random() < 0.7

    def number(bits: int) -> int:
        return random_.choice(EDGES[:4]) if small else random_.choice(WIDE_EDGES) % 2**bits

    drawn = {
        "kind": int(random_.choice((Kind.PUSH, Kind.PUSH, Kind.PUSH, *Kind))),
        "flags": random_.choice((0, 0, 0, 1, 2, 4, 8, random_.randrange(16))),
        "bucket": number(32),
        "index": number(32),
        "priority": number(32),
        "step": number(64),
        "received": random_.choice((0, 0, 0, number(64))),
        "generation": random_.choice((1, 1, 1, number(16))),
    }
    return Header(**{**drawn, **known})


def some_frame(random_: random.Random) -> bytes:
    """A frame that decodes."""
    return frames.encode(some_header(random_), random_.randbytes(random_.choice((0, 0, 1, 4, 8, 16, 40, 200))))


def _part_of(random_: random.Random, total: int, offset: int, nbytes: int) -> bytes:
    return encode_part(some_header(random_), total, offset, nbytes, random_.random() < 0.3) + random_.randbytes(nbytes)


def some_parts(random_: random.Random) -> list[bytes]:
    """Parts of a few frames, in turn; then some twice, in another order, changed, or with totals at their limits."""
    found: list[bytes] = []
    for header in (some_header(random_) for _ in range(random_.choice((1, 2, 3)))):
        payload, offset = random_.randbytes(random_.choice((0, 1, 7, 60))), 0
        while True:
            nbytes = min(random_.choice((1, 5, 60)), len(payload) - offset)
            found.append(encode_part(header, len(payload), offset, nbytes) + payload[offset : offset + nbytes])
            if (offset := offset + nbytes) >= len(payload):
                break
    for _ in range(random_.choice((0, 1, 2))):
        at = random_.randrange(len(found))
        fault = random_.randrange(5)
        if fault == 0:
            found.insert(random_.randrange(len(found)), found[at])
        elif fault == 1:
            random_.shuffle(found)
        elif fault == 2:
            found[at] = changed(random_, found[at])
        elif fault == 3:
            del found[at]
            found = found or [b""]
        else:
            total = random_.choice((1, 100, MAX_SLICE_BYTES - 1, MAX_SLICE_BYTES, MAX_SLICE_BYTES + 1, 2**32 - 1))
            found[at] = _part_of(random_, total, random_.choice((0, 0, 1, total - 1)), 1)
    return found


def change_message(random_: random.Random, message: Message) -> None:
    """Sets some fields of a message, or of one in it, to values of their types at the limits."""
    fields: list[Argument] = list(message.DESCRIPTOR.fields)
    for field in random_.choices(fields, k=random_.choice((1, 1, 2))) if fields else ():
        inner, values = field.message_type is not None, getattr(message, field.name)
        if hasattr(values, "add" if inner else "extend"):  # a repeated one
            if inner and values and random_.random() < 0.8:
                change_message(random_, random_.choice(values))
            elif inner:
                change_message(random_, values.add())
            else:
                values.extend(_value(random_, field) for _ in range(random_.choice((1, 1, 5))))
        elif inner:
            change_message(random_, values)
        else:
            setattr(message, field.name, _value(random_, field))


def _value(random_: random.Random, field: FieldDescriptor) -> Argument:
    kinds: dict[int, Callable[[], Argument]] = {
        FieldDescriptor.CPPTYPE_INT32: lambda: random_.choice((-(2**31), -1, 0, 1, 2, 2**31 - 1)),
        FieldDescriptor.CPPTYPE_INT64: lambda: random_.choice((-(2**63), -1, 0, 1, 2**63 - 1)),
        FieldDescriptor.CPPTYPE_UINT32: lambda: random_.choice(EDGES),
        FieldDescriptor.CPPTYPE_UINT64: lambda: random_.choice(WIDE_EDGES),
        FieldDescriptor.CPPTYPE_DOUBLE: lambda: random_.choice(FLOATS),
        FieldDescriptor.CPPTYPE_BOOL: lambda: random_.random() < 0.5,
        FieldDescriptor.CPPTYPE_STRING: lambda: random_.choice(TEXTS),
    }
    if field.type == FieldDescriptor.TYPE_BYTES:
        return random_.randbytes(random_.choice((0, 1, 4, 16, 40)))
    return kinds[field.cpp_type]()
