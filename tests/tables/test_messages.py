from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfps.errors import ProtocolError
from tfps.exchange.codecs import codec_of
from tfps.tables import messages

IDS = st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=40).map(lambda ids: np.array(sorted(ids), int))


@given(IDS)
def test_ids_come_back(ids: np.ndarray) -> None:
    data = messages.encode_ids(ids)
    found, size = messages.decode_ids(data + b"more")
    assert size == len(data)
    np.testing.assert_array_equal(found, ids)


@pytest.mark.parametrize(("step", "size"), [(1, 1), (255, 1), (256, 2), (2**16, 4), (2**32, 8)])
def test_a_difference_takes_the_bytes_that_it_needs(step: int, size: int) -> None:
    assert len(messages.encode_ids(np.arange(-3 * step, 3 * step, step))) == 16 + 5 * size


@given(IDS, st.binary(max_size=20), st.integers(1, 5), st.sampled_from(["none", "bfloat16", "int8"]))
def test_gradients_come_back_with_their_ids_and_scalars(ids: np.ndarray, scalars: bytes, dim: int, name: str) -> None:
    codec = codec_of(name)
    gradients = np.random.default_rng(0).normal(size=(len(ids), dim)).astype(np.float32)
    found = messages.decode_push(memoryview(messages.encode_push(scalars, ids, gradients, codec)), dim, codec)
    assert found.scalars == scalars
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_allclose(found.gradients, gradients, atol=0 if codec is None else 0.05)


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 4))
def test_an_answer_says_which_rows_it_has(chosen: list[bool], dim: int) -> None:
    mask = np.array(chosen, np.bool_)
    values = np.arange(int(mask.sum()) * dim, dtype=np.float32).reshape(-1, dim)
    found, of = messages.decode_some(memoryview(messages.encode_some(mask, values)), len(mask), dim)
    np.testing.assert_array_equal(found, mask)
    np.testing.assert_array_equal(of, values)


@given(st.binary(max_size=60), st.integers(1, 4), st.integers(0, 50))
def test_anything_else_is_refused_by_name(data: bytes, dim: int, asked: int) -> None:
    for decode in (
        lambda: messages.decode_ids(data),
        lambda: messages.decode_push(memoryview(data), dim, None),
        lambda: messages.decode_push(memoryview(data), dim, codec_of("int8")),
        lambda: messages.decode_some(memoryview(data), asked, dim),
        lambda: messages.decode_rows(memoryview(data), asked, dim),
    ):
        try:
            decode()
        except ProtocolError as error:
            assert "must" in str(error)
