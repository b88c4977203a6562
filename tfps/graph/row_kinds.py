"""What the tensors of a traced step are to the rows of its batch: values of rows, means over them, sums, counts.

A replica's mean over its own rows, weighted by their number, adds up to the mean over the global batch; so does
whatever is linear in such means. Nothing else does: a sum, a quotient of sums (`sum(l * w) / sum(w)`), the root of a
mean. The graph shows which of these a loss is, up to ops that are not known here: those are `UNSURE`, and nobody
complains.

Tested in tests/graph/test_row_kinds.py.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from tfps.graph.ops import captured_from
from tfps.graph.tf_private import function_of
from tfps.types import Value


class Of(enum.Enum):
    """What a tensor is, in order of what decides where several numbers are added up."""

    FIXED = 0  # computed from no row
    COUNT = 1  # computed from the number of rows alone
    INVERSE = 2  # one over such a number
    MEAN = 3  # linear in means over rows
    UNSURE = 4
    CURVED = 5  # computed from means over rows, but not linear in them; or from other reductions
    SUM = 6  # a sum over rows
    TOTAL = 7  # computed from sums over rows, but no mean
    # With values for each row:
    SHARES = 8  # which are divided by the number of rows, so that their sum is a mean
    PICKED = 9  # for some of the rows, chosen by their values (tf.boolean_mask)
    ROWS = 10
    DIVIDED = 11  # which are divided by something computed from sums over rows


@dataclass(frozen=True)
class Kind:
    of: Of
    axis: int = 0  # of the rows, if there are values for each

    @property
    def has_rows(self) -> bool:
        return self.of.value >= Of.SHARES.value

    @property
    def adds_up(self) -> bool:
        """Whether replicas' numbers, weighted by their rows, may add up to that of the global batch."""
        return self.of not in (Of.CURVED, Of.SUM, Of.TOTAL, Of.DIVIDED)

    @property
    def is_mean(self) -> bool:
        """Whether replicas' numbers, weighted by their rows, add up to that of the global batch for certain."""
        return self.of in (Of.FIXED, Of.MEAN)

    @property
    def words(self) -> str:
        """For messages: what something of this kind is."""
        return _WORDS.get(self.of, "is computed from rows in a way that is not known to be a mean over them")

    @property
    def sums_rows(self) -> bool:
        """Whether the sum of its elements is one over rows."""
        return self.of in (Of.ROWS, Of.PICKED)


_WORDS = {
    Of.COUNT: "is computed from the number of rows",
    Of.SUM: "is a sum over rows",
    Of.TOTAL: "is computed from sums over rows and is no mean of all rows",
    Of.DIVIDED: "is divided by a number that is computed from a sum over rows",
    Of.CURVED: "is computed from numbers over all rows and is not linear in means over rows",
    Of.PICKED: "is of some rows only, chosen by their values",
    Of.ROWS: "has values of single rows",
}
FIXED, MEAN = Kind(Of.FIXED), Kind(Of.MEAN)
_MOVES = {
    *("Reshape", "Squeeze", "ExpandDims", "BroadcastTo", "EnsureShape", "StridedSlice", "Slice", "Tile", "Transpose"),
    "Pad",
}
_ADDS = {
    *("Identity", "IdentityN", "StopGradient", "PreventGradient", "CheckNumerics", "Cast", "Neg", "Add", "AddV2"),
    *("Sub", "AddN", "Pack", "ConcatV2", "BiasAdd", "Unpack", "Snapshot"),
}
_DIVIDES = {"RealDiv", "Div", "DivNoNan"}
REDUCES = {"Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm"}
_SIZES = {"Shape", "ShapeN", "Size", "OnesLike", "ZerosLike"}
_BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase", "Select", "SelectV2"}
CALLS = {*_BRANCHES, "While", "StatelessWhile", "PartitionedCall", "StatefulPartitionedCall"} - {"Select", "SelectV2"}


