"""Codecs: sizes, errors, residuals, what is not finite."""

from __future__ import annotations

import weakref

import ml_dtypes
import numpy as np
import pytest

from tfps.errors import ConfigError, ProtocolError
from tfps.exchange.codecs import INT8_BLOCK, PIECE, SIGN_BLOCK, Codec, Floats, codec_of, known, sent_bytes

NAMES = ["bfloat16", "float16", "int8", "onebit", "topk:0.01", "topk:0.5"]
FEEDING_BACK = NAMES[2:]
SIZES = [0, 1, 2, 7, 8, INT8_BLOCK - 1, INT8_BLOCK, SIGN_BLOCK + 1, PIECE - 1, PIECE, 2 * PIECE + SIGN_BLOCK + 3]
#: What is rounded away at most, over the largest number.
RELATIVE = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "int8": 1 / 254 * 1.001}


def numbers(count: int, seed: int = 0) -> Floats:
    """Of very different sizes."""
    random = np.random.default_rng(seed)
    return (random.normal(size=count) * 10.0 ** random.integers(-6, 4, count)).astype(np.float32)


def decoded(one: Codec, data: np.ndarray, count: int) -> Floats:
    out = np.full(count, np.nan, np.float32)  # all must be written
    one.decode(data, out)
    return out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", SIZES)
def test_every_size_has_the_bytes_that_were_said_and_adding_is_decoding_and_adding(name: str, count: int) -> None:
    one, values = known(name), numbers(count)
    kept = values.copy()
    data = one.encode(values, np.zeros(count, np.float32))
    assert data.nbytes == one.wire_bytes(count)
    assert values.tobytes() == kept.tobytes()
    assert one.encode(values).tobytes() == data.tobytes()  # the same numbers, the same bytes
    out = decoded(one, data, count)
    assert np.isfinite(out).all()
    base = numbers(count, 1)
    added = base.copy()
    one.decode(data, added, add=True)
    assert added.tobytes() == (base + out).tobytes()


@pytest.mark.parametrize("name", RELATIVE)
def test_rounding_is_as_small_as_the_format_allows(name: str) -> None:
    values = np.random.default_rng(3).normal(size=3 * PIECE + 11).astype(np.float32)
    errors = np.abs(decoded(known(name), known(name).encode(values), values.size) - values)
    if name == "int8":
        for begin in range(0, values.size, INT8_BLOCK):
            block = slice(begin, begin + INT8_BLOCK)
            assert errors[block].max() <= np.abs(values[block]).max() * RELATIVE[name]
    else:
        assert (errors <= np.abs(values) * RELATIVE[name] + 1e-7).all()


def test_bfloat16_rounds_every_pattern_as_ml_dtypes_does() -> None:
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = ((np.arange(2**16, dtype=np.uint32) << 16)[:, None] | low).reshape(-1)
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    found = known("bfloat16").encode(values).view(ml_dtypes.bfloat16)
    nan = np.isnan(values)
    assert np.isnan(found[nan].astype(np.float32)).all()
    assert found[~nan].tobytes() == expected[~nan].tobytes()


def test_half_precision_numbers_travel_as_they_are() -> None:
    for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
        halves = np.arange(2**16, dtype=np.uint16).view(dtype)
        values = halves.astype(np.float32)
        finite = np.isfinite(values)
        data = known(name).encode(values)
        assert data.view(np.uint16)[finite].tobytes() == halves.view(np.uint16)[finite].tobytes()
        assert decoded(known(name), data, values.size)[finite].tobytes() == values[finite].tobytes()


@pytest.mark.parametrize("name", FEEDING_BACK)
@pytest.mark.parametrize("count", [1, 5, INT8_BLOCK + 1, 2 * PIECE + 77])
def test_the_residual_is_late_but_not_lost(name: str, count: int) -> None:
    one, held = known(name), np.zeros(count, np.float32)
    sent, given = np.zeros(count), np.zeros(count)
    for step in range(20):
        values = np.random.default_rng(step).normal(size=count).astype(np.float32)
        given += values
        sent += decoded(one, one.encode(values, held), count)
    np.testing.assert_allclose(sent + held, given, atol=2e-4)
    assert one.feeds_back
    if count > INT8_BLOCK:
        assert np.abs(held).max() > 0


@pytest.mark.parametrize("name", FEEDING_BACK)
def test_an_equal_gradient_is_sent_in_full_after_some_steps(name: str) -> None:
    """The mean over steps comes close, also for numbers far below the largest of their block."""
    values = np.array([1.0, 1e-3, -0.5, 0.02] * 300, np.float32)
    held, sent = np.zeros_like(values), np.zeros(values.size)
    for _ in range(4000):
        sent += decoded(known(name), known(name).encode(values, held), values.size)
    np.testing.assert_allclose(sent / 4000, values, atol=0.03)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 300, PIECE + 1, PIECE + SIGN_BLOCK])
