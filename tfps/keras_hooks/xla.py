"""`jit_compile=True` of Keras' models: the strategy has their steps compiled in parts, so Keras must not compile them.

Tested in tests/strategy/test_xla.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator

from tfps.graph.patches import BaseStrategy, replaced, strategy_of
from tfps.keras_hooks.hooks import replaces
from tfps.keras_hooks.keras_private import Stepper, supports_jit, without_jit
from tfps.types import Function, Model

logger = logging.getLogger("tfps")
_TEST = "tests/strategy/test_xla.py"


class _Asked(threading.local):
    by_keras = False  # whether the step that this thread traces is of a model that is to be compiled


_asked = _Asked()


def is_asked_by_keras() -> bool:
    return _asked.by_keras


def in_parts(asked: bool) -> contextlib.AbstractContextManager[None]:
    """In the block replica functions are those of a model that is, or is not, to be compiled by XLA."""
    return replaced(_asked, "by_keras", asked)


@contextlib.contextmanager
def made_without_xla(model: Model) -> Iterator[bool]:
    """In the block Keras makes functions of a `model` of tfps without XLA; yields whether the model asks for it."""
    strategy = strategy_of(model)
    if strategy is None or not model.jit_compile:
        yield False
        return
    strategy.extended.compiled.sizes.expected = True
    with without_jit(model):
        yield True


def say_if_lost(strategy: BaseStrategy, model: Model, asked: object, run_eagerly: object) -> None:
    """Logs once that `model`, which was compiled as `asked`, is not compiled by XLA, where it is without a strategy."""
    on_gpu = any("GPU" in each for each in strategy.extended._devices)
    if asked == "auto" and on_gpu and not run_eagerly and supports_jit(model):
        _say_lost()


@functools.cache
def _say_lost() -> None:
    logger.info(
        "tfps: on a GPU Keras has XLA compile models whose jit_compile is 'auto', but not under a tf.distribute "
        "strategy; model.compile(..., jit_compile=True) has it do so (docs/xla.md)"
    )


@replaces(Stepper, "make_predict_function", _TEST)
def _make_predict_function(original: Function, model: Model, force: bool = False) -> object:
    """The step of `predict` is compiled in parts, too."""
    before = model.predict_function
    with made_without_xla(model) as asked:
        result = original(model, force=force)
    if asked and (function := model.predict_function) is not before:

        @functools.wraps(function)
        def step(*args: object) -> object:
            with in_parts(True):
                return function(*args)

        model.predict_function = step
    return result
