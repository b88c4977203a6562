"""What a row begins with: a pure function of the table's seed and the row's id.

The random numbers are counter-based (Salmon and others: Parallel random numbers: as easy as 1, 2, 3, SC 2011): number j
of a row is the mix of its key plus j steps, as SplitMix64 makes them (see hashing.py). From them only sums, products,
quotients and roots are made, which IEEE 754 rounds in one way. NumPy's logarithms may differ in the last bit from one
kind of processor to another, and pservers must agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tfps.errors import ConfigError
from tfps.exchange.requests import Ids
from tfps.exchange.rules import CHUNK, Floats
from tfps.tables.hashing import GOLDEN, mix

Doubles = NDArray[np.float64]

KINDS = ("constant", "uniform", "normal", "truncated_normal")
_WORD = 2**64
_LARGEST = float(np.finfo(np.float32).max)
_WITHIN = math.erf(math.sqrt(2))  # how much of a normal distribution lies within two standard deviations
_ROOT_HALF, _LOG_2 = math.sqrt(0.5), math.log(2)

# PPND7 of Wichura's Algorithm AS 241, the percentage points of the normal distribution (Applied Statistics 37, 1988):
# seven digits. Numerator and denominator, highest power first: near the middle, and on both sides of r = 5.
_MIDDLE = (
    (5.9109374720e1, 1.5929113202e2, 5.0434271938e1, 3.3871327179e0),
    (6.7187563600e1, 7.8757757664e1, 1.7895169469e1, 1.0),
)
_SIDE = (
    (1.7023821103e-1, 1.3067284816e0, 2.7568153900e0, 1.4234372777e0),
    (1.2021132975e-1, 7.3700164250e-1, 1.0),
)
_FAR = (
    (1.7337203997e-2, 4.2868294337e-1, 3.0812263860e0, 6.6579051150e0),
    (1.2258202635e-2, 2.4197894225e-1, 1.0),
)


@dataclass(frozen=True, slots=True)
class Initial:
    """The distribution of initial values. ConfigError: something is out of range."""

    kind: str  # one of `KINDS`
    a: float  # the constant, the lower bound, or the mean
    b: float  # nothing, the upper bound (never reached unless equal), or the standard deviation

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind of initial values must be one of {', '.join(KINDS)}, got {self.kind!r}")
        for name, value in (("a", self.a), ("b", self.b)):
            if not abs(value) <= _LARGEST:
                raise ConfigError(f"{name} of {self.kind} initial values must be a finite float32, got {value}")
        if self.kind == "uniform" and not (self.a <= self.b and self.b - self.a <= _LARGEST):
            raise ConfigError(f"uniform initial values must be from a to b with a <= b, got {self.a} and {self.b}")
        if self.kind in ("normal", "truncated_normal") and self.b < 0:
            raise ConfigError(f"b of {self.kind} initial values, the standard deviation, must be >= 0, got {self.b}")

    def values(self, seed: int, ids: Ids, dim: int) -> Floats:
        """The initial rows of `ids`: float32 [n, dim]. Truncated: within two standard deviations, as Keras' is."""
        if self.kind == "constant":
            return np.full((ids.size, dim), self.a, np.float32)
        rows = np.empty((ids.size, dim), np.float32)
        start = mix(np.array([seed % _WORD], np.uint64) + GOLDEN)
        words = np.arange(1, -(-dim // 2) + 1, dtype=np.uint64) * GOLDEN  # of which each makes two numbers
        each = max(CHUNK // dim, 1)
        for begin in range(0, ids.size, each):
            keys = mix(mix(ids[begin : begin + each].astype(np.uint64)) + start)
            random = mix(keys[:, None] + words).view(np.uint32)[:, :dim]
            self._of_random(random, rows[begin : begin + each])
        return rows

    def _of_random(self, random: NDArray[np.uint32], out: Floats) -> None:
        if self.kind == "uniform":
            low, high = np.float32(self.a), np.float32(self.b)
            np.multiply(random >> np.uint32(8), np.float32(2.0**-24) * (high - low), out=out, casting="unsafe")
            out += low
            if high > low:  # which the sum may have been rounded to
                np.minimum(out, np.nextafter(high, low), out=out)
            return
        central = random.astype(np.float64)  # from here on: the probability of what is less, minus one half
        central += 0.5 - 2.0**31
        central *= 2.0**-32 * (_WITHIN if self.kind == "truncated_normal" else 1.0)
        deviations = _normal(central)
        if self.kind == "truncated_normal":
            np.clip(deviations, -2.0, 2.0, out=deviations)  # the seventh digit
        deviations *= self.b
        deviations += self.a
        out[...] = deviations


def _normal(central: Doubles) -> Doubles:
    """How many standard deviations from the mean a probability, given minus one half, lies."""
    deviations = central * _ratio(_MIDDLE, 0.180625 - central * central)
    side = np.nonzero(np.abs(central) > 0.425)
    numbers = central[side]
    r = np.sqrt(-_log(0.5 - np.abs(numbers)))
    tails = np.where(r <= 5, _ratio(_SIDE, r - 1.6), _ratio(_FAR, r - 5))
    deviations[side] = np.copysign(tails, numbers)
    return deviations


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: Doubles) -> Doubles:
    above, below = (_polynomial(each, x) for each in coefficients)
    above /= below
    return above


def _polynomial(coefficients: tuple[float, ...], x: Doubles) -> Doubles:
    """By Horner's rule, highest power first."""
    total = x * coefficients[0]
    for each in coefficients[1:-1]:
        total += each
        total *= x
    total += coefficients[-1]
    return total


def _log(x: Doubles) -> Doubles:
    """The logarithm of positive numbers to 12 digits, in operations that IEEE 754 rounds in one way."""
    fraction, exponent = np.frexp(x)
    small = fraction < _ROOT_HALF
    fraction[small] *= 2
    exponent[small] -= 1
    s = (fraction - 1) / (fraction + 1)
    series = tuple(2 / power for power in range(13, 0, -2))  # of the inverse hyperbolic tangent, twice
    found: Doubles = s * _polynomial(series, s * s) + exponent * _LOG_2
    return found
