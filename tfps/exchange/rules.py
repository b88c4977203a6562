"""Keras' elementwise update rules in NumPy, in place, in float32, in the order of operations of Keras' TensorFlow code.

Each rule says where it is from in Keras' class of that name. Scalars that are the same for all elements (powers of the
betas, say) are computed by the worker with TensorFlow and come with the push: a power may round differently in NumPy.

Numbers below the smallest normal float become 0 here, as in TensorFlow's threads, whose results updates must repeat.
They would also take a hundred times as long: momentum of a weight without gradients decays into them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
import struct
import threading
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from tfps.exchange.update_spec import AVERAGE, UpdateSpec

Floats = NDArray[np.float32]
CHUNK = 16 * 1024  # items: 64 KiB of each array, so that all of a chunk stay in a core's cache
_SCRATCH = 3

_f = np.float32

# Where the control register is in glibc's fenv_t, and its bits "flush to zero" (and, on x86, "denormals are zero").
_LAYOUTS = {"x86_64": (32, 28, 0x8040), "aarch64": (8, 0, 1 << 24)}  # bytes, offset, bits
_REGISTER = struct.Struct("<I")


class _Scratch(threading.local):
    """Arrays of `CHUNK` items, one set per thread."""

    def __init__(self) -> None:
        self.arrays: list[Floats] = [np.empty(CHUNK, np.float32) for _ in range(_SCRATCH)]


_scratch = _Scratch()


class Part:
    """A contiguous part of a variable in one update.

    Attributes:
        w: parameters, updated in place.
        g: the gradient, not changed.
        slots: by name, updated in place.
        k: constants by name.
        n: the step's scalars by name.
        a, b, c: scratch of the same size.
    """

    __slots__ = ("a", "b", "c", "g", "k", "n", "slots", "w")

    def __init__(
        self, w: Floats, g: Floats, slots: Mapping[str, Floats], k: Mapping[str, float], n: Mapping[str, np.float32]
    ) -> None:
        self.w, self.g, self.slots, self.k, self.n = w, g, slots, k, n
        self.a, self.b, self.c = (each[: len(w)] for each in _scratch.arrays)


def _move(slot: Floats, to: Floats, share: np.float32, out: Floats) -> None:
    """`slot += (to - slot) * share`; `out` may be `to`."""
    np.subtract(to, slot, out=out)
    np.multiply(out, share, out=out)
    np.add(slot, out, out=slot)


def _average(slot: Floats, rho: float, new: Floats, out: Floats) -> None:
    """`slot = rho * slot + (1 - rho) * new`; `out` may be `new`."""
    np.multiply(new, _f(1 - rho), out=out)
    np.multiply(slot, _f(rho), out=slot)
    np.add(slot, out, out=slot)


def _sgd(p: Part) -> None:
    np.multiply(p.g, p.n["learning_rate"], out=p.a)
    if not p.k["momentum"]:
        np.subtract(p.w, p.a, out=p.w)
        return
    m, momentum = p.slots["momentum"], _f(p.k["momentum"])
    np.multiply(m, momentum, out=m)
    np.subtract(m, p.a, out=m)
    if p.k["nesterov"]:
        np.multiply(m, momentum, out=p.b)
        np.subtract(p.b, p.a, out=p.b)
        np.add(p.w, p.b, out=p.w)
    else:
        np.add(p.w, m, out=p.w)


def _adam(p: Part) -> None:
    """Adam and AdamW (https://arxiv.org/abs/1412.6980), with `velocity_hat` as AMSGrad."""
    m, v = p.slots["momentum"], p.slots["velocity"]
    _move(m, p.g, _f(1 - p.k["beta_1"]), p.a)
    np.square(p.g, out=p.a)
    _move(v, p.a, _f(1 - p.k["beta_2"]), p.a)
    if (hat := p.slots.get("velocity_hat")) is not None:
        np.maximum(hat, v, out=hat)
        v = hat
    np.multiply(m, p.n["alpha"], out=p.a)
    np.sqrt(v, out=p.b)
    np.add(p.b, _f(p.k["epsilon"]), out=p.b)
    np.divide(p.a, p.b, out=p.a)
    np.subtract(p.w, p.a, out=p.w)


def _adamax(p: Part) -> None:
    m, u = p.slots["momentum"], p.slots["norm"]
    _move(m, p.g, _f(1 - p.k["beta_1"]), p.a)
    np.abs(p.g, out=p.a)
    np.multiply(u, _f(p.k["beta_2"]), out=u)
    np.maximum(u, p.a, out=u)
    np.multiply(m, p.n["learning_rate"], out=p.a)
    np.add(u, _f(p.k["epsilon"]), out=p.b)
    np.multiply(p.b, p.n["power_left"], out=p.b)
    np.divide(p.a, p.b, out=p.a)
    np.subtract(p.w, p.a, out=p.w)


def _nadam(p: Part) -> None:
    m, v, n = p.slots["momentum"], p.slots["velocity"], p.n
    _move(m, p.g, _f(1) - _f(p.k["beta_1"]), p.a)
    np.square(p.g, out=p.a)
    _move(v, p.a, _f(1) - _f(p.k["beta_2"]), p.a)
    np.multiply(m, n["next_momentum"], out=p.a)
    np.divide(p.a, n["next_left"], out=p.a)
    np.multiply(p.g, n["momentum_left"], out=p.b)
    np.divide(p.b, n["product_left"], out=p.b)
    np.add(p.a, p.b, out=p.a)
    np.multiply(p.a, n["learning_rate"], out=p.a)
    np.divide(v, n["power_left"], out=p.b)
    np.sqrt(p.b, out=p.b)
    np.add(p.b, _f(p.k["epsilon"]), out=p.b)
    np.divide(p.a, p.b, out=p.a)
    np.subtract(p.w, p.a, out=p.w)


def _rmsprop(p: Part) -> None:
    v = p.slots["velocity"]
    np.square(p.g, out=p.a)
    _average(v, p.k["rho"], p.a, p.a)
    if (mean := p.slots.get("average_gradient")) is not None:
        _average(mean, p.k["rho"], p.g, p.a)
        np.square(mean, out=p.b)
        np.subtract(v, p.b, out=p.b)
        np.add(p.b, _f(p.k["epsilon"]), out=p.b)
    else:
        np.add(v, _f(p.k["epsilon"]), out=p.b)
    np.sqrt(p.b, out=p.b)
    np.multiply(p.g, p.n["learning_rate"], out=p.a)
    np.divide(p.a, p.b, out=p.a)
    if p.k["momentum"] > 0:
        m = p.slots["momentum"]
        np.multiply(m, _f(p.k["momentum"]), out=m)
        np.add(m, p.a, out=m)
        np.subtract(p.w, m, out=p.w)
    else:
        np.subtract(p.w, p.a, out=p.w)


def _adagrad(p: Part) -> None:
    accumulator = p.slots["accumulator"]
    np.square(p.g, out=p.a)
    np.add(accumulator, p.a, out=accumulator)
    np.multiply(p.g, p.n["learning_rate"], out=p.a)
    np.add(accumulator, _f(p.k["epsilon"]), out=p.b)
    np.sqrt(p.b, out=p.b)
    np.divide(p.a, p.b, out=p.a)
    np.subtract(p.w, p.a, out=p.w)


def _adadelta(p: Part) -> None:
    gradients, deltas = p.slots["accumulated_grad"], p.slots["accumulated_delta_var"]
    np.square(p.g, out=p.a)
    _average(gradients, p.k["rho"], p.a, p.a)
    np.add(deltas, _f(p.k["epsilon"]), out=p.a)
    np.sqrt(p.a, out=p.a)
    np.multiply(p.a, p.g, out=p.a)
    np.add(gradients, _f(p.k["epsilon"]), out=p.b)
    np.sqrt(p.b, out=p.b)
    np.divide(p.a, p.b, out=p.a)
    np.negative(p.a, out=p.a)
    np.square(p.a, out=p.b)
    _average(deltas, p.k["rho"], p.b, p.b)
    np.multiply(p.a, p.n["learning_rate"], out=p.a)
    np.add(p.w, p.a, out=p.w)


def _ftrl(p: Part) -> None:
    """Ftrl (https://research.google.com/pubs/archive/41159.pdf) with shrinkage, and -0.5 as the learning rate's power.

    TensorFlow computes that power as a root, and others with last bits that the rule's differences of powers amplify.
    """
    accumulator, linear = p.slots["accumulator"], p.slots["linear"]
    lr, l1 = p.n["learning_rate"], _f(p.k["l1"])
    np.square(p.g, out=p.a)
    np.add(accumulator, p.a, out=p.a)  # the new accumulator
    np.sqrt(p.a, out=p.b)
    np.sqrt(accumulator, out=p.c)
    accumulator[:] = p.a
    np.subtract(p.b, p.c, out=p.c)
    np.divide(p.c, lr, out=p.c)
    np.multiply(p.c, p.w, out=p.c)
    np.multiply(p.w, _f(2 * p.k["l2_shrinkage"]), out=p.a)
    np.add(p.g, p.a, out=p.a)
    np.subtract(p.a, p.c, out=p.a)
    np.add(linear, p.a, out=linear)
    np.divide(p.b, lr, out=p.b)
    np.add(p.b, p.n["l2_twice"], out=p.b)
    np.minimum(linear, l1, out=p.a)
    np.maximum(p.a, -l1, out=p.a)
    np.subtract(p.a, linear, out=p.a)
    np.divide(p.a, p.b, out=p.w)


def _lion(p: Part) -> None:
    """Lion (https://arxiv.org/abs/2302.06675)."""
    m, beta_1, beta_2 = p.slots["momentum"], _f(p.k["beta_1"]), _f(p.k["beta_2"])
    np.multiply(m, beta_1, out=p.a)
    np.multiply(p.g, _f(1) - beta_1, out=p.b)
    np.add(p.a, p.b, out=p.a)
    np.sign(p.a, out=p.a)
    np.multiply(p.a, p.n["learning_rate"], out=p.a)
    np.subtract(p.w, p.a, out=p.w)
    np.multiply(m, beta_2, out=m)
    np.multiply(p.g, _f(1) - beta_2, out=p.b)
    np.add(m, p.b, out=m)


_RULES: dict[str, Callable[[Part], None]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamax": _adamax,
    "nadam": _nadam,
    "rmsprop": _rmsprop,
    "adagrad": _adagrad,
    "adadelta": _adadelta,
    "ftrl": _ftrl,
    "lion": _lion,
}


def _decay(p: Part) -> None:
    """Keras' weight decay, before the rule."""
    np.multiply(p.w, _f(p.k["weight_decay"]), out=p.a)
    np.multiply(p.a, p.n["learning_rate"], out=p.a)
    np.subtract(p.w, p.a, out=p.w)


def _follow(p: Part) -> None:
    """Keras' moving average of the parameters, after the rule, which replaces them at times."""
    average, momentum = p.slots[AVERAGE], p.n["average_momentum"]
    np.multiply(average, momentum, out=average)
    np.multiply(p.w, _f(1) - momentum, out=p.a)
    np.add(average, p.a, out=average)
    if p.n["overwrite"]:
        p.w[:] = average


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
    numbers: Mapping[str, float],
) -> None:
    """Updates parameters `w` and `slots` in place with the gradient `g`.

    Args:
        runs: first item, end, and whether weight decay applies.
        w, slots, g: flat float32 arrays of equal size.
        numbers: by name.
    """
    rule, k = _RULES[spec.rule], dict(spec.constants)
    n = {name: _f(value) for name, value in numbers.items()}
    follows = AVERAGE in slots
    with flushed(), np.errstate(all="ignore"):
        for first, end, decayed in runs:
            for begin in range(first, end, CHUNK):
                part = slice(begin, min(begin + CHUNK, end))
                of_part = {name: slot[part] for name, slot in slots.items()}
                p = Part(w[part], g[part], of_part, k, n)
                if decayed:
                    _decay(p)
                rule(p)
                if follows:
                    _follow(p)
