"""By which sums over rows a number for a batch is computed: replicas add these up, and the rest is computed once.

`sum(l * w) / sum(w)`, the root of a mean, F1 of a batch: each is a function of sums over rows, and of means, which are
sums and a number of rows. The graph shows both, as long as what is summed comes from one row each. What is not proven
here (a maximum, ranks of rows, what Python computes) has no such sums; an op that is not known proves nothing.

Tested in tests/graph/test_row_sums.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfps.graph.row_kinds import CALLS, REDUCES, Of, RowKinds
from tfps.graph.tf_private import ops

_MOST_OPS, _MOST_SUMS = 300, 256  # of one number
_ROWS = 0  # place of the number of rows among the sums
# Ops whose results for a row come from that row alone.
_ELEMENTWISE = {
    *("Abs", "Add", "AddV2", "Sub", "Mul", "MulNoNan", "RealDiv", "Div", "DivNoNan", "FloorDiv", "FloorMod", "Neg"),
    *("Maximum", "Minimum", "Sign", "Square", "SquaredDifference", "Sqrt", "Rsqrt", "Exp", "Expm1", "Log", "Log1p"),
    *("Pow", "Sigmoid", "Tanh", "Relu", "Softplus", "Round", "Rint", "Floor", "Ceil", "Cast", "Identity", "Reciprocal"),
    *("StopGradient", "Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalOr"),
    *("LogicalNot", "LogicalXor", "Select", "SelectV2", "ClipByValue", "IsNan", "IsInf", "IsFinite", "ZerosLike"),
    *("OnesLike", "Xdivy", "Xlogy", "Xlog1py", "Erf", "Bitcast", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Invert"),
}
_MOVES = {"Reshape", "Squeeze", "ExpandDims", "Transpose", "EnsureShape", "Where"}
_ALONG_LAST = {
    "Softmax",
    "LogSoftmax",
    "TopKV2",
    "SparseSoftmaxCrossEntropyWithLogits",
    "SoftmaxCrossEntropyWithLogits",
}


@dataclass(frozen=True)
class RowSums:
    """A scalar as a function of sums over rows."""

    sums: tf.Tensor  # of this replica, float64 [n], in its graph
    form: int  # tells numbers apart that are computed otherwise; the same on all ranks
    rest: Callable[[tf.Tensor], tf.Tensor]  # from such sums over all replicas, in any graph, to the scalar as float64


@dataclass(frozen=True)
class _Leaf:
    """A tensor that is a sum over rows, or a mean: a sum by another."""

    begin: int  # of its elements among the sums
    shape: list[int]
    dtype: tf.DType
    by: int | None  # place of what the sum is divided by

    def value(self, sums: tf.Tensor) -> tf.Tensor:
        size = tf.TensorShape(self.shape).num_elements()
        found = tf.reshape(sums[self.begin : self.begin + size], self.shape)
        if self.by is not None:
            found = found / sums[self.by]
        return tf.cast(found if self.dtype.is_floating else tf.round(found), self.dtype)


class _NotProven(Exception):
    pass


class _Finder:
    def __init__(self, kinds: RowKinds, rows: tf.Tensor, outputs: Sequence[tf.Tensor]) -> None:
        self._kinds, self._outputs = kinds, set(map(id, outputs))
        self.sums = [tf.reshape(tf.cast(rows, tf.float64), [1])]
        self._size = 1
        self.leaves: dict[int, _Leaf] = {}  # by id of a tensor
        self.copied: dict[int, tf.Operation] = {}  # by id; what they are computed from comes before them
        self._row_wise: set[int] = set()  # ids of tensors

    def find(self, tensor: tf.Tensor) -> None:
        if id(tensor) in self.leaves or id(tensor.op) in self.copied:
            return
        op, kind = tensor.op, self._kinds.of(tensor)
        if kind.of is Of.FIXED and tensor.dtype.is_floating and op.type != "Const":
            self._add(tensor, self._times(tensor, self.sums[_ROWS][0]), _ROWS)
        elif op.type in ("Sum", "Mean", "L2Loss", "Size", "Shape", "StridedSlice") and self._is_reduction(tensor):
            self._add_reduction(tensor)
        elif kind.has_rows or kind.of is Of.UNSURE or not self._may_copy(op):
            raise _NotProven
        else:
            for each in op.inputs:
                self.find(each)
            self.copied[id(op)] = op

    def _may_copy(self, op: tf.Operation) -> bool:
        reduces = op.type in REDUCES and self._kinds.of(op.inputs[0]).has_rows
        known = op.type not in {*CALLS, "Placeholder"} and not op.op_def.is_stateful
        return known and not reduces and len(self.copied) < _MOST_OPS

    def _is_reduction(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is computed over rows by its own op."""
        source = tensor.op.inputs[0]
        if tensor.op.type == "StridedSlice":  # of a shape, how many rows there are
            if source.op.type != "Shape" or tensor.shape.rank != 0:
                return False
            begin, shaped = tf.get_static_value(tensor.op.inputs[1]), source.op.inputs[0]
            kind, rank = self._kinds.of(shaped), shaped.shape.rank
            return begin is not None and bool(rank) and kind.has_rows and int(begin[0]) % rank == kind.axis
        return self._kinds.of(source).sums_rows and not self._kinds.of(tensor).has_rows

    def _add_reduction(self, tensor: tf.Tensor) -> None:
        op, (source, *_) = tensor.op, tensor.op.inputs
        if op.type == "Mean":
            self._need_row_wise(source)
            by, count = self._size, tf.cast(tf.shape(source)[self._kinds.of(source).axis], tf.float64)
            self._append(count)
            self._add(tensor, self._times(tensor, count), by)
            return
        if op.type == "Shape":
            raise _NotProven  # several sizes
        self._need_row_wise(source.op.inputs[0] if op.type == "StridedSlice" else source)
        self._add(tensor, tf.cast(tensor, tf.float64), None)

    def _times(self, mean: tf.Tensor, amount: tf.Tensor) -> tf.Tensor:
        product = tf.cast(mean, tf.float64) * amount
        return tf.where(tf.equal(amount, 0), tf.zeros_like(product), product)  # a mean of nothing is NaN

    def _add(self, tensor: tf.Tensor, summed: tf.Tensor, by: int | None) -> None:
        if not tensor.shape.is_fully_defined() or tensor.dtype.is_bool or tensor.dtype.is_complex:
            raise _NotProven
        self.leaves[id(tensor)] = _Leaf(self._size, tensor.shape.as_list(), tensor.dtype, by)
        self._append(summed)

    def _append(self, summed: tf.Tensor) -> None:
        self.sums.append(tf.reshape(summed, [-1]))
        self._size += summed.shape.num_elements()
        if self._size > _MOST_SUMS:
            raise _NotProven

    def _need_row_wise(self, tensor: tf.Tensor) -> None:
        """Raises unless the values of `tensor` for a row come from that row alone, as far as what the model returns."""
        left = [tensor]
        while left:
            each = left.pop()
            kind = self._kinds.of(each)
            if id(each) in self._row_wise or id(each) in self._outputs or kind.of is Of.FIXED:
                continue
            if kind.of is Of.COUNT and each.dtype.is_integer:  # a size
                continue
            if not kind.has_rows or len(self._row_wise) > _MOST_OPS:
                raise _NotProven
            self._row_wise.add(id(each))
            if each.op.type == "Placeholder":
                if self._kinds.is_argument(each):
                    continue
                raise _NotProven
            if not self._is_row_wise(each.op, kind.axis):
                raise _NotProven
            left += each.op.inputs

    def _is_row_wise(self, op: tf.Operation, axis: int) -> bool:
        kinds = [self._kinds.of(each) for each in op.inputs]
        having = [
            (each.shape.rank - kind.axis, each.shape.rank - kind.axis == 1)
            for each, kind in zip(op.inputs, kinds, strict=True)
            if kind.has_rows and each.shape.rank is not None
        ]
        if len(having) != sum(kind.has_rows for kind in kinds):
            return False
        if op.type in _ELEMENTWISE:
            return len({place for place, _ in having}) == 1  # else rows meet others
        if op.type in _ALONG_LAST:
            return not any(is_last for _, is_last in having) or (op.type.startswith("Sparse") and not having[0][1])
        if op.type in ("ArgMax", "ArgMin"):
            along = tf.get_static_value(op.inputs[1])
            return along is not None and int(along) % op.inputs[0].shape.rank != kinds[0].axis
        if op.type == "OneHot":
            return not any(kind.has_rows for kind in kinds[1:])
        if op.type in ("Gather", "GatherV2"):
            return kinds[0].of is Of.FIXED or kinds[1].of is Of.PICKED
        if op.type == "StridedSlice":
            masks = op.get_attr("begin_mask") & op.get_attr("end_mask")
            plain = not (
                op.get_attr("ellipsis_mask") or op.get_attr("new_axis_mask") or op.get_attr("shrink_axis_mask") & 1
            )
            return plain and kinds[0].axis == 0 and bool(masks & 1)
        return op.type in _MOVES or (op.type in REDUCES and axis >= 0)


