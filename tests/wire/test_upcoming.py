"""What is still to come in a step, by what came in the one before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfps.wire.frames import Header, Kind
from tfps.wire.upcoming import Upcoming

SLICES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 2)), unique=True, max_size=8)


def header(step: int, priority: int, bucket: int = 0, index: int = 0) -> Header:
    return Header(Kind.PUSH, bucket=bucket, index=index, priority=priority, step=step)


@given(before=SLICES, now=SLICES)
def test_each_slice_of_the_step_before_is_expected_once(
    before: list[tuple[int, int, int]], now: list[tuple[int, int, int]]
) -> None:
    upcoming = Upcoming()
    for each in before:
        upcoming.put(header(6, *each))
    for count, each in enumerate(now, 1):
        upcoming.put(header(7, *each))
        left = [other for other in before if other not in now[:count]]
        assert upcoming.before(header(7, *each)) == (not before or any(other[0] < each[0] for other in left))


def test_anything_may_come_in_a_first_step_and_where_slices_are_cut_anew() -> None:
    upcoming = Upcoming()
    for step in range(2):
        for index in range(3):
            upcoming.put(header(step, index, bucket=step, index=index))
            assert upcoming.before(header(step, 2, bucket=step, index=2))
    for step in range(2, 4):
        upcoming.put(header(step, 0, bucket=1))
        assert upcoming.before(header(step, 2, bucket=1, index=2))
        upcoming.put(header(step, 1, bucket=1, index=1))
        assert not upcoming.before(header(step, 2, bucket=1, index=2))
        upcoming.put(header(step, 2, bucket=1, index=2))


@pytest.mark.parametrize(("steps", "expected"), [((1, 1), False), ((7, 1000), True), ((1, -1), True)])
def test_what_counts_its_steps_apart_may_come_at_any_time_but_not_what_is_a_step_ahead(
    steps: tuple[int, int], expected: bool
) -> None:
    upcoming = Upcoming()
    for step in range(100):
        upcoming.put(header(step, 5))
        upcoming.put(header(max(steps[0] * step + steps[1], 0), 0, bucket=1))
        assert upcoming.before(header(step, 5)) == (expected or step == 0)


def test_what_comes_once_in_a_while_is_not_waited_for() -> None:
    upcoming = Upcoming()
    for step in range(20):
        if step == 10:
            upcoming.put(header(1, 0, bucket=1))
        upcoming.put(header(step, 5))
        assert upcoming.before(header(step, 5)) == (step in (0, 10))


def test_what_never_comes_again_is_forgotten() -> None:
    upcoming = Upcoming()
    for step in range(1000):
        for index in range(10):  # as of frames that ask for rows
            upcoming.put(header(step, 0, index=10 * step + index))
    assert len(upcoming._last) < 100
