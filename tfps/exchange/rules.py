"""Keras' elementwise update rules in NumPy, in place, in float32, in the order of operations of Keras' TensorFlow code.

Scalars that are the same for all elements (powers of the betas, say) are computed by the worker with TensorFlow and
come with the push: a power may round differently in NumPy.

Numbers below the smallest normal float become 0 here, as in TensorFlow's threads, whose results updates must repeat.
They would also take a hundred times as long: momentum of a weight without gradients decays into them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tfps.exchange.update_spec import AVERAGE, UpdateSpec

Floats = NDArray[np.float32]
CHUNK = 16 * 1024  # items: 64 KiB of each array, so that all of a chunk stay in a core's cache

_f = np.float32

# Where the control register is in glibc's fenv_t, and its bits "flush to zero" (and, on x86, "denormals are zero").
_LAYOUTS = {"x86_64": (32, 28, 0x8040), "aarch64": (8, 0, 1 << 24)}  # bytes, offset, bits
_REGISTER = struct.Struct("<I")


@dataclass(slots=True)
class Part:
    """A contiguous part of a variable in one update."""

    w: Floats  # parameters, updated in place
    g: Floats  # the gradient, not changed
    slots: Mapping[str, Floats]  # updated in place
    k: Mapping[str, float]  # constants
    n: Mapping[str, np.float32]  # the step's scalars


def _average(slot: Floats, rho: float, new: Floats) -> None:
    new = new * _f(1 - rho)
    slot *= _f(rho)
    slot += new


def _sgd(p: Part) -> None:
    step = p.g * p.n["learning_rate"]
    if not p.k["momentum"]:
        p.w -= step
        return
    m, momentum = p.slots["momentum"], _f(p.k["momentum"])
    m *= momentum
    m -= step
    p.w += m * momentum - step if p.k["nesterov"] else m


def _adam(p: Part) -> None:
    """Adam and AdamW (https://arxiv.org/abs/1412.6980), with `velocity_hat` as AMSGrad."""
    m, v = p.slots["momentum"], p.slots["velocity"]
    step = p.g - m  # in place from here on: most jobs spend their pservers' time here
    step *= _f(1 - p.k["beta_1"])
    m += step
    np.square(p.g, out=step)
    step -= v
    step *= _f(1 - p.k["beta_2"])
    v += step
    if (hat := p.slots.get("velocity_hat")) is not None:
        v = np.maximum(hat, v, out=hat)
    root = np.sqrt(v)
    root += _f(p.k["epsilon"])
    np.multiply(m, p.n["alpha"], out=step)
    step /= root
    p.w -= step


def _adamax(p: Part) -> None:
    m, u = p.slots["momentum"], p.slots["norm"]
    m += (p.g - m) * _f(1 - p.k["beta_1"])
    u *= _f(p.k["beta_2"])
    np.maximum(u, np.abs(p.g), out=u)
    p.w -= m * p.n["learning_rate"] / ((u + _f(p.k["epsilon"])) * p.n["power_left"])


def _nadam(p: Part) -> None:
    m, v, n = p.slots["momentum"], p.slots["velocity"], p.n
    m += (p.g - m) * (_f(1) - _f(p.k["beta_1"]))
    v += (np.square(p.g) - v) * (_f(1) - _f(p.k["beta_2"]))
    step = m * n["next_momentum"] / n["next_left"] + p.g * n["momentum_left"] / n["product_left"]
    p.w -= step * n["learning_rate"] / (np.sqrt(v / n["power_left"]) + _f(p.k["epsilon"]))


def _rmsprop(p: Part) -> None:
    v = p.slots["velocity"]
    _average(v, p.k["rho"], np.square(p.g))
    root = v
    if (mean := p.slots.get("average_gradient")) is not None:
        _average(mean, p.k["rho"], p.g)
        root = v - np.square(mean)
    step = p.g * p.n["learning_rate"] / np.sqrt(root + _f(p.k["epsilon"]))
    if p.k["momentum"] > 0:
        m = p.slots["momentum"]
        m *= _f(p.k["momentum"])
        m += step
        step = m
    p.w -= step


def _adagrad(p: Part) -> None:
    accumulator = p.slots["accumulator"]
    accumulator += np.square(p.g)
    p.w -= p.g * p.n["learning_rate"] / np.sqrt(accumulator + _f(p.k["epsilon"]))


def _adadelta(p: Part) -> None:
    gradients, deltas = p.slots["accumulated_grad"], p.slots["accumulated_delta_var"]
    epsilon = _f(p.k["epsilon"])
    _average(gradients, p.k["rho"], np.square(p.g))
    step = -(np.sqrt(deltas + epsilon) * p.g / np.sqrt(gradients + epsilon))
    _average(deltas, p.k["rho"], np.square(step))
    p.w += step * p.n["learning_rate"]


def _ftrl(p: Part) -> None:
    """Ftrl (https://research.google.com/pubs/archive/41159.pdf) with shrinkage, and -0.5 as the learning rate's power.

    TensorFlow computes that power as a root, and others with last bits that the rule's differences of powers amplify.
    """
    accumulator, linear = p.slots["accumulator"], p.slots["linear"]
    lr, l1, before = p.n["learning_rate"], _f(p.k["l1"]), np.sqrt(accumulator)
    accumulator += np.square(p.g)
    root = np.sqrt(accumulator)
    linear += p.g + p.w * _f(2 * p.k["l2_shrinkage"]) - (root - before) / lr * p.w
    p.w[:] = (np.maximum(np.minimum(linear, l1), -l1) - linear) / (root / lr + p.n["l2_twice"])


def _lion(p: Part) -> None:
    """Lion (https://arxiv.org/abs/2302.06675)."""
    m, beta_1, beta_2 = p.slots["momentum"], _f(p.k["beta_1"]), _f(p.k["beta_2"])
    p.w -= np.sign(m * beta_1 + p.g * (_f(1) - beta_1)) * p.n["learning_rate"]
    m *= beta_2
    m += p.g * (_f(1) - beta_2)


_ALL = _sgd, _adam, _adamax, _nadam, _rmsprop, _adagrad, _adadelta, _ftrl, _lion
_RULES: dict[str, Callable[[Part], None]] = {rule.__name__.lstrip("_"): rule for rule in _ALL}


@functools.cache
def _access() -> tuple[Callable[..., int], Callable[..., int], int, int, int] | None:
    layout = _LAYOUTS.get(platform.machine())
    if layout is None or platform.libc_ver()[0] != "glibc":
        return None
    try:
        library = ctypes.CDLL("libm.so.6")
        return library.fegetenv, library.fesetenv, *layout
    except (OSError, AttributeError):
        return None


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Makes this thread's floats flush to zero inside the block; without glibc on x86-64 or ARM nothing changes."""
    access = _access()
    if access is None:
        yield
        return
    get, put, size, offset, bits = access
    before = ctypes.create_string_buffer(size)
    get(before)
    inside = ctypes.create_string_buffer(before.raw, size)
    _REGISTER.pack_into(inside, offset, _REGISTER.unpack_from(before, offset)[0] | bits)
    put(inside)
    try:
        yield
    finally:
        put(before)


def update(
    spec: UpdateSpec,
    runs: list[tuple[int, int, bool]],
    w: Floats,
    slots: Mapping[str, Floats],
    g: Floats,
    scalars: Mapping[str, float],
) -> None:
    """Updates parameters `w` and `slots` in place with the gradient `g`; all are flat.

    Args:
        runs: first item, end, and whether weight decay applies.
    """
    rule, k = _RULES[spec.rule], dict(spec.constants)
    with flushed(), np.errstate(all="ignore"):
        n = {name: _f(value) for name, value in scalars.items()}
        for first, end, decayed in runs:
            for begin in range(first, end, CHUNK):
                part = slice(begin, min(begin + CHUNK, end))
                of_part = {name: slot[part] for name, slot in slots.items()}
                p = Part(w[part], g[part], of_part, k, n)
                if decayed:
                    p.w -= p.w * _f(k["weight_decay"]) * n["learning_rate"]
                rule(p)
                if AVERAGE in slots:
                    average, momentum = p.slots[AVERAGE], n["average_momentum"]
                    average *= momentum
                    average += p.w * (_f(1) - momentum)
                    if n["overwrite"]:
                        p.w[:] = average