def row_sums(kinds: RowKinds, tensor: tf.Tensor, rows: tf.Tensor, outputs: Sequence[tf.Tensor] = ()) -> RowSums | None:
    """Returns by which sums the scalar `tensor` is computed; None if the graph does not prove any.

    rows: how many this replica has, a scalar. outputs: have values that count as those of one row each, whatever they
    are computed from, as what a model returns.
    """
    found = _Finder(kinds, rows, outputs)
    try:
        found.find(tensor)
    except _NotProven:
        return None
    leaves, copied = found.leaves, list(found.copied.values())
    steps = [(op, op.op_def, _attributes(op), list(op.inputs)) for op in copied]

    def rest(sums: tf.Tensor) -> tf.Tensor:
        made = {each: leaf.value(sums) for each, leaf in leaves.items()}
        for op, op_def, attributes, inputs in steps:
            copy = ops.get_default_graph().create_op(
                op.type,
                [made[id(each)] for each in inputs],
                [each.dtype for each in op.outputs],
                attrs=attributes,
                op_def=op_def,
            )
            made |= {id(old): new for old, new in zip(op.outputs, copy.outputs, strict=True)}
        return tf.cast(made[id(tensor)], tf.float64)

    places = {id(each): place for place, (op, *_) in enumerate(steps) for each in op.outputs}
    shown: list[object] = [(leaf.begin, leaf.shape, leaf.dtype.name, leaf.by) for leaf in leaves.values()]
    shown += [
        (op.type, sorted((name, str(value)) for name, value in attributes.items()), [places.get(id(i)) for i in inputs])
        for op, _, attributes, inputs in steps
    ]
    return RowSums(tf.concat(found.sums, 0), zlib.crc32(repr(shown).encode()) + 1, rest)


def _attributes(op: tf.Operation) -> dict[str, object]:
    return {name: value for name, value in op.node_def.attr.items() if not name.startswith("_")}
