"""Calls run most urgent first, and an urgent one does not wait for a less urgent one that runs."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import pytest

from tfps.errors import TfpsError
from tfps.runtime.update_executor import UpdateExecutor

LIMIT_S = 60.0


def make() -> UpdateExecutor:
    return UpdateExecutor(lambda run: run())


class Blocked:
    """A call that runs until it is let go."""

    def __init__(self) -> None:
        self.began, self.free = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.began.set()
        assert self.free.wait(LIMIT_S)


def running(threads: UpdateExecutor, priority: int) -> Blocked:
    call = Blocked()
    threads.add(priority, call)
    assert call.began.wait(LIMIT_S)
    return call


def test_an_urgent_call_does_not_wait_for_a_less_urgent_one_that_runs() -> None:
    threads = make()
    large = running(threads, 7)
    urgent = threading.Event()
    threads.add(0, urgent.set)
    assert urgent.wait(LIMIT_S)
    large.free.set()
    threads.close()


@pytest.mark.parametrize("priority", [3, 4])
def test_a_call_that_is_not_more_urgent_waits_for_the_one_that_runs(priority: int) -> None:
    threads, order = make(), list[str]()
    first = running(threads, 3)
    threads.add(priority, lambda: order.append("waited"))
    running(threads, 2).free.set()  # a thread is free and looks for work
    order.append("first goes on")
    first.free.set()
    threads.close()
    assert order == ["first goes on", "waited"]


def test_what_waits_runs_most_urgent_first_and_in_order_of_arrival() -> None:
    threads, order = make(), list[tuple[int, int]]()
    first = running(threads, 0)

    def note(priority: int, arrival: int) -> Callable[[], None]:
        return functools.partial(order.append, (priority, arrival))

    for arrival, priority in enumerate([5, 3, 9, 3, 5]):
        threads.add(priority, note(priority, arrival))
    first.free.set()
    threads.close()
    assert order == [(3, 1), (3, 3), (5, 0), (5, 4), (9, 2)]


def test_calls_that_do_not_overtake_need_one_thread() -> None:
    threads, used = make(), set[int]()
    first = running(threads, 0)
    for _ in range(50):
        threads.add(1, lambda: used.add(threading.get_ident()))
    first.free.set()
    threads.close()
    assert len(used) == 1


def test_closing_waits_for_all_calls_and_ends_the_threads() -> None:
    before = threading.active_count()
    threads, done = make(), list[int]()
    large = running(threads, 9)
    for number in range(3):
        threads.add(number, functools.partial(done.append, number))
    closing = threading.Thread(target=threads.close)
    closing.start()
    large.free.set()
    closing.join(LIMIT_S)
    assert done == [0, 1, 2]
    assert threading.active_count() == before


@contextlib.contextmanager
def no_more_threads() -> Iterator[None]:
    before = threading.stack_size(2**46)  # no thread gets that
    try:
        yield
    finally:
        threading.stack_size(before)


def test_without_another_thread_an_urgent_call_waits_for_the_one_that_runs() -> None:
    threads, order = make(), list[str]()
    first = running(threads, 7)
    with no_more_threads():
        threads.add(9, lambda: order.append("least urgent"))
        threads.add(0, lambda: order.append("most urgent"))
        threads.add(1, lambda: order.append("urgent"))
    order.append("first goes on")
    first.free.set()
    threads.close()
    assert order == ["first goes on", "most urgent", "urgent", "least urgent"]


def test_when_threads_can_start_again_an_urgent_call_gets_one() -> None:
    threads, done = make(), threading.Event()
    first = running(threads, 7)
    with no_more_threads():
        threads.add(1, lambda: None)
    threads.add(0, done.set)
    assert done.wait(LIMIT_S)
    first.free.set()
    threads.close()


def test_without_any_thread_the_error_says_so_before_there_is_a_call() -> None:
    with no_more_threads(), pytest.raises(TfpsError, match=r"starts none: can't start new thread\. Let this user or"):
        make()
