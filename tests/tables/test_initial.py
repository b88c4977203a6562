"""Initial values are a pure function of seed and id, of the distribution they are said to be of."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest

from tests.tables.table_model import EXTREMES, int64
from tfps.errors import ConfigError
from tfps.tables import initial
from tfps.tables.initial import Initial

ALL = [
    Initial("constant", 0.25, 0.0),
    Initial("uniform", -0.05, 0.05),
    Initial("normal", 0.1, 0.3),
    Initial("truncated_normal", 0.1, 0.3),
]


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.kind)
def test_a_row_is_the_same_whoever_asks_for_it(each: Initial) -> None:
    ids = int64([*EXTREMES, *range(10, 3000)])
    rows = each.values(3, ids, 33)
    assert (str(rows.dtype), rows.shape) == ("float32", (ids.size, 33))
    order = np.random.default_rng(0).permutation(ids.size)
    assert each.values(3, ids[order], 33).tobytes() == rows[order].tobytes()
    assert each.values(3, ids[5:6], 33).tobytes() == rows[5:6].tobytes()
    assert each.values(3, ids, 7).tobytes() == rows[:, :7].tobytes()
    if each.kind != "constant":
        assert np.unique(rows, axis=0).shape == rows.shape
        assert not np.isin(each.values(4, ids, 33)[:, 0], rows[:, 0]).any() or each.kind != "normal"
        assert (each.values(4, ids, 33) != rows).any(axis=1).all()


def test_the_bits_are_these_on_every_machine() -> None:
    """Tables that were saved go on with them: never change them."""
    found = [zlib.crc32(each.values(2**64 - 1, int64([*EXTREMES, *range(2, 999)]), 5).tobytes()) for each in ALL]
    assert found == [2449896228, 1443753566, 110417508, 323824414]


SIZE = 2**18


def numbers(each: Initial, seed: int = 5) -> np.ndarray:
    return each.values(seed, np.arange(SIZE // 64), 64).astype(np.float64).ravel()


def distance(found: np.ndarray, distribution: Callable[[float], float]) -> float:
    """The largest between the two distribution functions, times the root of the number: above 1.95 once in 1000."""
    found = np.sort(found)
    wanted = np.array([distribution(x) for x in found[::16]])
    return float(np.abs(wanted - np.arange(found.size)[::16] / found.size).max() * math.sqrt(found.size))


def test_uniform_numbers_are_uniform_and_below_the_upper_bound() -> None:
    found = numbers(Initial("uniform", -1.0, 3.0))
    assert distance(found, lambda x: (x + 1) / 4) < 2
    assert found.min() >= -1
    assert found.max() < 3
    assert set(numbers(Initial("uniform", 1.0, 1.0 + 2**-23))) == {1.0}  # nothing lies between
    assert set(numbers(Initial("uniform", 1.0, 1.0))) == {1.0}


def test_normal_numbers_are_normal() -> None:
    found = numbers(Initial("normal", 1.0, 2.0))
    assert distance(found, NormalDist(1, 2).cdf) < 2
    assert 4 < np.abs(found - 1).max() / 2 < 6.3
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.01
    assert abs(np.corrcoef(found[:-64], found[64:])[0, 1]) < 0.01  # one row and the next


def test_truncated_numbers_are_within_two_standard_deviations() -> None:
    found, whole = numbers(Initial("truncated_normal", 1.0, 2.0)), NormalDist(1, 2)
    low, high = whole.cdf(-3), whole.cdf(5)
    assert distance(found, lambda x: (whole.cdf(x) - low) / (high - low)) < 2
    assert found.min() >= -3
    assert found.max() <= 5


def test_deviations_are_exact_to_seven_digits() -> None:
    tails = 2.0 ** np.arange(-33.0, -1.0)
    central = np.concatenate([tails - 0.5, np.linspace(-0.499, 0.499, 999), 0.5 - tails])
    wanted = [-NormalDist().inv_cdf(0.5 - x) if x > 0 else NormalDist().inv_cdf(x + 0.5) for x in central]
    np.testing.assert_allclose(initial._normal(central), wanted, rtol=3e-7, atol=1e-9)
    positive = np.concatenate([tails, np.linspace(1e-9, 0.5, 999)])
    np.testing.assert_allclose(initial._log(positive), np.log(positive), rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "a", "b", "message"),
    [
        (
            "zeros",
            0,
            0,
            "kind of initial values must be one of constant, .*, got 'zeros'",
        ),
        ("constant", math.nan, 0, "a of constant initial values must be a finite float32, got nan"),
        ("normal", 0, 1e39, "b of normal initial values must be a finite float32, got 1e[+]39"),
        ("uniform", 2, 1, "from a to b with a <= b, got 2 and 1"),
        ("uniform", -3e38, 3e38, "from a to b with a <= b"),
        (
            "truncated_normal",
            0,
            -1,
            "the standard deviation, must be >= 0, got -1",
        ),
    ],
)
def test_what_is_no_distribution_is_refused(kind: str, a: float, b: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Initial(kind, a, b)
