"""Parameters that travel as encoded changes: what is shown is what workers have, and nothing is lost for good."""

from __future__ import annotations

import numpy as np
import pytest

from tfps.exchange.codecs import known
from tfps.exchange.rules import flushed
from tfps.exchange.shown import Change

NAMES = ["bfloat16", "float16", "int8", "topk:0.05", "onebit"]
ITEMS = 2500  # does not divide: blocks of 256 and of 1024


def random(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=ITEMS).astype(np.float32)


class Worker:
    """Adds changes as TensorFlow does: all items, denormals flushed."""

    def __init__(self, codec: str, start: np.ndarray) -> None:
        self.codec, self.variable = known(codec), start.copy()

    def take(self, data: np.ndarray) -> None:
        change = np.empty_like(self.variable)
        self.codec.decode(data, change)
        with flushed(), np.errstate(all="ignore"):
            self.variable = self.variable + change


@pytest.mark.parametrize("codec", NAMES)
def test_what_is_shown_is_bitwise_what_workers_have(codec: str) -> None:
    parameters, worker = random(0), Worker(codec, random(0))
    parameters[:10] = worker.variable[:10] = -0.0
    parameters[10:20] = worker.variable[10:20] = 1e-40  # denormal: TensorFlow's threads make 0 of it
    shown = parameters.copy()
    change = Change(known(codec), shown)
    for step in range(1, 9):
        parameters[20:] += random(step)[20:] * np.float32(0.01)
        data = change.encode(parameters)
        assert data.size == change.wire_bytes(ITEMS)
        worker.take(data)
        assert shown.tobytes() == worker.variable.tobytes()


@pytest.mark.parametrize("codec", NAMES)
def test_what_a_change_could_not_express_is_in_those_after_it(codec: str) -> None:
    parameters, shown = random(0) + random(1) * np.float32(0.01), random(0)
    change = Change(known(codec), shown)
    change.encode(parameters)
    first = np.abs(shown - parameters).mean()
    for _ in range(60):
        change.encode(parameters)
    assert np.abs(shown - parameters).mean() <= max(0.1 * first, 1e-7)


def test_changes_too_small_for_float16_add_up() -> None:
    parameters, shown = np.zeros(8, np.float32), np.zeros(8, np.float32)
    change = Change(known("float16"), shown)
    for _ in range(1000):
        parameters += np.float32(1e-9)  # float16 has nothing between 0 and 6e-8
        change.encode(parameters)
    np.testing.assert_allclose(shown, parameters, atol=3e-8)
    assert shown[0] > 9e-7


@pytest.mark.parametrize("codec", NAMES)
def test_what_is_not_finite_is_shown(codec: str) -> None:
    parameters, worker = random(0), Worker(codec, random(0))
    shown = parameters.copy()
    parameters[7] = np.inf
    worker.take(Change(known(codec), shown).encode(parameters))
    assert not np.isfinite(shown[7])
    np.testing.assert_array_equal(shown, worker.variable)
