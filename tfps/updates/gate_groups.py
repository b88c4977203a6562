"""Small variables that one optimizer updates share a gate: passing, closing and opening it costs as much as for one.

Variables of a group travel in one bucket (see `deferred.fuse`), so none of them could be read earlier with a gate of
its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

from tfps.compression import NONE
from tfps.updates.variables import GatedVariable

_numbers = itertools.count(1)
Codec = Callable[[GatedVariable], str]  # the name of its codec


def group_gates(variables: Iterable[GatedVariable], limit: int, codec: Codec = lambda _: NONE) -> None:
    """Groups neighbors among `variables` (of an optimizer, in its order) up to `limit` bytes.

    A group is the same on all ranks: buckets depend on it. Whether its variables share a gate is this worker's own
    matter. They do unless a graph may hold the gate of one of them, or an update is under way. Variables with
    different codecs are in different buckets, so in different groups.
    """
    for group in _groups(variables, limit, codec):
        number = next(_numbers)
        for variable in group:
            variable.group = number
        if not any(variable.is_gate_in_use() for variable in group):
            group[0].share_gates_with(group[1:])


def _groups(variables: Iterable[GatedVariable], limit: int, codec: Codec) -> Iterator[list[GatedVariable]]:
    def alike(variable: GatedVariable, other: GatedVariable) -> bool:
        return _alike(variable, other) and codec(variable) == codec(other)

    group: list[GatedVariable] = []
    nbytes = 0
    for variable in variables:
        size = int(variable.dtype.size) * int(variable.shape.num_elements() or 0)
        joins = _may_join(variable) and size <= limit
        if group and (not joins or nbytes + size > limit or not alike(variable, group[0])):
            yield group
            group, nbytes = [], 0
        if joins:
            group.append(variable)
            nbytes += size
    if group:
        yield group


def _may_join(variable: GatedVariable) -> bool:
    """Whether `variable` has gates, no group, and presumably a dense gradient: a sparse one has its own bucket."""
    own = bool(variable.gates) and variable.owner is None
    return own and not variable.group and "embeddings" not in str(variable.name)


def _alike(variable: GatedVariable, other: GatedVariable) -> bool:
    return variable.dtype == other.dtype and variable._devices == other._devices
