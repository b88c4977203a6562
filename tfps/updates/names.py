"""Variable names that are equal on all ranks: without the numbers that Keras adds, counting per process."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import keras

from tfps.types import Variable
from tfps.updates.variables import GatedVariable

_NUMBERED = re.compile(r"(.+?)_\d+")
_OWN_PREFIXES = ("seed_generator", "variable")  # keras.random.SeedGenerator and Variable


def own_name(variable: Variable) -> str:
    """Returns this rank's name of `variable`, for messages."""
    return str(variable.name).removesuffix(":0")


def common_name(variable: Variable) -> str:
    """Returns the name that all ranks share, for comparisons: without numbers that Keras might have added."""
    name, owner = own_name(variable), variable.owner if isinstance(variable, GatedVariable) else None
    if owner is not None:  # a slot: its name contains the variable's, as in adam/dense_2_kernel_momentum
        *scopes, last = name.split("/")
        last = last.replace(own_name(owner).replace("/", "_"), common_name(owner).replace("/", "_"))
        name = "/".join([*scopes, last])
    return unnumbered(name)


def unnumbered(name: str) -> str:
    """Returns the variable name `name` without numbers that Keras might have added.

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
    """Whether Keras generates names that begin with `prefix`, the name of a class in snake case."""
    bases = (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, keras.losses.Loss)
    return prefix in _OWN_PREFIXES or any(prefix in map(_snake, _below(base)) for base in bases)


def _below(kind: type[object]) -> Iterator[str]:
    yield kind.__name__
    for each in kind.__subclasses__():
        yield from _below(each)


def _snake(name: str) -> str:
    """Converts a class name as Keras does: `BatchNormalization` to `batch_normalization`, `LSTMCell` to `lstm_cell`."""
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
