"""Tells from the graph whether a replica's assignment to a sum adds to it.

A metric's variable is a sum over replicas (Keras' default). `v.assign(v + x)` adds; a running maximum, a moving average
or the last batch's value does not, and the sum of what replicas have of it means nothing.

Tested in tests/integration/programs_metrics.py, by test_programs.py.
"""

from __future__ import annotations

import tensorflow as tf

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
    reads = _reads(component, value, replica)
    return reads is None or (bool(reads) and not any(reads))


def _reads(component: Variable, value: tf.Tensor, replica: tf.Graph | None) -> list[bool] | None:
    """Returns, for each way from a read of `component` to `value`, whether it changes more than it adds.

    None if a function hides what happens.
    """
    found: list[bool] = []
    hidden = False
    seen: set[tuple[int, bool]] = set()
    left = [(value, False)]
    while left:
        tensor, changed = left.pop()
        if (id(tensor), changed) in seen:
            continue
        seen.add((id(tensor), changed))
        op = tensor.op
        if op.type == "ReadVariableOp":
            if _outside(op.inputs[0]) is component.handle:
                found.append(changed)
            continue
        if op.type == "Placeholder":
            outside = _outside(tensor)
            hidden = hidden or (outside is None and tensor.graph is not replica)
            if tf.is_symbolic_tensor(outside):
                left.append((outside, changed))
            continue
        if any(each.dtype == tf.resource and _outside(each) is component.handle for each in op.inputs):
            hidden = True
            continue
        left += [(each, changed or op.type in _OTHER) for each in op.inputs]
    return None if hidden and not found else found


def _outside(tensor: tf.Tensor) -> Value:
    """Returns what `tensor` stands for outside of the graphs that capture it; None if it is an argument."""
    while tf.is_symbolic_tensor(tensor) and tensor.op.type == "Placeholder":
        tensor = next((each for each, inside in getattr(tensor.graph, "captures", ()) if inside is tensor), None)
    return tensor
