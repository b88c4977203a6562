"""Frames: what is encoded comes back, what is malformed is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfps import errors
from tfps.errors import ProtocolError, TfpsError
from tfps.wire import frames
from tfps.wire.frames import EMPTY, HEADER_BYTES, LAST, MAX_FRAME_BYTES, Header, Kind

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
    known = r"1 \(PUSH\), 2 \(REPLY\), 3 \(ACK\), 4 \(ERROR\), 5 \(LAYOUT\), 6 \(TRACE\), 8 \(SCALARS\)"
    with pytest.raises(ProtocolError, match=f"one of {known}, got {kind}"):
        frames.decode(message)


@pytest.mark.parametrize("position", [1, 2, 3])
def test_unknown_flags_and_reserved_bits_are_refused(position: int) -> None:
    message = bytearray(frames.encode(Header(Kind.PUSH)))
    message[position] |= 0x80
    with pytest.raises(ProtocolError, match="must be 0"):
        frames.decode(bytes(message))


def test_the_layout_is_the_documented_one() -> None:
    message = frames.encode(Header(Kind.PUSH, LAST, 0x01020304, 5, 6, 7, 8), b"x")
    assert message.hex(" ", -4) == "01020000 04030201 05000000 06000000 07000000 00000000 08000000 00000000 78"


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
