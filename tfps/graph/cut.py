"""Where a traced step is cut into parts that XLA compiles: arithmetic about its ops, which knows no TensorFlow.

Parts must not delay what leaves or wait for what comes late. So each op has two numbers, of groups of variables in
forward order: the last group whose gates it waits for, and the last group that has a gradient which needs it. Along
every edge the first can only grow and the second only fall. So ops with equal numbers can be merged, whatever the
groups are, and no cycle appears. A third number separates ops of one pair that an op lies between which stays outside.
"""

from __future__ import annotations

import graphlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

NONE = -1  # no group
FIRST_BYTES = 2**20  # of the first group: the most urgent one, and the last to leave
LEAST_BYTES = 4 * 2**20  # of the others
MOST_GROUPS = 16
_GROUPS = 8  # of a model that is large enough


@dataclass(frozen=True, slots=True)
class Node:
    """An op of the step."""

    before: Sequence[int]  # places of the ops that it comes after
    movable: bool  # whether XLA can compile it; else it stays where it is
    waits: int = NONE  # the last group at whose gates it waits itself
    sends: int = NONE  # the last group of which it computes a gradient


class Class(NamedTuple):
    """Which part an op belongs to."""

    waits: int  # the last group at whose gates it waits
    sends: int  # the last group of which a gradient needs it
    step: int  # how many ops that stay outside lie between it and the first ops of the same two numbers

    @property
    def order(self) -> tuple[int, int, int]:
        """In this order no part needs a later one."""
        return self.waits, -self.sends, self.step


def cut(nodes: Sequence[Node]) -> list[Class | None]:
    """Returns the class of each op; None for those that stay outside: what they are, or no gradient needs them.

    Raises:
        ValueError: ops come after each other in a circle.
    """
    order = _order(nodes)
    waits = [node.waits for node in nodes]
    for place in order:
        node = nodes[place]
        waits[place] = max([waits[place], *(waits[each] for each in node.before)])
    sends = [node.sends for node in nodes]
    for place in reversed(order):
        for each in nodes[place].before:
            sends[each] = max(sends[each], sends[place])
    step, follows = [0] * len(nodes), [False] * len(nodes)  # follows: it is, or comes after, an op of a part
    for place in order:
        node = nodes[place]
        alike = [each for each in node.before if (waits[each], sends[each]) == (waits[place], sends[place])]
        step[place] = max((step[each] + (follows[each] and not nodes[each].movable) for each in alike), default=0)
        follows[place] = node.movable or any(follows[each] for each in alike)
    return [
        Class(*numbers) if node.movable and numbers[1] != NONE else None
        for node, *numbers in zip(nodes, waits, sends, step, strict=True)
    ]


def _order(nodes: Sequence[Node]) -> list[int]:
    """Returns places in an order in which the ops can run. The gradient of a loop adds inputs to what was before it."""
    sorter = graphlib.TopologicalSorter({place: node.before for place, node in enumerate(nodes)})
    try:
        return list(sorter.static_order())
    except graphlib.CycleError as error:
        raise ValueError(f"{len(error.args[1]) - 1} ops come after each other in a circle") from None


def group(nbytes: Sequence[int], part_bytes: int | None = None, *, alone: bool = False) -> list[int]:
    """Returns the group of each variable, given the bytes of their gradients in forward order.

    Args:
        part_bytes: bytes of a group, which only a single variable may exceed; None: an eighth of all, from 4 MiB.
        alone: whether nothing travels, so that there is nothing to overlap: one group.
    """
    total = sum(nbytes)
    limit = max(total // _GROUPS, LEAST_BYTES) if part_bytes is None else part_bytes
    if alone or total <= limit:
        return [0] * len(nbytes)
    while (found := _filled(nbytes, limit))[-1] >= MOST_GROUPS:
        limit += limit // 4 + 1
    return found


def _filled(nbytes: Sequence[int], limit: int) -> list[int]:
    groups, number, filled = list[int](), 0, 0
    for each in nbytes:
        most = min(FIRST_BYTES, limit) if number == 0 else limit
        if filled and filled + each > most:
            number, filled = number + 1, 0
        groups.append(number)
        filled += each
    return groups
