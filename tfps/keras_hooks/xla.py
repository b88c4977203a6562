"""`jit_compile=True` of Keras' models: the strategy has their steps compiled in parts, so Keras must not compile them.

Tested in tests/strategy/test_xla.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Iterator

from tfps.graph.patches import BaseStrategy, replaced, strategy_of
from tfps.keras_hooks.hooks import replaces
from tfps.keras_hooks.keras_private import Stepper, Trainer, supports_jit, without_jit
from tfps.types import Function, Model, Structure

logger = logging.getLogger("tfps")
_TEST = "tests/strategy/test_xla.py"


class _Asked(threading.local):
    by_keras: bool | None = None  # what the model has asked for whose step this thread traces; None: nothing


_asked = _Asked()
_declining: weakref.WeakSet[Model] = weakref.WeakSet()  # models that a program has compiled with jit_compile=False


def asked_by_keras() -> bool | None:
    return _asked.by_keras


def in_parts(asked: bool | None) -> contextlib.AbstractContextManager[None]:
    """In the block replica functions are those of a model that has `asked` for XLA, declined it, or said nothing."""
    return replaced(_asked, "by_keras", asked)


def note_asked(model: Model, asked: object) -> None:
    """Notes the `jit_compile` that a program has given to `compile`: Keras makes False of "auto", too."""
    (_declining.add if asked is False else _declining.discard)(model)


@replaces(Trainer, "compile_from_config", _TEST)
def _compile_from_config(original: Function, model: Model, config: Structure) -> object:
    """What a file says may have been "auto"."""
    result = original(model, config)
    _declining.discard(model)
    return result


@contextlib.contextmanager
def made_without_xla(model: Model) -> Iterator[bool | None]:
    """In the block Keras makes functions of a `model` of tfps without XLA; yields what it has asked for."""
    if strategy_of(model) is None or not model.jit_compile:
        yield False if model in _declining else None
        return
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
    if asked is not None and (function := model.predict_function) is not before:

        @functools.wraps(function)
        def step(*args: object) -> object:
            with in_parts(asked):
                return function(*args)

        model.predict_function = step
    return result