class RowKinds:
    """Tells the kinds of tensors of one replica function, once each."""

    def __init__(self, rows: int | None, noted: dict[int, tuple[tf.Tensor, Kind]] | None = None) -> None:
        self._rows = rows  # of the replica in every step, if that is fixed
        # As `_found`, of what is known from elsewhere, also within functions.
        self._noted: dict[int, tuple[tf.Tensor, Kind]] = {} if noted is None else noted
        self._found: dict[int, tuple[tf.Tensor, Kind]] = {}  # by id of the tensor, which is kept: ids are used again

    def note(self, tensor: tf.Tensor, kind: Kind) -> None:
        """Notes the kind of a `tensor`, whatever it is computed from."""
        self._noted[id(tensor)] = (tensor, kind)

    def _known(self, tensor: tf.Tensor) -> Kind | None:
        found = self._noted.get(id(tensor)) or self._found.get(id(tensor))
        return None if found is None else found[1]

    def of(self, tensor: Value) -> Kind:
        """Returns the kind of `tensor`; what is no tensor of a graph is fixed."""
        if not tf.is_symbolic_tensor(tensor):
            return FIXED
        waiting = [tensor]  # not recursive: graphs are deep
        while waiting:
            each = waiting[-1]
            if self._known(each) is not None:
                waiting.pop()
                continue
            outer = captured_from(each)
            inputs = list(each.op.inputs) if outer is None else [outer]
            left = [needed for needed in inputs if tf.is_symbolic_tensor(needed) and self._known(needed) is None]
            if left:
                waiting += left
                continue
            waiting.pop()
            kinds = [self._known(needed) or FIXED for needed in inputs]
            self._found[id(each)] = each, kinds[0] if outer is not None else self._of_op(each, kinds)
        return self._known(tensor) or FIXED

    def is_argument(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is one of those whose kind was noted, as those of the batch."""
        return id(tensor) in self._noted

    def origin(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensor that made `tensor` what it is: of the same kind, but none that it is computed from is."""
        while True:
            op, kind = tensor.op, self.of(tensor)
            alike = [each for each in op.inputs if self.of(each).of is kind.of]
            if len(alike) != 1 or op.type not in {*_ADDS, *_MOVES, *_BRANCHES, *_DIVIDES, "Mul"}:
                return tensor
            (tensor,) = alike

    def _of_op(self, tensor: tf.Tensor, inputs: Sequence[Kind]) -> Kind:
        op = tensor.op
        if op.type == "Placeholder":
            return self._argument(tensor)
        if all(each.of is Of.FIXED for each in inputs):
            return FIXED
        if (within := self._within(tensor, inputs)) is not None:
            return within
        if op.type in REDUCES:
            return self._reduced(tensor, inputs[0])
        if op.type.startswith("FusedBatchNorm") and tensor.value_index in (1, 2):  # the batch's mean and variance
            return _reduction("Mean", inputs[0])
        if op.type == "L2Loss":
            return _reduction("Sum", inputs[0])
        if op.type in _SIZES:
            return _size(inputs[tensor.value_index if op.type == "ShapeN" else 0])
        if op.type == "StridedSlice" and inputs[0].of is Of.COUNT and (kind := self._one_size(op)) is not None:
            return kind
        if "Random" in op.type:
            return Kind(Of.ROWS) if inputs[0].of is Of.COUNT else FIXED
        if "PyFunc" in op.type and tensor.shape.rank is None:
            return Kind(Of.UNSURE)
        if (
            op.type == "Reshape"
            and inputs[0].of is Of.PICKED
            and (tensor.shape.rank or 0) > (op.inputs[0].shape.rank or 0)
        ):
            return self._placed(tensor, inputs, Of.ROWS)  # as many are picked of each row
        if op.type == "Where":
            return Kind(Of.PICKED)
        return self._placed(tensor, inputs, _computed(op.type, inputs))

    def _argument(self, tensor: tf.Tensor) -> Kind:
        """The kind of an argument that is not known to be of the batch."""
        if tensor.dtype in (tf.resource, tf.variant):
            return FIXED
        sure = not tensor.shape.is_fully_defined() or (tensor.shape.rank and tensor.shape[0] == self._rows)
        return Kind(Of.ROWS if sure else Of.UNSURE)

    def _within(self, tensor: tf.Tensor, inputs: Sequence[Kind]) -> Kind | None:
        """The kind of what a function in the graph returns, or either branch of a condition that no row decides."""
        op = tensor.op
        if op.type in ("PartitionedCall", "StatefulPartitionedCall"):
            graphs, given = [function_of(op)], inputs
        elif op.type in ("If", "StatelessIf") and inputs[0].of in (Of.FIXED, Of.COUNT):
            graphs, given = [function_of(op, "then_branch"), function_of(op, "else_branch")], inputs[1:]
        else:
            return None
        found = []
        for graph in graphs:
            if graph is None or len(graph.inputs) != len(given):
                return None
            kinds = RowKinds(self._rows, self._noted)
            kinds._found = {id(each): (each, kind) for each, kind in zip(graph.inputs, given, strict=True)}
            found.append(kinds.of(graph.outputs[tensor.value_index]))
        return replace(_sum(found), axis=found[0].axis)

    def _reduced(self, tensor: tf.Tensor, kind: Kind) -> Kind:
        op = tensor.op
        if op.type == "Mean" and tensor.shape.rank == 0 and op.inputs[0].op.type in ("OnesLike", "ZerosLike"):
            return FIXED
        if not kind.has_rows:
            return kind if op.type in ("Sum", "Mean") else _other([kind])
        rank, axes = op.inputs[0].shape.rank, tf.get_static_value(op.inputs[1])
        if tensor.shape.rank == 0 or (tensor.shape.is_fully_defined() and self._rows is None):
            return _reduction(op.type, kind)
        if rank is None or axes is None:
            return Kind(Of.UNSURE)
        reduced = {int(each) % rank for each in axes.flatten()}
        if kind.axis in reduced:
            return _reduction(op.type, kind)
        before = 0 if op.get_attr("keep_dims") else sum(each < kind.axis for each in reduced)
        return replace(kind if op.type in ("Sum", "Mean") else _other([kind]), axis=kind.axis - before)

    def _one_size(self, op: tf.Operation) -> Kind | None:
        """The kind of one of the sizes in a shape; None for several or others."""
        begin, shape = tf.get_static_value(op.inputs[1]), op.inputs[0].op
        if begin is None or begin.size != 1 or not op.get_attr("shrink_axis_mask") or shape.type != "Shape":
            return None
        rank, of = shape.inputs[0].shape.rank, self._known(shape.inputs[0])
        if rank is None or of is None:
            return None
        return Kind(Of.COUNT) if int(begin[0]) % rank == of.axis else FIXED

    def _placed(self, tensor: tf.Tensor, inputs: Sequence[Kind], of: Of) -> Kind:
        """What is computed from `inputs`, with the axis that the rows may have there; unsure if they have none left."""
        kind = Kind(of)
        if not kind.has_rows:
            return kind
        having = [
            (each.shape.rank or 0, known.axis)
            for each, known in zip(tensor.op.inputs, inputs, strict=True)
            if known.has_rows
        ]
        axis = max(having, key=lambda each: each[0])[1] if having else 0  # of the first with the highest rank
        if tensor.op.type == "Transpose" and (order := tf.get_static_value(tensor.op.inputs[1])) is not None:
            return Kind(of, order.tolist().index(axis))
        if tensor.shape.rank is None or tensor.dtype == tf.variant:
            return Kind(of, axis)
        sizes = tensor.shape.as_list()
        if axis < len(sizes) and sizes[axis] == self._rows:
            return Kind(of, axis)
        possible = [axis for axis, size in enumerate(sizes) if size == self._rows]
        if not possible and self._rows and sizes and sizes[0] and sizes[0] % self._rows == 0:
            possible = [0]  # flattened
        return Kind(of, possible[0]) if possible else Kind(Of.UNSURE)


def _computed(how: str, inputs: Sequence[Kind]) -> Of:
    """What the op of type `how` makes of `inputs`, of which not all are fixed."""
    if how in ("Gather", "GatherV2", "GatherNd", "ResourceGather") and inputs[1].has_rows:
        return inputs[1].of
    if how == "Mul":
        return _product(*inputs).of
    if how in _DIVIDES:
        return _quotient(*inputs).of
    if how == "Reciprocal":
        return _quotient(FIXED, inputs[0]).of
    if how in ("Select", "SelectV2") and inputs[0].of in (Of.FIXED, Of.COUNT):
        return _sum(inputs[1:]).of
    if how in _ADDS:
        return _sum(inputs).of
    if how in _MOVES:
        copies = inputs[0].of is Of.FIXED and any(each.of is Of.COUNT for each in inputs)
        return Of.COUNT if copies else inputs[0].of
    if how in _BRANCHES and any(each.of is Of.DIVIDED for each in inputs):
        return Of.DIVIDED
    return _other(inputs, calls=how in CALLS).of


def _size(kind: Kind) -> Kind:
    return Kind(Of.SUM) if kind.of is Of.PICKED else Kind(Of.COUNT) if kind.has_rows else FIXED


def _reduction(how: str, kind: Kind) -> Kind:
    """The kind of a reduction over rows."""
    if kind.of is Of.DIVIDED or how == "EuclideanNorm":
        return Kind(Of.TOTAL)
    if how == "Sum":
        return MEAN if kind.of is Of.SHARES else Kind(Of.SUM) if kind.has_rows else kind
    if how == "Mean":
        return Kind(Of.TOTAL) if kind.of is Of.PICKED else MEAN
    return Kind(Of.CURVED)


def _sum(kinds: Iterable[Kind]) -> Kind:
    found = {each.of for each in kinds}
    rows = {each for each in found if Kind(each).has_rows}
    if not rows:
        return Kind(max(found, key=lambda each: each.value))
    if Of.DIVIDED in rows or len(rows) == 1:
        one = Of.DIVIDED if Of.DIVIDED in rows else rows.pop()
        # Each row's number has something added that is not divided.
        return Kind(Of.ROWS if one is Of.SHARES and found != {one} else one)
    return Kind(Of.ROWS)


def _product(one: Kind, other: Kind) -> Kind:
    found = {one.of, other.of}
    if one.has_rows or other.has_rows:
        if found & {Of.DIVIDED, Of.TOTAL}:
            return Kind(Of.DIVIDED)
        if found & {Of.SHARES, Of.INVERSE}:
            return Kind(Of.SHARES)
        return Kind(Of.PICKED if found - {Of.PICKED} <= {Of.FIXED, Of.MEAN, Of.COUNT} else Of.ROWS)
    if Of.FIXED in found:
        return one if other.of is Of.FIXED else other
    if found == {Of.SUM, Of.INVERSE}:
        return MEAN
    if found == {Of.MEAN, Of.COUNT}:
        return Kind(Of.SUM)
    return _other([one, other])


def _quotient(one: Kind, other: Kind) -> Kind:
    if other.of is Of.FIXED:
        return one
    if other.has_rows:
        return Kind(Of.ROWS)
    if other.of in (Of.SUM, Of.TOTAL):
        return Kind(Of.DIVIDED if one.has_rows else Of.TOTAL)
    if other.of is Of.COUNT:
        divided = {Of.ROWS: Of.SHARES, Of.SUM: Of.MEAN, Of.FIXED: Of.INVERSE, Of.MEAN: Of.TOTAL}
        return Kind(divided.get(one.of, one.of))
    return Kind(Of.ROWS) if one.has_rows else _other([one, other])


def _other(kinds: Iterable[Kind], *, calls: bool = False) -> Kind:
    """The kind of what is not linear in its inputs; `calls`: computed by a function that is not looked into."""
    found = {each.of for each in kinds}
    if any(Kind(each).has_rows for each in found):
        return Kind(Of.PICKED if Of.PICKED in found and Of.ROWS not in found else Of.ROWS)
    if Of.UNSURE in found or (calls and found - {Of.FIXED, Of.COUNT}):
        return Kind(Of.UNSURE)
    if found & {Of.SUM, Of.TOTAL}:
        return Kind(Of.TOTAL)
    return Kind(Of.CURVED if found & {Of.MEAN, Of.CURVED} else Of.COUNT if found != {Of.FIXED} else Of.FIXED)