def test_what_is_not_finite_is_seen_and_leaves_the_residual_as_it_was(name: str, bad: float, place: int) -> None:
    one, values = known(name), numbers(PIECE + SIGN_BLOCK + 5)
    held = numbers(values.size, 2) if one.feeds_back else np.zeros_like(values)
    before = held.copy()
    values[place] = bad
    out = decoded(one, one.encode(values, held), values.size)
    assert not np.isfinite(out[place])
    assert np.isfinite(held).all()
    if one.feeds_back:
        assert held[place] == before[place]
    assert np.isfinite(out).any()


@pytest.mark.parametrize("name", NAMES)
def test_the_nan_that_gpus_make_stays_one(name: str) -> None:
    """Rounded as a number, 0x7FFFFFFF would become -0."""
    values = np.full(9, 0x7FFFFFFF, np.uint32).view(np.float32)
    out = decoded(known(name), known(name).encode(values), 9)
    assert np.isnan(out).any() if name.startswith("topk") else np.isnan(out).all()


def test_float16_makes_infinity_of_what_is_too_large() -> None:
    values = np.array([7e4, -7e4, 6e4], np.float32)
    assert decoded(known("float16"), known("float16").encode(values), 3).tolist() == [np.inf, -np.inf, 6e4]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-38, 1e-42, 3e38])
def test_extreme_slices_stay_finite(name: str, value: float) -> None:
    values = np.full(2 * SIGN_BLOCK + 3, value, np.float32)
    held = np.zeros_like(values)
    out = decoded(known(name), known(name).encode(values, held), values.size)
    if (name, value) == ("float16", 3e38):
        assert np.isinf(out).all()
    elif (name, value) == ("onebit", 3e38):
        assert np.isnan(out).all()  # the sum of their sizes is beyond float32: seen, not wrong
    else:
        assert np.isfinite(out).all()
        assert np.abs(out).max() <= abs(value) * 1.01
        if known(name).feeds_back:
            np.testing.assert_allclose(out + held, values, rtol=1e-6)


def test_a_fraction_of_topk_has_one_object_while_it_is_used_and_none_afterwards() -> None:
    one = known("topk:0.125")
    assert codec_of("topk:1.25e-1") is one
    gone = weakref.ref(one)
    del one
    assert gone() is None


def test_topk_sends_the_largest() -> None:
    values = numbers(100_000)
    out = decoded(known("topk:0.01"), known("topk:0.01").encode(values), values.size)
    places = np.flatnonzero(out)
    assert places.size == 1000
    assert out[places].tobytes() == values[places].tobytes()
    assert np.abs(values[places]).min() >= np.sort(np.abs(values))[-1000]


@pytest.mark.parametrize("values", [np.zeros(70_000), np.ones(70_000), np.r_[np.zeros(69_999), 1.0]])
def test_topk_of_many_equal_numbers_sends_as_many_as_was_said(values: np.ndarray) -> None:
    values = values.astype(np.float32)
    data = known("topk:0.01").encode(values)
    places = data[: 4 * 700].view(np.uint32)
    assert np.unique(places).size == 700
    assert decoded(known("topk:0.01"), data, values.size).max() == values.max()


@pytest.mark.parametrize("name", NAMES)
def test_other_sizes_are_refused(name: str) -> None:
    one = known(name)
    data = one.encode(numbers(100))
    for wrong in (data[:-1], np.append(data, np.uint8(0)), data[:0]):
        with pytest.raises(ProtocolError, match=f"100 numbers encoded as {name} must have"):
            one.decode(wrong, np.empty(100, np.float32))


def test_places_beyond_the_slice_are_refused() -> None:
    one = known("topk:0.5")
    data = one.encode(numbers(4))
    data[:8].view(np.uint32)[1] = 4
    for add in (False, True):
        with pytest.raises(ProtocolError, match="must be below 4, got 4"):
            one.decode(data, np.zeros(4, np.float32), add=add)


def test_bytes_on_the_wire_are_as_few_as_documented() -> None:
    nbytes = 4 * 2**20
    sent = {name: sent_bytes(codec_of(name), nbytes) / nbytes for name in ["none", *NAMES]}
    assert sent["none"] == 1
    assert sent["bfloat16"] == sent["float16"] == 0.5
    assert sent["int8"] < 0.2540
    assert sent["onebit"] < 0.0323
    assert sent["topk:0.01"] < 0.0201


def test_unknown_codecs_are_refused() -> None:
    assert codec_of("none") is None
    with pytest.raises(ConfigError, match="codec must be one of none, bfloat16"):
        codec_of("gzip")
