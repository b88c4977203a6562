"""Global parameters in place of a worker's own ones: what is evaluated and saved in modes "diloco" and "local".

Tested in tests/policies/test_outer.py and tests/integration/test_local.py.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfps.policies.outer_optimizer import copy_of
from tfps.updates.variables import GatedVariable


class GlobalValues:
    """Gives variables the values of their global copies for a while. Used by the main thread."""

    def __init__(self) -> None:
        # By unique id, those that have a global copy.
        self._variables: weakref.WeakValueDictionary[str, GatedVariable] = weakref.WeakValueDictionary()
        self._own: dict[str, list[tf.Tensor]] | None = None  # values by unique id while global ones take their place

    def add(self, variable: GatedVariable) -> None:
        """Adds a variable that has a global copy."""
        self._variables[variable._unique_id] = variable

    @property
    def used(self) -> bool:
        """Whether global values take the place of own ones now."""
        return self._own is not None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """In the block variables have their global values."""
        if self._own is not None:
            yield
            return
        with tf.init_scope():
            variables = list(self._variables.values())
            for variable in variables:
                variable.wait()
                copy_of(variable).wait()
            own = {each._unique_id: [component.read_value() for component in each._values] for each in variables}
        try:
            self._own = own
            for variable in variables:
                _assign(variable, [component.read_value() for component in copy_of(variable)._values])
            yield
        finally:
            try:
                self._take_back(own)
            except KeyboardInterrupt:  # else some would train on from global parameters, on this rank only
                self._take_back(own)
                raise

    def keep(self, variable: GatedVariable) -> None:
        """Notes that the program has assigned a variable, which keeps that value after `in_use`."""
        if self._own is not None:
            self._own.pop(variable._unique_id, None)

    def _take_back(self, own: dict[str, list[tf.Tensor]]) -> None:
        """Gives variables their own values again, but for those that the program has assigned meanwhile."""
        for variable in list(self._variables.values()):
            if variable._unique_id in own:
                _assign(variable, own[variable._unique_id])
        self._own = None


def _assign(variable: GatedVariable, values: Sequence[tf.Tensor]) -> None:
    with tf.init_scope():
        for component, value in zip(variable._values, values, strict=True):
            component.assign(value)
