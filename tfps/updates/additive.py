"""Tells from the graph whether a replica's assignment to a sum adds to it.

A metric's variable is a sum over replicas (Keras' default). `v.assign(v + x)` adds; a running maximum, a moving average
or the last batch's value does not, and the sum of what replicas have of it means nothing.

Tested in tests/updates/test_additive.py, and by tests/integration/programs_metrics.py with real replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import tensorflow as tf

from tfps.graph.ops import computed_from, is_argument, outside
from tfps.types import Value, Variable

# What changes a value so that parts of a sum no longer add up.
_OTHER = {
    *("Maximum", "Minimum", "Mul", "RealDiv", "Div", "DivNoNan", "FloorDiv", "Pow", "Square", "Sqrt", "Rsqrt", "Exp"),
    *("Log", "Log1p", "Abs", "Neg", "Max", "Min", "Mean", "Prod", "ClipByValue", "Mod", "FloorMod", "Reciprocal"),
}


def adds_up(component: Variable, value: Value, replica: tf.Graph | None) -> bool:
    """Whether `value`, a tensor of a graph, may be the value of `component` plus something, or is zero everywhere.

    `replica`: the graph of the replica function, whose arguments are the batch.
    """
    constant = tf.get_static_value(value)
    if constant is not None:
        return not constant.any()

    def uses(tensor: tf.Tensor) -> bool:
        return any(each.dtype == tf.resource and outside(each) is component.handle for each in tensor.op.inputs)

    def goes_on(tensor: tf.Tensor) -> bool:
        return tensor.op.type != "ReadVariableOp" and not uses(tensor)

    def found(values: Iterable[tf.Tensor], goes_on: Callable[[tf.Tensor], bool]) -> list[tf.Tensor]:
        return [each for each in computed_from(values, goes_on) if tf.is_symbolic_tensor(each)]

    added = found([value], lambda each: goes_on(each) and each.op.type not in _OTHER)
    changed = found([part for each in added if each.op.type in _OTHER for part in each.op.inputs], goes_on)
    if any(each.op.type == "ReadVariableOp" and uses(each) for each in changed):
        return False
    # It is read, or a function hides whether it is.
    return any(uses(each) or (is_argument(each) and each.graph is not replica) for each in [*added, *changed])


def kept_part(component: Variable, value: tf.Tensor) -> tf.Tensor | None:
    """Returns the part of `value`, a tensor of a graph, that is what `component` had, times something.

    As `0.9 * v` of `0.9 * v + 0.1 * x`. Zeros if `value` is not computed from it; None if it is, but not like that.
    """
    captures = getattr(value.graph, "captures", ())
    handles = {id(inside) for _, inside in captures if outside(inside) is component.handle}
    try:
        found = _kept_part(value, handles)
    except _NotLinearError:
        return None
    return tf.zeros_like(value) if found is None else tf.broadcast_to(found, tf.shape(value))


class _NotLinearError(Exception):
    """A value is not a multiple of what a variable had, plus something."""


def _kept_part(tensor: tf.Tensor, handles: set[int]) -> tf.Tensor | None:
    if not any(id(each) in handles for each in computed_from([tensor])):
        return None
    if tensor.op.type == "ReadVariableOp":
        return tensor
    op = tensor.op
    if op.type not in ("Identity", "Cast", "Neg", "AddV2", "Add", "Sub", "Mul", "RealDiv"):
        raise _NotLinearError
    parts = [_kept_part(each, handles) for each in op.inputs]
    if op.type in ("Identity", "Cast"):
        return tf.cast(parts[0], tensor.dtype)
    if op.type == "Neg":
        return tf.negative(parts[0])
    if op.type in ("AddV2", "Add", "Sub"):
        first, second = (
            tf.zeros_like(each) if part is None else part for each, part in zip(op.inputs, parts, strict=True)
        )
        return first - second if op.type == "Sub" else first + second
    if op.type == "Mul" and (parts[0] is None or parts[1] is None):
        return op.inputs[0] * parts[1] if parts[0] is None else parts[0] * op.inputs[1]
    if op.type == "RealDiv" and parts[1] is None:
        return parts[0] / op.inputs[1]
    raise _NotLinearError
