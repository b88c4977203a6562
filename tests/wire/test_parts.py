"""Frames in parts: whatever their sizes and however those of several frames alternate, payloads come out whole."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfps.config import MAX_SLICE_BYTES
from tfps.errors import ProtocolError
from tfps.wire.frames import Header, Kind
from tfps.wire.parts import PART_BYTES, Assembler, Part, decode_part, encode_part


def own(header: Header, nbytes: int) -> memoryview | None:
    return None


def parts_of(header: Header, payload: bytes, sizes: list[int]) -> list[tuple[Part, bytes]]:
    """The payload in parts of `sizes`, in turn."""
    found: list[tuple[Part, bytes]] = []
    offset = 0
    for size in itertools.cycle(sizes):
        if offset == len(payload):
            return found
        piece = payload[offset : offset + size]
        found.append((Part(header, len(payload), offset, len(piece)), piece))
        offset += len(piece)
    return found


@given(
    payloads=st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=5),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    data=st.data(),
)
def test_parts_of_several_frames_may_alternate(payloads: list[bytes], sizes: list[int], data: st.DataObject) -> None:
    waiting = [parts_of(Header(Kind.PUSH, bucket=n), payload, sizes) for n, payload in enumerate(payloads)]
    assembler, got = Assembler(own), {}
    while any(waiting):
        turn = data.draw(st.sampled_from([each for each in waiting if each]))
        part, piece = turn.pop(0)
        assembler.begin(part)[:] = piece
        if (payload := assembler.end(part)) is not None:
            got[part.header.bucket] = bytes(payload)
    assert got == dict(enumerate(payloads))


@given(
    header=st.builds(
        Header,
        st.sampled_from(Kind),
        st.integers(0, 7),
        *([st.integers(0, 2**32 - 1)] * 3),
        *([st.integers(0, 2**64 - 1)] * 2),
    ),
    total=st.integers(1, MAX_SLICE_BYTES),
    more=st.booleans(),
)
def test_what_is_encoded_is_decoded(header: Header, total: int, more: bool) -> None:
    part = Part(header, total, total // 2, total - total // 2, more)
    assert len(encode_part(part)) == PART_BYTES
    assert decode_part(encode_part(part)) == part


def test_a_payload_is_received_where_it_belongs() -> None:
    memory = memoryview(bytearray(4))
    assembler = Assembler(lambda header, nbytes: memory if header.bucket else None)
    for part, piece in parts_of(Header(Kind.REPLY, bucket=1), b"abcd", [3]):
        assembler.begin(part)[:] = piece
        assembler.end(part)
    assert bytes(memory) == b"abcd"


PUSH = Header(Kind.PUSH)
MALFORMED = {
    "too long": (Part(PUSH, MAX_SLICE_BYTES + 1, 0, 1), "at most 67108864 payload bytes, got 67108865"),
    "beyond its frame": (Part(PUSH, 4, 2, 3), "within its frame of 4 bytes, got 3 bytes at 2"),
    "empty": (Part(PUSH, 4, 0, 0), "within its frame of 4 bytes, got 0 bytes at 0"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_part_is_refused(what: str) -> None:
    part, rule = MALFORMED[what]
    with pytest.raises(ProtocolError, match=rule):
        decode_part(encode_part(part))


def test_a_frame_begins_with_its_first_byte() -> None:
    with pytest.raises(ProtocolError, match="must begin at byte 0, got one at 2"):
        Assembler(own).begin(Part(PUSH, 4, 2, 2))


@pytest.mark.parametrize("wrong", [Part(PUSH, 8, 2, 1), Part(PUSH, 8, 0, 1), Part(PUSH, 9, 4, 1)])
def test_parts_come_in_order_and_of_one_size_in_all(wrong: Part) -> None:
    assembler, first = Assembler(own), Part(PUSH, 8, 0, 4)
    assembler.begin(first)
    assembler.end(first)
    with pytest.raises(ProtocolError, match="must begin at byte 4 of 8"):
        assembler.begin(wrong)


def test_a_frame_that_is_under_way_does_not_begin_again() -> None:
    assembler, first = Assembler(own), Part(PUSH, 8, 0, 4)
    assembler.begin(first)
    assembler.end(first)
    with pytest.raises(ProtocolError, match="must not begin it again, got 8 of 8 bytes"):
        assembler.begin(Part(PUSH, 8, 0, 8))


def test_frames_under_way_are_bounded() -> None:
    assembler = Assembler(own)
    for index in range(4096):
        part = Part(Header(Kind.PUSH, index=index), 2, 0, 1)
        assembler.begin(part)
        assembler.end(part)
    with pytest.raises(ProtocolError, match="at most 4096 frames"):
        assembler.begin(Part(Header(Kind.PUSH, index=4096), 2, 0, 1))
