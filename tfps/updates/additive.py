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


def kept_part(component: Variable, value: tf.Tensor) -> tf.Tensor | None:
    """Returns the part of `value`, a tensor of a graph, that is what `component` had, times something.

    As `0.9 * v` of `0.9 * v + 0.1 * x`. Zeros if `value` is not computed from it; None if it is, but not like that.
    """
    try:
        found = _kept_part(value, *_computed_from(component, value.graph))
    except _NotLinearError:
        return None
    return tf.zeros_like(value) if found is None else tf.broadcast_to(found, tf.shape(value))


class _NotLinearError(Exception):
    """A value is not a multiple of what a variable had, plus something."""


def _computed_from(component: Variable, graph: tf.Graph) -> tuple[set[int], set[int]]:
    """Returns ids of reads of `component` in `graph`, and of all tensors there that are computed from it."""
    handles = [inside for _, inside in getattr(graph, "captures", ()) if _outside(inside) is component.handle]
    uses = [op for handle in handles for op in handle.consumers()]
    reads = {id(op.outputs[0]) for op in uses if op.type == "ReadVariableOp"}
    seen: set[int] = set()
    left = [output for op in uses for output in op.outputs]
    while left:
        tensor = left.pop()
        if id(tensor) not in seen:
            seen.add(id(tensor))
            left += [output for op in tensor.consumers() for output in op.outputs]
    return reads, seen


def _kept_part(tensor: tf.Tensor, reads: set[int], computed: set[int]) -> tf.Tensor | None:
    if id(tensor) in reads:
        return tensor
    if id(tensor) not in computed:
        return None
    op = tensor.op
    if op.type not in ("Identity", "Cast", "Neg", "AddV2", "Add", "Sub", "Mul", "RealDiv"):
        raise _NotLinearError
    parts = [_kept_part(each, reads, computed) for each in op.inputs]
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


def _outside(tensor: tf.Tensor) -> Value:
    """Returns what `tensor` stands for outside of the graphs that capture it; None if it is an argument."""
    while tf.is_symbolic_tensor(tensor) and tensor.op.type == "Placeholder":
        tensor = next((each for each, inside in getattr(tensor.graph, "captures", ()) if inside is tensor), None)
    return tensor
