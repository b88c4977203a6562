"""Who waits for pushes that have begun is called when these are answered."""

from __future__ import annotations

from tfps.runtime.unanswered import Unanswered


def test_a_call_comes_once_all_before_it_are_answered_and_no_later_ones() -> None:
    pushes, called = Unanswered(), list[str]()
    pushes.then(lambda: called.append("nothing under way"))
    assert called == ["nothing under way"]
    first, second = pushes.begin(), pushes.begin()
    pushes.then(lambda: called.append("two"))
    pushes.begin()
    pushes.answered(second)
    pushes.then(lambda: called.append("another one"))
    assert len(called) == 1
    pushes.answered(first)
    assert called[1:] == ["two"]


def test_what_is_called_may_push_and_wait_again() -> None:
    pushes, called = Unanswered(), list[int]()
    first = pushes.begin()

    def again() -> None:
        called.append(pushes.begin())
        pushes.then(lambda: called.append(-1))

    pushes.then(again)
    pushes.answered(first)
    assert called == [first + 1]
    pushes.answered(first + 1)
    assert called == [first + 1, -1]
