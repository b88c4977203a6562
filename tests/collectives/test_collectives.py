"""Sum, gather and broadcast between ranks, over real pservers."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Iterator
from typing import TypeVar

import jobs
import numpy as np
import pytest

from tfps.collectives import AllGather, AllReduce, Broadcast, FixedBroadcast
from tfps.errors import MismatchError
from tfps.exchange.interface import Reply
from tfps.runtime.runtime import Runtime
from tfps.trace.recorder import Recorder

WORKERS = 3
_T = TypeVar("_T")
OnAll = Callable[[Callable[[Runtime], _T]], list[_T]]


@pytest.fixture
def on_all() -> Iterator[OnAll[object]]:
    """Calls a function with the runtime of each rank, at the same time; returns the results in rank order."""
    with jobs.Cluster() as cluster:
        runtimes = [Runtime(each, Recorder(), jobs.DEADLINE_S) for each in jobs.job(cluster, WORKERS, pservers=2)]
        try:
            yield lambda call: jobs.together(*(functools.partial(call, each) for each in runtimes))
        finally:
            jobs.together(*(each.close for each in runtimes))


def test_arrays_are_summed_and_none_counts_as_zeros(on_all: OnAll[object]) -> None:
    def total(runtime: Runtime) -> object:
        rank = runtime.exchange.rank
        reduce = AllReduce(runtime, "total", [2, 2], np.int64)
        return [reduce(np.full([2, 2], 10**rank)).tolist(), reduce(None if rank else np.ones([2, 2])).tolist()]

    assert on_all(total) == [[[[111, 111]] * 2, [[1, 1]] * 2]] * WORKERS


def test_bytes_of_any_length_are_gathered_in_rank_order(on_all: OnAll[object]) -> None:
    assert (
        on_all(lambda runtime: AllGather(runtime, "said")(b"x" * runtime.exchange.rank))
        == [{0: b"", 1: b"x", 2: b"xx"}] * WORKERS
    )


def test_only_the_first_rank_is_heard_in_a_broadcast(on_all: OnAll[object]) -> None:
    def heard(runtime: Runtime) -> object:
        own = b"rank %d" % runtime.exchange.rank
        fixed = FixedBroadcast(runtime, "fixed", 6)
        return [Broadcast(runtime, "any")(lambda: own), fixed(lambda: np.frombuffer(own, np.uint8)).tobytes()]

    assert on_all(heard) == [[b"rank 0", b"rank 0"]] * WORKERS


def test_ranks_that_do_not_agree_are_told(on_all: OnAll[object]) -> None:
    def differing(runtime: Runtime) -> None:
        AllReduce(runtime, "total", [1 + runtime.exchange.rank], np.int64)(None)

    with pytest.raises(MismatchError, match="total"):
        on_all(differing)


def test_parts_that_nobody_waits_for_come_to_a_callback_and_a_mistake_in_it_ends_the_job_by_name(
    on_all: OnAll[object],
) -> None:
    def said(runtime: Runtime) -> object:
        came: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        AllGather(runtime, "said").push(b"x" * runtime.exchange.rank, came.put)
        return {rank: bytes(part) for rank, part in (came.get(timeout=jobs.DEADLINE_S).parts or {}).items()}

    assert on_all(said) == [{0: b"", 1: b"x", 2: b"xx"}] * WORKERS

    def mistake(reply: Reply) -> None:
        raise ArithmeticError("the disk is on fire")

    def mistaken(runtime: Runtime) -> object:
        AllGather(runtime, "wrong").push(b"", mistake)
        runtime.settle(jobs.DEADLINE_S)
        return runtime.exchange.failure is not None and "the exchange of wrong failed" in str(runtime.exchange.failure)

    assert on_all(mistaken) == [True] * WORKERS
