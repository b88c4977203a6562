"""Updates of large variables in parts: rows of the variable are updated as soon as their gradient has come back.

Only rules of optimizers that are elementwise can be cut. Whether one is, its traced graph says: the ops from the
gradient to the writes are copied for a range of rows, and an op that may mix elements, or whose last bit may depend on
how many elements it gets, leaves the update whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tfps.graph import ops as graph_ops
from tfps.graph.tf_private import ops
from tfps.types import Variable

_ALIGNED = 64  # bytes: the widest registers. With whole ones, each element takes the same way as in a whole update.
_MOST_ROWS = 1 << 20  # narrower rows cost more to find than to update
# Each result depends on one element of each operand, and is rounded once.
_ELEMENTWISE = frozenset(
    [
        *("Abs", "Add", "AddV2", "Cast", "Div", "DivNoNan", "Identity", "Maximum", "Minimum", "Mul", "MulNoNan", "Neg"),
        *("OnesLike", "RealDiv", "Sign", "Sqrt", "Square", "SquaredDifference", "StopGradient", "Sub", "ZerosLike"),
        *("Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalNot", "LogicalOr", "NotEqual"),
        *("Select", "SelectV2"),
    ]
)
_WRITES = {
    "AssignVariableOp": "ResourceScatterUpdate",
    "AssignAddVariableOp": "ResourceScatterAdd",
    "AssignSubVariableOp": "ResourceScatterSub",
}


class NotElementwiseError(Exception):
    """The update cannot be cut."""


def rows_at_once(shape: Sequence[int], itemsize: int) -> int:
    """Returns how many rows a part must have, or a multiple of them; 0 if a variable of `shape` is not worth cutting.

    `itemsize`: bytes of an element, at most the 8 of float64.
    """
    if len(shape) < 2 or shape[0] > _MOST_ROWS:
        return 0
    return _ALIGNED // math.gcd(math.prod(shape[1:]) * itemsize, _ALIGNED)


class CutUpdate:
    """The update of one variable, on one local replica, in parts.

    Args:
        component: the replica's variable.
        handles: of the component and its slots, as the update captures them.
        gradient: what the optimizer was called with, in the update's graph.
        operations: the ops of the optimizer, in the order in which they were made.
        captured: what each placeholder of the update's graph stands for, by its id.

    Raises:
        NotElementwiseError: the optimizer's rule is not elementwise.
    """

    def __init__(
        self,
        component: Variable,
        handles: Sequence[tf.Tensor],
        gradient: tf.Tensor,
        operations: Sequence[tf.Operation],
        captured: dict[int, tf.Tensor],
    ) -> None:
        self._gradient, self._captured = gradient, captured
        self._own = {id(handle) for handle in handles}
        self._operations = operations
        self._shape: tf.TensorShape = component.shape
        sent = graph_ops.wire_dtype(gradient.dtype).size
        #: Rows, the bytes of a row's gradient, and how many rows a part has, or a multiple.
        self.rows = self._shape[0], math.prod(self._shape[1:]) * sent, rows_at_once(self._shape, component.dtype.size)
        bytes_, row = tf.TensorSpec([None], tf.uint8), tf.TensorSpec([], tf.int32)

        @tf.function(autograph=False, input_signature=[bytes_, row, row])
        def tfps_update_part(data: tf.Tensor, begin: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
            with tf.device(component.device):
                self._copy(data, begin, end)
            return tf.constant(True)

        with ops.init_scope():
            self.function = tfps_update_part.get_concrete_function()
        del self._gradient, self._captured, self._operations  # of a graph that nothing else keeps

    def _copy(self, data: tf.Tensor, begin: tf.Tensor, end: tf.Tensor) -> None:
        """Builds the update of rows `begin` to `end`, whose gradient is `data`."""
        sent = graph_ops.from_bytes(data, self._gradient.dtype)
        rows = tf.cast(tf.reshape(sent, [-1, *self._shape[1:]]), self._gradient.dtype)
        copies = {id(self._gradient): rows}
        in_rows = {id(rows)}
        written: dict[int, tf.Tensor] = {}
        for op in self._operations:
            if op.type in ("Placeholder", "NoOp"):
                continue
            handle = self._captured.get(id(op.inputs[0])) if len(op.inputs) else None
            if handle is not None and id(handle) in self._own:
                made = self._access(op, handle, copies, in_rows, begin, end)
                if made is None:
                    written[id(handle)] = handle
                else:
                    copies[id(op.outputs[0])] = made
                    in_rows.add(id(made))
                continue
            inputs = [self._input(each, copies) for each in op.inputs]
            cut = any(id(each) in in_rows for each in inputs)
            if not (self._is_elementwise(op, inputs, in_rows) if cut else _is_repeatable(op)):
                raise NotElementwiseError(op.type)
            dtypes = [output.dtype for output in op.outputs]
            attributes = {name: value for name, value in op.node_def.attr.items() if not name.startswith("_")}
            copied = tf.compat.v1.get_default_graph().create_op(op.type, inputs, dtypes, attrs=attributes)
            for output, copy in zip(op.outputs, copied.outputs, strict=True):
                copies[id(output)] = copy
                if cut:
                    in_rows.add(id(copy))
        for handle in written.values():
            # Writing rows makes TensorFlow copy the variable at each later read, until it is told that it need not.
            tf.raw_ops.DisableCopyOnRead(resource=handle)

    def _input(self, tensor: tf.Tensor, copies: dict[int, tf.Tensor]) -> tf.Tensor:
        found = copies.get(id(tensor), self._captured.get(id(tensor)))
        if found is None:
            raise NotElementwiseError(tensor.op.type)  # made before the optimizer was called
        return found

    def _access(
        self,
        op: tf.Operation,
        handle: tf.Tensor,
        copies: dict[int, tf.Tensor],
        in_rows: set[int],
        begin: tf.Tensor,
        end: tf.Tensor,
    ) -> tf.Tensor | None:
        """Builds what `op` does with the variable of `handle`, for the rows; returns what it reads."""
        if op.type == "ReadVariableOp" and op.outputs[0].shape == self._shape:
            # Not a range of the variable read as a whole: once rows have been written, such a read copies all of it.
            return tf.raw_ops.ResourceGather(resource=handle, indices=tf.range(begin, end), dtype=op.outputs[0].dtype)
        value = self._input(op.inputs[1], copies) if op.type in _WRITES else None
        if id(value) not in in_rows:
            raise NotElementwiseError(op.type)
        getattr(tf.raw_ops, _WRITES[op.type])(resource=handle, indices=tf.range(begin, end), updates=value)
        return None

    def _is_elementwise(self, op: tf.Operation, inputs: Sequence[tf.Tensor], in_rows: set[int]) -> bool:
        """Whether `op` may be applied to rows: its other operands are scalars."""
        alone = [original for original, copy in zip(op.inputs, inputs, strict=True) if id(copy) not in in_rows]
        return (
            op.type in _ELEMENTWISE
            and all(each.shape.rank == 0 for each in alone)
            and all(output.shape == self._shape for output in op.outputs)
        )


def _is_repeatable(op: tf.Operation) -> bool:
    """Whether every part may compute `op`, of which nothing depends on rows."""
    calls = any(value.HasField("func") for value in op.node_def.attr.values())
    return not calls and (op.type == "ReadVariableOp" or not op.op_def.is_stateful)
