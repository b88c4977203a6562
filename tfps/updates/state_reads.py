"""Whether a step reads a state, such as a moving mean, for more than its own update.

Replicas may keep states of their own until somebody reads them outside of a step only if they do not differ meanwhile
in anything else: a state that the loss is computed from must be the same on all replicas in every step.

Tested in tests/updates/test_layer_states.py.
"""

from __future__ import annotations

import tensorflow as tf

from tfps.graph.ops import is_backward, outside
from tfps.graph.row_kinds import RowKinds
from tfps.types import Structure, Variable

_OWN = {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "VarIsInitializedOp"}


def is_read_elsewhere(component: Variable, graph: tf.Graph, result: Structure, kinds: RowKinds) -> bool:
    """Whether what `graph`, traced by a replica function, reads of `component` may reach more than its assignments.

    `result`: what the function returns. Where a function within reads it, nobody knows.
    """
    handles = [inside for _, inside in getattr(graph, "captures", ()) if outside(inside) is component.handle]
    results = {id(each) for each in tf.nest.flatten(result, expand_composites=True)}
    left = list(handles)
    seen: set[int] = set()
    while left:
        tensor = left.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if id(tensor) in results:
            return True
        for op in tensor.consumers():
            if op.type in _OWN and any(op.inputs[0] is each for each in handles):
                continue
            within = any(each.dtype == tf.resource for each in op.inputs) and op.type != "ReadVariableOp"
            if within or op.type in ("While", "StatelessWhile") or op.type.startswith(("Stateful", "Assign")):
                return True
            if is_backward(op) or any(kinds.of(each).has_rows for each in op.outputs):
                return True
            if op.op_def.is_stateful and op.type != "ReadVariableOp":
                return True
            left += op.outputs
    return False
