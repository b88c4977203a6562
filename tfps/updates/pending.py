"""Pending updates: which optimizer calls in a graph can run outside the step, and which share a bucket and a gate.

`all_reduce` marks gradients (`Reduction`). An `update` with an untouched reduced gradient becomes a `PendingUpdate`.
Once every gradient of the reduction has one, or the program touches a variable before that, they are emitted (see
scheduler.py): small variables fuse in forward order into buckets of up to one slice, which are traced and sent (see
planned_bucket.py).

Small variables that one optimizer updates share a gate: passing, closing and opening it costs as much as for one. They
travel in one bucket, so none of them could be read earlier with a gate of its own.

Tested in tests/updates/test_pending.py and tests/updates/test_gate_groups.py.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
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

_groups_made = itertools.count(1)


@dataclass(eq=False)
class Reduction:
    """One `all_reduce` call of one replica, with a count of its results that became pending updates."""

    size: int
    counted: Counted = field(default_factory=Counted)
    # By graph id: each branch of a tf.cond counts separately.
    pending: Counter[int] = field(default_factory=Counter)


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
class PendingUpdate:
    """An update call that waits to be emitted: `function(component, gradient, *arguments)`."""

    variable: GatedVariable
    function: Function
    arguments: tuple[Argument, ...]
    reduced: Reduced
    requested_codec: str = NONE  # of the variable's gradient, if it can be compressed

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
        return NONE if self.sparse or self.dtype != tf.float32 else self.requested_codec

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """What updates that share a bucket have in common: dtype, how the replica counts, codec, and for those by
        pservers the rule and the step's scalars."""
        kind = (self.function.number, id(self.arguments[0])) if isinstance(self.function, RemoteRule) else ()
        counted = self.reduced.reduction.counted
        return self.dtype, counted.has_rows is None, counted.weight is None, self.codec, *kind


@dataclass(eq=False)
class GraphState:
    """What one strategy knows about one graph under construction."""

    first_use: dict[str, int] = field(default_factory=dict)  # by unique id of the variable; of the outermost graph only
    reduced: dict[int, Reduced] = field(default_factory=dict)  # by id of the result
    pending: dict[int, list[PendingUpdate]] = field(default_factory=dict)  # by replica
    inputs: list[tf.Tensor] = field(default_factory=list)  # of the replica function
    passed: PassedGates = field(default_factory=PassedGates)
    reductions: Counter[Hashable] = field(default_factory=Counter)  # so far, by replica; of the outermost graph only


def fuse(
    pending: Iterable[PendingUpdate], order: dict[str, int], slice_bytes: int, first_bytes: int
) -> list[list[PendingUpdate]]:
    """Groups `pending` into buckets in forward order: those of one kind up to `bucket_limit`, sparse ones alone.

    Each bucket costs a call, so large ones do not part small ones. Variables that may share a gate stay together.
    """
    buckets: list[list[PendingUpdate]] = []
    open_: dict[Hashable, tuple[list[PendingUpdate], int]] = {}  # by kind: one that has room for so many more bytes
    before = 0
    units: dict[Hashable, list[PendingUpdate]] = {}
    for item in sorted(pending, key=lambda item: order.get(item.variable._unique_id, len(order))):
        together = item.variable.group and not item.sparse
        units.setdefault((item.variable.group, item.kind) if together else id(item), []).append(item)
    for unit in units.values():
        if unit[0].sparse:
            buckets.append(unit)
            continue
        kind, nbytes = unit[0].kind, sum(item.nbytes for item in unit)
        last, left = open_.get(kind, ([], -1))
        room = bucket_limit(before, slice_bytes, first_bytes) - nbytes
        if nbytes <= left:
            last += unit
            open_[kind] = last, left - nbytes
        else:
            buckets.append(unit)
            if room > left:
                open_[kind] = unit, room
        before += nbytes
    return buckets


def group_gates(
    variables: Iterable[GatedVariable], limit: int, codec: Callable[[GatedVariable], str] = lambda _: NONE
) -> None:
    """Groups neighbors among `variables` (of an optimizer, in its order) up to `limit` bytes; `codec`: its name.

    A group is the same on all ranks: buckets depend on it. Whether its variables share a gate is this worker's own
    matter. They do unless a graph may hold the gate of one of them, or an update is under way. Variables with
    different codecs are in different buckets, so in different groups.
    """
    for group in _groups(variables, limit, codec):
        number = next(_groups_made)
        for variable in group:
            variable.group = number
        if not any(variable.is_gate_in_use() for variable in group):
            group[0].share_gates_with(group[1:])


def _groups(
    variables: Iterable[GatedVariable], limit: int, codec: Callable[[GatedVariable], str]
) -> Iterator[list[GatedVariable]]:
    group: list[GatedVariable] = []
    nbytes = 0
    kind: tuple[Hashable, ...] = ()
    for variable in variables:
        size = int(variable.dtype.size) * int(variable.shape.num_elements() or 0)
        own = variable.dtype, variable._devices, codec(variable)
        # A sparse gradient, as embeddings presumably have, gets a bucket of its own.
        joins = variable.has_own_gates and not variable.group and "embeddings" not in str(variable.name)
        joins = joins and size <= limit
        if group and (not joins or nbytes + size > limit or own != kind):
            yield group
            group, nbytes = [], 0
        if joins:
            group.append(variable)
            nbytes, kind = nbytes + size, own
    if group:
        yield group


def deferrable(variable: Variable, gradient: Value) -> bool:
    """Whether an update of `variable` with `gradient` can run outside the step."""
    if not isinstance(variable, GatedVariable) or not variable.has_own_gates:
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
