"""The cut of a step into parts, on random graphs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfps.graph.cut import LEAST_BYTES, MOST_GROUPS, NONE, Class, Node, cut, group

_GROUPS = 4


@st.composite
def graphs(draw: st.DrawFn) -> list[Node]:
    """Graphs like steps: some ops wait at gates, some compute gradients, some cannot be compiled."""
    nodes: list[Node] = []
    numbers = st.one_of(st.just(NONE), st.integers(NONE, _GROUPS - 1))
    for place in range(draw(st.integers(1, 40))):
        before = draw(st.lists(st.integers(max(0, place - 8), place - 1), max_size=3)) if place else []
        movable = draw(st.sampled_from((True, True, True, False)))
        nodes.append(Node(before, movable, NONE if movable else draw(numbers), draw(numbers)))
    return nodes


def ancestors(nodes: list[Node], place: int) -> set[int]:
    """An op and those that it comes after."""
    found: set[int] = set()
    waiting = [place]
    while waiting:
        if (each := waiting.pop()) not in found:
            found.add(each)
            waiting += nodes[each].before
    return found


@given(graphs())
def test_parts_never_need_each_other_in_a_circle(nodes: list[Node]) -> None:
    classes = cut(nodes)
    # What is left of the graph when each part is one op: a part or an op outside.
    merged = [each if each is not None else place for place, each in enumerate(classes)]
    before: dict[object, set[object]] = {each: set() for each in merged}
    for place, node in enumerate(nodes):
        before[merged[place]] |= {merged[each] for each in node.before} - {merged[place]}
    done: set[object] = set()
    while ready := [each for each in before if each not in done and before[each] <= done]:
        done.update(ready)
    assert done == set(before)


@given(graphs())
def test_the_order_of_parts_is_one_in_which_they_can_run(nodes: list[Node]) -> None:
    classes = cut(nodes)
    for place, own in enumerate(classes):
        for each in ancestors(nodes, place):
            if own is not None and (other := classes[each]) is not None:
                assert other.order <= own.order


@given(graphs())
def test_no_part_delays_a_send_or_waits_at_a_gate_that_its_ops_do_not_need(nodes: list[Node]) -> None:
    classes = cut(nodes)
    for place, own in enumerate(classes):
        if own is None:
            continue
        mates = [each for each, other in enumerate(classes) if other == own]
        waits = {max(nodes[each].waits for each in ancestors(nodes, mate)) for mate in mates}
        assert waits == {own.waits}
        needing = [
            max((node.sends for each, node in enumerate(nodes) if mate in ancestors(nodes, each)), default=NONE)
            for mate in mates
        ]
        assert set(needing) == {own.sends}, place


@given(graphs())
def test_every_op_that_a_gradient_needs_is_in_a_part_if_it_can_be(nodes: list[Node]) -> None:
    classes = cut(nodes)
    for place, own in enumerate(classes):
        needed = any(node.sends != NONE and place in ancestors(nodes, each) for each, node in enumerate(nodes))
        assert (own is not None) == (nodes[place].movable and needed)


def test_an_op_that_stays_outside_parts_what_is_before_from_what_is_behind_it() -> None:
    nodes = [Node([], True), Node([0], False), Node([1], True), Node([2], True, sends=0)]
    assert cut(nodes) == [Class(NONE, 0, 0), None, Class(NONE, 0, 1), Class(NONE, 0, 1)]


def test_a_step_of_three_layers_is_five_parts() -> None:
    # Reads, forward, loss, backward: the gradient of a kernel, then that of the layer's input.
    reads = [Node([], False, waits=number) for number in range(3)]
    forward = [Node([0], True), Node([1, 3], True), Node([2, 4], True)]
    backward = [Node([5, 4], True, sends=2), Node([5, 2], True), Node([7, 3], True, sends=1), Node([7, 1], True)]
    nodes = [*reads, *forward, *backward, Node([9], True, sends=0)]
    classes = cut(nodes)
    pairs = [each and each[:2] for each in classes]
    assert pairs[:3] == [None] * 3
    assert pairs[3:] == [(0, 2), (1, 2), (2, 2), (2, 2), (2, 1), (2, 1), (2, 0), (2, 0)]


def test_ops_may_be_in_any_order_but_not_in_a_circle() -> None:
    assert cut([Node([1], True, sends=0), Node([], True)]) == [Class(NONE, 0, 0)] * 2
    with pytest.raises(ValueError, match="2 ops come after each other in a circle"):
        cut([Node([1], True), Node([0], True), Node([], True)])


@given(st.lists(st.integers(0, 8 * LEAST_BYTES), min_size=1, max_size=200))
def test_groups_are_neighbours_of_a_bounded_number(nbytes: list[int]) -> None:
    groups = group(nbytes)
    assert groups[0] == 0
    assert all(later - earlier in (0, 1) for earlier, later in itertools.pairwise(groups))
    assert groups[-1] < MOST_GROUPS


def test_groups_have_the_size_that_is_asked_for() -> None:
    assert group([4, 4, 4, 4, 9, 1], 8) == [0, 0, 1, 1, 2, 3]
    assert group([LEAST_BYTES // 2] * 2) == [0, 0]
    assert group([2**20] * 12) == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    assert group([64 * 2**20] * 12, alone=True) == [0] * 12
    assert len(set(group([16 * 2**20] * 64))) == 9
