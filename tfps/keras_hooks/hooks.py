"""Hooks: functions of tfps in the place of attributes of Keras and TensorFlow, called with the original first.

Tested in tests/strategy/test_patches.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

from tfps.graph.patches import Patch, strategy_of
from tfps.keras_hooks.keras_private import check
from tfps.types import Callback, Function, Model


def replaces(
    patches: list[Patch], owner: type | ModuleType, name: str, test: str, why: str = ""
) -> Callable[[Function], Function]:
    """Lets `hook(original, ...)` take the place of `owner.name`; adds that to `patches`.

    Without `why` the first paragraph of the hook's docstring says what for.
    """
    check(owner, name)

    def add(hook: Function) -> Function:
        @functools.wraps(hook)
        def wrap(original: Function) -> Function:
            def replacement(*arguments: object, **options: object) -> object:
                return hook(original, *arguments, **options)

            return replacement

        said = " ".join((hook.__doc__ or "").partition("\n\n")[0].split()).rstrip(".")
        patches.append(Patch(owner, name, wrap, why or said[:1].lower() + said[1:], test))
        return hook

    return add


def for_models(hook: Function) -> Function:
    """Has `hook(original, strategy, model, ...)` called for models that have a strategy of tfps, else the original."""

    @functools.wraps(hook)
    def method(original: Function, self: Model, *arguments: object, **options: object) -> object:
        if (strategy := strategy_of(self)) is None:
            return original(self, *arguments, **options)
        return hook(original, strategy, self, *arguments, **options)

    return method


def for_callbacks(hook: Function) -> Function:
    """Has `hook(original, strategy, callback, ...)` called for callbacks of such models."""

    @functools.wraps(hook)
    def method(original: Function, self: Callback, *arguments: object, **options: object) -> object:
        if (strategy := strategy_of(self.model)) is None:
            return original(self, *arguments, **options)
        return hook(original, strategy, self, *arguments, **options)

    return method
