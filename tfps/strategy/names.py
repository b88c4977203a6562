"""Names of variables as all ranks have them: without the numbers that Keras gives by itself.

Keras calls the third layer of a class that has no name `dense_2`, counting all of a process. A rank that has built or
loaded a model for itself counts on from there.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import keras

from tfps.strategy.variables import GatedVariable

_NUMBERED = re.compile(r"(.+?)_\d+")
_OWN_PREFIXES = ("seed_generator", "variable")  # keras.random.SeedGenerator and Variable, which are no bases of others


def own_name(variable: Any) -> str:
    """As this rank calls it: for people."""
    return str(variable.name).removesuffix(":0")


def common_name(variable: Any) -> str:
    """As all ranks call it: for comparisons.

    A name with a number that Keras might have given is taken without it, so that names which a user gave in the same
    way (`dense_1`, `dense_2`) are told apart by their order, shapes and dtypes only.
    """
    name, owner = own_name(variable), variable.owner if isinstance(variable, GatedVariable) else None
    if owner is not None:  # a slot, whose name has that of the variable in it: adam/dense_2_kernel_momentum
        *scopes, last = name.split("/")
        last = last.replace(own_name(owner).replace("/", "_"), common_name(owner).replace("/", "_"))
        name = "/".join([*scopes, last])
    return unnumbered(name)


def unnumbered(name: str) -> str:
    """`name`, of a variable, without the numbers that Keras might have given.

    >>> unnumbered("sequential_1/dense_4/kernel")
    'sequential/dense/kernel'
    """
    parts: list[str] = []
    around = prefix = ""
    for part in name.split("/"):
        if prefix and part.startswith(f"{around}_"):  # seed_generator_1/seed_generator_1_state
            parts.append(prefix + part.removeprefix(around))
            continue
        found = _NUMBERED.fullmatch(part)
        around, prefix = part, found[1] if found and _is_given(found[1]) else ""
        parts.append(prefix or part)
    return "/".join(parts)


@functools.cache
def _is_given(prefix: str) -> bool:
    """Whether Keras begins names with `prefix` by itself: it is how it writes the name of a class."""
    bases = (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, keras.losses.Loss)
    return prefix in _OWN_PREFIXES or any(prefix in map(_snake, _below(base)) for base in bases)


def _below(kind: Any) -> Iterator[str]:
    """Names of the class `kind` and of all that derive from it."""
    yield kind.__name__
    for each in kind.__subclasses__():
        yield from _below(each)


def _snake(name: str) -> str:
    """As Keras writes it: `BatchNormalization` is `batch_normalization`, `LSTMCell` `lstm_cell`."""
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
