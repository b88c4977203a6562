"""Frames: what is encoded comes back, also in parts of any size and order; what is malformed is refused by name."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfps import errors
from tfps.config import MAX_SLICE_BYTES
from tfps.errors import ProtocolError, TfpsError
from tfps.wire import frames
from tfps.wire.frames import (
    EMPTY,
    HEADER_BYTES,
    LAST,
    MAX_FRAME_BYTES,
    PART_BYTES,
    Assembler,
    Header,
    Kind,
    Part,
    decode_part,
    encode_part,
)

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    flags=st.integers(0, EMPTY | LAST),
    bucket=u32,
    index=u32,
    priority=u32,
    step=u64,
    received=u64,
    generation=st.integers(0, 2**16 - 1),
)


@given(header=headers, payload=st.binary(max_size=300))
def test_decoding_returns_what_was_encoded(header: Header, payload: bytes) -> None:
    message = frames.encode(header, payload)
    assert len(message) == HEADER_BYTES + len(payload)
    decoded, body = frames.decode(message)
    assert decoded == header
    assert body == payload


@given(message=st.binary(max_size=100))
def test_any_bytes_decode_or_raise_a_protocol_error(message: bytes) -> None:
    try:
        header, payload = frames.decode(message)
    except ProtocolError:
        return
    assert frames.encode(header, payload) == message


@given(header=headers, length=st.integers(0, HEADER_BYTES - 1))
def test_a_truncated_header_is_refused_with_its_length(header: Header, length: int) -> None:
    with pytest.raises(ProtocolError, match=f"must have {HEADER_BYTES} to {MAX_FRAME_BYTES} bytes, got {length}$"):
        frames.decode(frames.encode(header)[:length])


def test_an_oversized_frame_is_refused_with_its_length() -> None:
    with pytest.raises(ProtocolError, match=f"got {MAX_FRAME_BYTES + 1}$"):
        frames.decode(bytes(MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize("kind", [0, 7, 255])
def test_an_unknown_kind_is_refused_with_the_known_ones(kind: int) -> None:
    message = bytes([kind]) + frames.encode(Header(Kind.PUSH))[1:]
    known = r"1 \(PUSH\), 2 \(REPLY\), 3 \(ACK\), 4 \(ERROR\), 5 \(LAYOUT\), 6 \(TRACE\), 8 \(SCALARS\), "
    known += r"9 \(BEAT\), 10 \(RANKS\), 11 \(LOST\), 12 \(ADMITTED\), 13 \(READY\), 14 \(AWAITED\), "
    known += r"15 \(OFFER\), 16 \(RECEIVED\)"
    with pytest.raises(ProtocolError, match=f"one of {known}, got {kind}"):
        frames.decode(message)


def test_unknown_flags_are_refused() -> None:
    message = bytearray(frames.encode(Header(Kind.PUSH)))
    message[1] |= 0x80
    with pytest.raises(ProtocolError, match="unknown flags of a frame must be 0, got flags 128"):
        frames.decode(bytes(message))


def test_the_layout_is_the_documented_one() -> None:
    message = frames.encode(Header(Kind.PUSH, LAST, 0x01020304, 5, 6, 7, 8, 0x090A), b"x")
    assert message.hex(" ", -4) == "01020a09 04030201 05000000 06000000 07000000 00000000 08000000 00000000 78"


@pytest.mark.parametrize(
    "kind",
    [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TfpsError)],
)
def test_every_error_crosses_the_wire_as_its_class(kind: type[TfpsError]) -> None:
    error = frames.decode_error(*frames.decode(frames.encode_error(kind("müde"))))
    assert type(error) is kind
    assert str(error) == "müde"


def test_an_error_of_a_newer_version_is_still_an_error() -> None:
    assert type(frames.error_from(999, "text")) is TfpsError


# Parts


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


def take(assembler: Assembler, part: Part, piece: bytes) -> memoryview | None:
    """Writes a part where it belongs; the frame's payload, if it is complete."""
    payload, end = assembler.begin(part), part.offset + part.nbytes
    payload[part.offset : end] = piece
    return payload if assembler.end(part, payload, end) else None


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
        if (payload := take(assembler, part, piece)) is not None:
            got[part.header.bucket] = bytes(payload)
    assert got == dict(enumerate(payloads))


@given(
    header=st.builds(
        Header,
        st.sampled_from(Kind),
        st.integers(0, 7),
        *([st.integers(0, 2**32 - 1)] * 3),
        *([st.integers(0, 2**64 - 1)] * 2),
        st.integers(0, 2**16 - 1),
    ),
    total=st.integers(1, MAX_SLICE_BYTES),
    more=st.booleans(),
)
def test_what_is_encoded_is_decoded(header: Header, total: int, more: bool) -> None:
    part = Part(header, total, total // 2, total - total // 2, more)
    assert len(encode_part(*part)) == PART_BYTES
    assert decode_part(encode_part(*part)) == part


def test_a_payload_is_received_where_it_belongs() -> None:
    memory = memoryview(bytearray(4))
    assembler = Assembler(lambda header, nbytes: memory if header.bucket else None)
    for part, piece in parts_of(Header(Kind.REPLY, bucket=1), b"abcd", [3]):
        take(assembler, part, piece)
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
        decode_part(encode_part(*part))


def test_a_frame_begins_with_its_first_byte() -> None:
    with pytest.raises(ProtocolError, match="must begin at byte 0, got one at 2"):
        Assembler(own).begin(Part(PUSH, 4, 2, 2))


@pytest.mark.parametrize("wrong", [Part(PUSH, 8, 2, 1), Part(PUSH, 8, 0, 1), Part(PUSH, 9, 4, 1)])
def test_parts_come_in_order_and_of_one_size_in_all(wrong: Part) -> None:
    assembler, first = Assembler(own), Part(PUSH, 8, 0, 4)
    take(assembler, first, bytes(4))
    with pytest.raises(ProtocolError, match="must begin at byte 4 of 8"):
        assembler.begin(wrong)


def test_a_frame_that_is_under_way_does_not_begin_again() -> None:
    assembler, first = Assembler(own), Part(PUSH, 8, 0, 4)
    take(assembler, first, bytes(4))
    with pytest.raises(ProtocolError, match="must not begin it again, got 8 of 8 bytes"):
        assembler.begin(Part(PUSH, 8, 0, 8))


def test_frames_under_way_are_bounded() -> None:
    assembler = Assembler(own)
    for index in range(4096):
        part = Part(Header(Kind.PUSH, index=index), 2, 0, 1)
        take(assembler, part, bytes(1))
    with pytest.raises(ProtocolError, match="at most 4096 frames"):
        assembler.begin(Part(Header(Kind.PUSH, index=4096), 2, 0, 1))


def test_counts_of_results_cross_the_wire_and_half_a_count_is_refused() -> None:
    counts = (0, 7, 2**63)
    assert frames.unpack_counts(memoryview(frames.pack_counts(counts))) == counts
    with pytest.raises(ProtocolError, match="RECEIVED must have 8 bytes for each bucket, got 12 bytes"):
        frames.unpack_counts(memoryview(bytes(12)))
