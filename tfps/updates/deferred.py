"""Deferred updates: which optimizer calls in a graph can run outside the step, and which share a bucket.

`all_reduce` marks gradients (`Reduction`). An `update` with an untouched reduced gradient is only noted (`Noted`). Once
every gradient of the reduction is noted, or the program touches a variable before that, the noted updates are emitted
(see emitter.py): small variables fuse in forward order into buckets of up to one slice, which are traced and sent (see
planned_bucket.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

import tensorflow as tf

from tfps.compression import NONE
from tfps.exchange.layout import bucket_limit
from tfps.graph import ops as graph_ops
from tfps.graph.shares import Counted
from tfps.graph.tf_private import outer_graphs
from tfps.graph.timestamps import PassedGates
from tfps.runtime.remote import RemoteRule
from tfps.types import Argument, Function, Value, Variable
from tfps.updates.variables import GatedVariable


@dataclass(eq=False)
class Reduction:
    """One `all_reduce` call of one replica, with a count of its results that became noted updates."""

    size: int
    counted: Counted = field(default_factory=Counted)
    # By graph id: each branch of a tf.cond counts separately.
    noted: Counter[int] = field(default_factory=Counter)


@dataclass(eq=False)
class Reduced:
    """One result of an `all_reduce`: the gradient that went in and the tensor (or IndexedSlices) that came out.

    `common`: some slices of the gradient are marked as those of all replicas (common_rows.py).
    """

    gradient: Value
    result: Value
    reduction: Reduction
    common: bool = False


@dataclass(eq=False)
class Noted:
    """An update call that waits to be emitted: `function(component, gradient, *arguments)`."""

    variable: GatedVariable
    function: Function
    arguments: tuple[Argument, ...]
    reduced: Reduced
    wanted_codec: str = NONE  # of the variable's gradient, if it can be compressed

    @property
    def sparse(self) -> bool:
        return isinstance(self.reduced.gradient, tf.IndexedSlices)

    @property
    def dtype(self) -> tf.DType:
        return graph_ops.wire_dtype(self.reduced.gradient.dtype)

    @property
    def nbytes(self) -> int:
        return int(math.prod(self.variable.shape)) * int(self.dtype.size)

    @property
    def codec(self) -> str:
        """The codec of the gradient; none if it is sparse or not of single or half precision."""
        return NONE if self.sparse or self.dtype != tf.float32 else self.wanted_codec

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """What updates that share a bucket have in common: dtype, how the replica counts, codec, and for those by
        pservers the rule and the step's numbers."""
        kind = (self.function.number, id(self.arguments[0])) if isinstance(self.function, RemoteRule) else ()
        counted = self.reduced.reduction.counted
        return self.dtype, counted.has_rows is None, counted.weight is None, self.codec, *kind


@dataclass(eq=False)
class GraphState:
    """What one strategy knows about one graph under construction."""

    first_use: dict[str, int] = field(default_factory=dict)  # by unique id of the variable; of the outermost graph only
    reduced: dict[int, Reduced] = field(default_factory=dict)  # by id of the result
    noted: dict[int, list[Noted]] = field(default_factory=dict)  # by replica
    inputs: list[tf.Tensor] = field(default_factory=list)  # of the replica function
    passed: PassedGates = field(default_factory=PassedGates)
    reductions: Counter[Hashable] = field(default_factory=Counter)  # so far, by replica; of the outermost graph only


@dataclass
class _Open:
    """A bucket that has `room` bytes for more updates."""

    updates: list[Noted]
    room: int


def fuse(noted: Iterable[Noted], order: dict[str, int], slice_bytes: int, first_bytes: int) -> list[list[Noted]]:
    """Groups `noted` into buckets in forward order: those of one kind up to `bucket_limit`, sparse ones alone.

    Each bucket costs a call, so large ones do not part small ones. Variables that may share a gate stay together.
    """
    buckets: list[list[Noted]] = []
    open_: dict[Hashable, _Open] = {}
    before = 0
    units: dict[Hashable, list[Noted]] = {}
    for item in sorted(noted, key=lambda item: order.get(item.variable._unique_id, len(order))):
        together = item.variable.group and not item.sparse
        units.setdefault((item.variable.group, item.kind) if together else id(item), []).append(item)
    for unit in units.values():
        if unit[0].sparse:
            buckets.append(unit)
            continue
        kind, nbytes = unit[0].kind, sum(item.nbytes for item in unit)
        last, room = open_.get(kind), bucket_limit(before, slice_bytes, first_bytes) - nbytes
        if last and nbytes <= last.room:
            last.updates += unit
            last.room -= nbytes
        else:
            buckets.append(unit)
            if not last or room > last.room:
                open_[kind] = _Open(unit, room)
        before += nbytes
    return buckets


def deferrable(variable: Variable, gradient: Value) -> bool:
    """Whether an update of `variable` with `gradient` can run outside the step."""
    if not isinstance(variable, GatedVariable) or not variable.gates or variable.owner is not None:
        return False
    if isinstance(gradient, tf.IndexedSlices):
        return bool(gradient.values.shape[1:].is_compatible_with(variable.shape[1:]))
    return bool(gradient.shape.is_compatible_with(variable.shape))


def find_reduced(states: Callable[[tf.Graph], GraphState | None], tensor: Value) -> Reduced | None:
    """Returns the reduction that made `tensor`, or None if something was computed in between.

    `all_reduce` wraps dense results in IdentityN (custom_gradient), so identities are followed back.
    """
    graph = getattr(tensor, "graph", None)
    if graph is None or tf.executing_eagerly():
        return None
    if isinstance(tensor, tf.IndexedSlices):
        state = states(tensor.values.graph)
        return state.reduced.get(id(tensor)) if state else None
    while True:
        for each in outer_graphs(tensor.graph):
            state = states(each)
            if state is not None and id(tensor) in state.reduced:
                return state.reduced[id(tensor)]
        if tensor.op.type not in ("Identity", "IdentityN"):
            return None
        tensor = tensor.op.inputs[tensor.value_index]
