"""Rows begin as Keras' initializers would make them, each by itself."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest

import tfps
from tfps.embeddings.initializers import initial_of
from tfps.errors import UnsupportedError
from tfps.types import Argument, Array, Library, Structure

of: Library = keras.initializers
ROWS, DIM = 3000, 16


def rows(initializer: Argument, input_dim: int | None = ROWS, ids: Array | None = None) -> Array:
    layer = tfps.layers.Embedding(input_dim, DIM, embeddings_initializer=initializer)
    found: Array = layer.read_rows(np.arange(ROWS) if ids is None else ids)
    return found


@pytest.mark.parametrize(
    "initializer", [of.Zeros(), of.Ones(), of.Constant(-2.5), "zeros"], ids=["0", "1", "-2.5", "name"]
)
def test_constants_are_keras_own(initializer: Argument) -> None:
    np.testing.assert_array_equal(rows(initializer), of.get(initializer)((ROWS, DIM)))


RANDOM = {
    "uniform": of.RandomUniform(-0.1, 0.3, seed=1),
    "normal": of.RandomNormal(0.5, 2.0, seed=1),
    "truncated": of.TruncatedNormal(0.5, 2.0, seed=1),
    **{name: getattr(of, name)(seed=1) for name in ("GlorotUniform", "GlorotNormal", "HeUniform", "HeNormal")},
    **{name: getattr(of, name)(seed=1) for name in ("LecunUniform", "LecunNormal")},
    "untruncated": of.VarianceScaling(3.0, "fan_out", "untruncated_normal", seed=1),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_values_are_distributed_as_keras_are(name: str) -> None:
    """By quantiles, of which each has a standard error below 0.01 standard deviations."""
    found, expected = rows(RANDOM[name]), np.asarray(RANDOM[name]((ROWS, DIM)))
    for quantile in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99):
        difference = np.quantile(found, quantile) - np.quantile(expected, quantile)
        assert abs(difference) < 0.06 * expected.std(), quantile
    if "ntruncated" not in name and name != "normal":  # bounded
        assert abs(found).max() == pytest.approx(abs(expected).max(), rel=1e-2)
    assert abs(np.corrcoef(found[:, 0], found[:, 1])[0, 1]) < 0.1
    assert abs(np.corrcoef(found[:-1, 0], found[1:, 0])[0, 1]) < 0.1


def test_a_row_depends_on_its_seed_and_id_alone() -> None:
    ids = np.random.default_rng(0).integers(-(2**63), 2**63, 20)
    first = of.RandomNormal(seed=3)
    found = rows(first, None, ids)
    np.testing.assert_array_equal(rows(of.RandomNormal(seed=3), None, ids[::-1])[::-1], found)
    np.testing.assert_array_equal(rows(first, None), rows(first, 2 * ROWS))
    assert not (rows(of.RandomNormal(seed=4), None, ids) == found).any()
    assert len(np.unique(found)) == found.size


def test_without_a_seed_it_follows_that_of_the_program() -> None:
    found = []
    for seed in (1, 1, 2):
        keras.utils.set_random_seed(seed)
        found += [rows("uniform"), rows("uniform")]
    np.testing.assert_array_equal(found[:2], found[2:4])
    for other in (found[1], found[4]):
        assert not (found[0] == other).all(1).any()


def test_seeds_of_all_kinds_make_different_rows() -> None:
    generator = keras.random.SeedGenerator(7)
    seeds: list[Structure] = [0, 2**63 - 1, 2**63, 2**64 - 1, -1, generator, generator]
    found = [rows(of.RandomUniform(seed=seed), None) for seed in seeds]
    np.testing.assert_array_equal(found[3], found[4])  # modulo 2**64
    different = [each for number, each in enumerate(found) if number != 3]
    assert all(not (a == b).all(1).any() for n, a in enumerate(different) for b in different[:n])


class Own(keras.initializers.VarianceScaling):
    def __call__(self, shape: Structure, dtype: Argument = None) -> Array:
        return np.zeros(shape)


@pytest.mark.parametrize(
    "initializer",
    [of.Orthogonal(), of.Identity(), of.Constant(np.zeros(DIM)), Own(), lambda shape, dtype: np.zeros(shape)],
    ids=["orthogonal", "identity", "array", "own", "function"],
)
def test_what_makes_all_rows_at_once_is_refused(initializer: Argument) -> None:
    with pytest.raises(UnsupportedError, match=r"rows of a table are made one by one.* load_rows\(\)"):
        initial_of(initializer, ROWS, DIM)


def test_a_scale_by_the_number_of_rows_needs_one() -> None:
    for kind in ("GlorotUniform", "HeNormal"):
        with pytest.raises(UnsupportedError, match=rf"{kind} divides by the number of rows \(mode='fan_(in|avg)'\)"):
            initial_of(getattr(of, kind)(), None, DIM)
    made, _ = initial_of(of.VarianceScaling(1.0, "fan_out", "uniform"), None, DIM)
    assert made.b == pytest.approx(np.sqrt(3 / DIM))
