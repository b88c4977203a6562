"""How an attribute of Keras or TensorFlow is replaced, and how a replacement knows the models of tfps.

Each attribute is replaced once, by the decorator `replaces` of `tfps/keras_hooks/hooks.py` or, below it, by an entry
of a tuple `PATCHES`; `tfps/strategy/patches.py` is the table of all.

Tested in tests/strategy/test_patches.py.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType

import tensorflow as tf

from tfps.types import Function, Model


class BaseStrategy(tf.distribute.Strategy):
    """What tells `tfps.Strategy` from others in the folders below it."""


open_strategies: weakref.WeakSet[BaseStrategy] = weakref.WeakSet()  # that have not been closed; main thread only


@dataclass(frozen=True)
class Patch:
    """One attribute that is replaced."""

    owner: type | ModuleType
    name: str  # of the attribute
    wrap: Callable[[Function], Function]  # makes the replacement from the original
    why: str  # what for, for docs/keras_patches.md
    test: str  # a file with tests of what it does

    @property
    def place(self) -> str:
        """The attribute as a reader knows it."""
        owner = self.owner.__name__.replace("tensorflow._api.v2.", "tf.")
        return f"{owner}.{self.name}"


def install(patches: Iterable[Patch]) -> None:
    for patch in patches:
        original = getattr(patch.owner, patch.name)
        setattr(patch.owner, patch.name, functools.wraps(original)(patch.wrap(original)))


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replaces an attribute of `owner` within the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def strategy_of(model: Model) -> BaseStrategy | None:
    """Returns the strategy of `model` if it is one of tfps."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy if isinstance(strategy, BaseStrategy) else None


def replica_context() -> tf.distribute.ReplicaContext | None:
    """Returns the context of the replica function of a strategy of tfps that this thread runs, if any."""
    context = tf.distribute.get_replica_context()
    return context if context is not None and isinstance(context.strategy, BaseStrategy) else None


def scope_outside(strategy: tf.distribute.Strategy | None) -> contextlib.AbstractContextManager[object]:
    """The scope of `strategy`, if it is one of tfps and this thread is in none."""
    if not isinstance(strategy, BaseStrategy) or tf.distribute.has_strategy():
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[object] = strategy.scope()
    return scope
