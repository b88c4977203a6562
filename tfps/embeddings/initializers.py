"""Keras' initializers as functions of a seed and an id: a row begins with the same values whoever asks for it first.

Tested in tests/embeddings/test_initializers.py.
"""

from __future__ import annotations

import math
import random

import keras

from tfps.errors import UnsupportedError
from tfps.tables.initial import Initial
from tfps.types import Argument

_TRUNCATED = 0.87962566103423978  # standard deviation of a normal distribution cut off at two of its own
_KNOWN = (
    "Zeros, Ones, Constant, RandomUniform, RandomNormal, TruncatedNormal, VarianceScaling and those derived from it"
)


def initial_of(initializer: Argument, rows: int | None, dim: int) -> tuple[Initial, int]:
    """The initial values of a table of `rows` (None: any) times `dim`, and their seed.

    Raises:
        UnsupportedError: `initializer`, of Keras, is none that makes each row by itself.
    """
    made, of = keras.initializers.get(initializer), keras.initializers
    kind = type(made)
    seed = getattr(made, "seed", 0)
    if not isinstance(seed, int):  # a keras.random.SeedGenerator: as if none had been given
        seed = random.randint(1, 10**9)
    seed = (seed + 2**63) % 2**64 - 2**63  # as int64, which is what a seed is modulo 2**64
    if kind in (of.Zeros, of.Ones):
        return Initial("constant", float(kind is of.Ones), 0.0), 0
    if kind is of.Constant and isinstance(made.value, (int, float)):
        return Initial("constant", float(made.value), 0.0), 0
    if kind is of.RandomUniform:
        return Initial("uniform", float(made.minval), float(made.maxval)), seed
    if kind is of.RandomNormal:
        return Initial("normal", float(made.mean), float(made.stddev)), seed
    if kind is of.TruncatedNormal:
        return Initial("truncated_normal", float(made.mean), float(made.stddev)), seed
    if isinstance(made, of.VarianceScaling) and kind.__call__ is of.VarianceScaling.__call__:
        return _scaled(made, rows, dim), seed
    raise UnsupportedError(
        f"rows of a table are made one by one, with one of Keras' initializers {_KNOWN}, got {initializer!r}; assign "
        "other values with load_rows()"
    )


def _scaled(made: keras.initializers.VarianceScaling, rows: int | None, dim: int) -> Initial:
    counted = made.mode
    if rows is None and counted != "fan_out":
        raise UnsupportedError(
            f"{type(made).__name__} divides by the number of rows (mode={counted!r}), which a table with None has "
            "not; use mode='fan_out', or RandomUniform or RandomNormal"
        )
    fans = {"fan_in": rows, "fan_out": dim, "fan_avg": ((rows or 0) + dim) / 2}
    scale = made.scale / max(1.0, fans[made.mode] or 1)
    if made.distribution == "truncated_normal":
        return Initial("truncated_normal", 0.0, math.sqrt(scale) / _TRUNCATED)
    if made.distribution == "untruncated_normal":
        return Initial("normal", 0.0, math.sqrt(scale))
    limit = math.sqrt(3 * scale)
    return Initial("uniform", -limit, limit)
