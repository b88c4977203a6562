"""The rules in NumPy. That they are Keras' is in tests/policies/test_remote_bucket.py, which has TensorFlow."""

from __future__ import annotations

import itertools
import platform
import threading

import numpy as np
import pytest

from tfps.exchange import rules
from tfps.exchange.rules import flushed
from tfps.exchange.update_spec import CONSTANTS, SCALARS, SLOTS, UpdateSpec

ITEMS = 2 * rules.CHUNK + 77
VALUES = {
    "momentum": 0.9,
    "nesterov": 1.0,
    "epsilon": 1e-7,
    "l1": 1e-3,
    "l2_shrinkage": 0.1,
}


def spec_of(rule: str, sizes: tuple[int, ...], decayed: tuple[bool, ...]) -> UpdateSpec:
    constants = {name: VALUES.get(name, 0.9) for name in CONSTANTS[rule]}
    slots = dict.fromkeys((*SLOTS.get(rule, ("momentum",)), *(("momentum",) if rule == "rmsprop" else ())), 0.1)
    return UpdateSpec(
        rule, (*constants.items(), ("weight_decay", 0.01)), (*slots.items(), ("average", 0.0)), sizes, decayed
    )


def ran(rule: str, cuts: list[int]) -> list[bytes]:
    """Parameters and slots after three updates of the parts between `cuts`, each with its own call."""
    spec = spec_of(rule, (ITEMS,), (True,))
    random = np.random.default_rng(0)
    w = random.normal(size=ITEMS).astype(np.float32)
    slots = {name: np.full(ITEMS, value, np.float32) for name, value in spec.slots}
    for step in range(3):
        g = random.normal(size=ITEMS).astype(np.float32)
        numbers = {"iteration": step, "learning_rate": 0.01, "average_momentum": 0.9, "overwrite": step == 1}
        numbers |= dict.fromkeys(SCALARS.get(rule, ()), 0.5)
        for begin, end in itertools.pairwise(cuts):
            part = slice(begin, end)
            of_part = {name: slot[part] for name, slot in slots.items()}
            rules.update(spec, [(0, end - begin, True)], w[part], of_part, g[part], numbers)
    return [w.tobytes(), *(slot.tobytes() for slot in slots.values())]


@pytest.mark.parametrize("rule", CONSTANTS)
def test_where_a_variable_is_cut_does_not_change_a_bit(rule: str) -> None:
    whole = ran(rule, [0, ITEMS])
    assert ran(rule, [0, 1, 1000, rules.CHUNK + 5, ITEMS]) == whole
    assert len(set(whole)) == len(whole)
    assert all(np.isfinite(np.frombuffer(each, np.float32)).all() for each in whole)


def test_weight_decay_applies_to_its_runs_only() -> None:
    spec = spec_of("sgd", (4, 4), (False, True))
    w, slots = np.ones(8, np.float32), {"momentum": np.zeros(8, np.float32)}
    rules.update(spec, [(0, 4, False), (4, 8, True)], w, slots, np.zeros(8, np.float32), {"learning_rate": 0.5})
    assert (w[:4] == 1).all()
    np.testing.assert_allclose(w[4:], 0.995, rtol=1e-6)


def test_momentum_without_gradients_decays_to_zero_and_not_into_slow_denormals() -> None:
    spec = spec_of("sgd", (8,), (False,))
    w, slots = np.ones(8, np.float32), {"momentum": np.full(8, 1e-37, np.float32)}
    for _ in range(40):
        rules.update(spec, [(0, 8, False)], w, slots, np.zeros(8, np.float32), {"learning_rate": 0.5})
    assert (slots["momentum"] == 0).all()


# Denormal numbers are zero inside the block, on this thread, and nowhere else

glibc = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64") or platform.libc_ver()[0] != "glibc",
    reason="flushing is for glibc on x86-64 and ARM",
)


def product() -> float:
    return float((np.array([1e-30] * 64, np.float32) * np.float32(1e-10))[0])


@glibc
def test_denormal_results_are_zero_inside_and_come_back_after_an_error_too() -> None:
    assert product() > 0
    with pytest.raises(ZeroDivisionError), flushed():
        assert product() == 0
        raise ZeroDivisionError
    assert product() > 0


@glibc
def test_other_threads_keep_them() -> None:
    found: list[float] = []
    inside = threading.Event()

    def work() -> None:
        inside.wait(60)
        found.append(product())

    thread = threading.Thread(target=work)  # one that begins inside the block would inherit it
    thread.start()
    with flushed():
        inside.set()
        thread.join()
    assert found[0] > 0


@glibc
def test_a_block_within_a_block_changes_nothing() -> None:
    with flushed():
        with flushed():
            assert product() == 0
        assert product() == 0
