"""Views: who takes part, and how one follows another, tried in any order of changes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tfps.errors import ConnectError, ProtocolError
from tfps.membership.view import MAX_GENERATION, View

NUMBERS = st.sets(st.integers(0, 4))


class Changes(RuleBasedStateMachine):
    """Any changes, wanted or not, beside plain sets of who is there."""

    def __init__(self) -> None:
        super().__init__()
        self.view = View(1, (0, 1, 2), (0, 1), 5)
        self.ranks, self.pservers, self.changes = {0, 1, 2}, {0, 1}, 0

    @rule(left=NUMBERS, joined=NUMBERS, lost=NUMBERS)
    def change(self, left: set[int], joined: set[int], lost: set[int]) -> None:
        ranks, pservers = self.ranks - left | joined, self.pservers - lost
        if not (left <= self.ranks and lost <= self.pservers and not joined & self.ranks and ranks and pservers):
            with pytest.raises(ConnectError):
                self.view.next(left=left, joined=joined, lost=lost)
            return
        self.view = self.view.next(left=left, joined=joined, lost=lost)
        self.ranks, self.pservers, self.changes = ranks, pservers, self.changes + 1

    @invariant()
    def everybody_is_there_once_in_order(self) -> None:
        assert list(self.view.ranks) == sorted(self.ranks)
        assert list(self.view.pservers) == sorted(self.pservers)
        assert self.view.generation == 1 + self.changes
        assert [self.view.place(rank) for rank in self.view.ranks] == list(range(len(self.ranks)))


TestChanges = Changes.TestCase


@pytest.mark.parametrize(
    ("generation", "ranks", "pservers", "text"),
    [
        (1, (), (0,), "ranks of a view must be different numbers, ascending, at least one, got"),
        (1, (1, 0), (0,), "ranks of a view"),
        (1, (0, 0), (0,), "ranks of a view"),
        (1, (-1,), (0,), "ranks of a view"),
        (1, (0,), (), "pservers of a view"),
        (0, (0,), (0,), f"generation of a view must be from 1 to {MAX_GENERATION}, got 0"),
    ],
)
def test_a_view_of_nobody_is_refused(
    generation: int, ranks: tuple[int, ...], pservers: tuple[int, ...], text: str
) -> None:
    with pytest.raises(ConnectError, match=text):
        View(generation, ranks, pservers, 2)


def test_the_last_generation_is_the_last_that_a_frame_can_carry() -> None:
    last = dataclasses.replace(View.first(2), generation=MAX_GENERATION)
    with pytest.raises(ConnectError, match=f"got {MAX_GENERATION + 1}"):
        last.next(left=[1])


def test_a_rank_that_is_not_there_has_no_place() -> None:
    view = View.first(2).next(left=[0])
    with pytest.raises(ProtocolError, match="rank must be one of 1, got 0"):
        view.place(0)
