"""Hooks: functions of tfps in the place of attributes of Keras and TensorFlow, called with the original first.

Tested in tests/strategy/test_patches.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

from tfps.errors import outlined
from tfps.graph.patches import Patch, strategy_of
from tfps.keras_hooks.keras_private import check
from tfps.types import Function, Value

PATCHES: list[Patch] = []  # of all modules with hooks that have been imported


def replaces(owner: type | ModuleType, name: str, test: str, why: str = "") -> Callable[[Function], Function]:
    """Lets `hook(original, ...)` take the place of `owner.name`.

    Without `why` the first paragraph of the hook's docstring says what for.
    """
    check(owner, name)

    def add(hook: Function) -> Function:
        @functools.wraps(hook)
        def wrap(original: Function) -> Function:
            def call(*args: object, **options: object) -> object:
                try:
                    return hook(original, *args, **options)
                except Exception as error:
                    raise outlined(error)  # noqa: B904  # the same error

            return call

        said = " ".join((hook.__doc__ or "").partition("\n\n")[0].split()).rstrip(".")
        PATCHES.append(Patch(owner, name, wrap, why or said[:1].lower() + said[1:], test))
        return hook

    return add


def _for(model_of: Function, hook: Function) -> Function:
    @functools.wraps(hook)
    def method(original: Function, self: Value, *args: object, **options: object) -> object:
        if (strategy := strategy_of(model_of(self))) is None:
            return original(self, *args, **options)
        return hook(original, strategy, self, *args, **options)

    return method


def for_models(hook: Function) -> Function:
    """Has `hook(original, strategy, model, ...)` called for models that have a strategy of tfps, else the original."""
    return _for(lambda model: model, hook)


def for_callbacks(hook: Function) -> Function:
    """Has `hook(original, strategy, callback, ...)` called for callbacks of such models."""
    return _for(lambda callback: callback.model, hook)
