"""Constants that a functional model captures get rank 0's values, as variables do.

A layer that is called with a tensor, not with an input of the model, computes at once, from this rank's own initial
weights: `Embedding(8, 4)(keras.ops.arange(8))`. The model keeps the result for ever. Closures of a program's own layers
and functions are not seen.

Tested in tests/integration/test_programs.py.
"""

from __future__ import annotations

import itertools

import keras
import numpy as np
import tensorflow as tf

from tfps.graph.patches import strategy_of
from tfps.keras_hooks.hooks import replaces
from tfps.keras_hooks.keras_private import Functional, Node
from tfps.types import Argument, Array, Function, Model

_numbers = itertools.count()


class Captured:
    """One constant among the arguments of an operation: what `InitialValues` needs of a variable.

    Attributes:
        values: itself, the only component.
    """

    trainable = False

    def __init__(self, model: Model, node: Node, place: int, value: tf.Tensor | Array) -> None:
        self.name, self._unique_id = f"{model.name}/{node.operation.name}/constant", f"captured_{next(_numbers)}"
        self._arguments, self._place, self._in_numpy = node.arguments, place, isinstance(value, np.ndarray)
        self.dtype, self.shape, self.values = tf.as_dtype(value.dtype), tf.TensorShape(value.shape), (self,)

    def is_initialized(self) -> bool:
        return True

    def numpy(self) -> Array:
        arguments = self._arguments
        return np.asarray(keras.tree.flatten((arguments.args, arguments.kwargs))[self._place])

    def assign(self, value: Array) -> None:
        """Makes the operation compute with `value`, of the same shape and dtype, where it is not traced yet."""
        both = self._arguments.args, self._arguments.kwargs
        flat = keras.tree.flatten(both)
        flat[self._place] = np.array(value) if self._in_numpy else tf.constant(value)
        self._arguments.args, self._arguments.kwargs = keras.tree.pack_sequence_as(both, flat)


@replaces(Functional, "__init__", "tests/integration/test_programs.py")
def _share_captured(original: Function, model: Model, *args: object, **options: object) -> None:
    """Gives constants that a functional model captures rank 0's values."""
    original(model, *args, **options)
    if (strategy := strategy_of(model)) is None:
        return
    for node in _nodes(model):
        if hasattr(node.arguments, "tfps_captured"):  # of a model that has this node, too
            continue
        flat = enumerate(keras.tree.flatten((node.arguments.args, node.arguments.kwargs)))
        found = [Captured(model, node, place, each) for place, each in flat if _is_constant(each)]
        node.arguments.tfps_captured = found
        strategy.extended.captured(found)


def _nodes(model: Model) -> list[Node]:
    by_depth = model._nodes_by_depth
    return [node for depth in sorted(by_depth) for node in by_depth[depth]]


def _is_constant(value: Argument) -> bool:
    if isinstance(value, np.ndarray):
        return value.size > 0 and value.dtype.kind in "fiub"
    if not isinstance(value, tf.Tensor) or tf.is_symbolic_tensor(value):
        return False
    return (value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool) and value.shape.num_elements() > 0
