"""Ctrl-C in the middle of what ranks do together: right when run again, or an error on all ranks that says why."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import companion
import jobs
import numpy as np
import pytest
import tensorflow as tf

import tfps
from tfps.errors import InterruptError
from tfps.exchange.interface import BucketSpec
from tfps.runtime.runtime import DeclaredBuckets
from tfps.types import Argument, Value
from tfps.worker.worker import Worker

SUM = tf.distribute.ReduceOp.SUM
Together = tuple[tfps.Strategy, companion.Companion]


def interrupt_when(happened: Callable[[], bool]) -> threading.Thread:
    """Sends Ctrl-C to this thread as soon as `happened` says so."""
    main = threading.get_ident()

    def send() -> None:
        jobs.poll(happened)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Together]:
    with companion.strategy_with_companion(monkeypatch, tfps.Config(step_timeout_s=60)) as (strategy, other):
        yield strategy, other


def read_moving(strategy: tfps.Strategy) -> Callable[[], Value]:
    with strategy.scope():
        moving = tf.Variable([8.0], trainable=False)
    strategy.run(lambda: None)  # initial values
    strategy.run(lambda: moving.assign([4.0]))
    return lambda: moving.numpy()


def reduce(strategy: tfps.Strategy) -> Callable[[], Value]:
    return lambda: strategy.reduce("SUM", tf.constant([1000.0]), axis=None)


def gather(strategy: tfps.Strategy) -> Callable[[], Value]:
    return lambda: strategy.gather(tf.constant([1000.0]), axis=0)


def all_reduce(strategy: tfps.Strategy) -> Callable[[], Value]:
    """In a replica function, which runs on a thread that Ctrl-C does not reach."""
    context = tf.distribute.get_replica_context
    return lambda: strategy.run(lambda: context().all_reduce(SUM, tf.constant([1000.0])))


def initial_values(strategy: tfps.Strategy) -> Callable[[], Value]:
    with strategy.scope():
        variable = tf.Variable([1.0])
    return lambda: (strategy.run(lambda: None), variable)


@pytest.mark.parametrize("make", [reduce, gather, all_reduce, read_moving, initial_values])
def test_an_interrupted_exchange_fails_the_job_by_name_on_all_ranks_and_never_adds_to_another(
    two: Together, make: Callable[[tfps.Strategy], Callable[[], Value]]
) -> None:
    strategy, other = two
    call = make(strategy)
    other.holds = lambda spec: spec.occasional
    heard = jobs.Failed(other._worker)
    sending = interrupt_when(lambda: bool(other._held))
    with pytest.raises(KeyboardInterrupt):
        call()
    sending.join()
    for error in (heard.wait(), jobs.Failed(strategy._runtime.exchange).wait()):
        assert isinstance(error, InterruptError)
        assert "rank 0 was interrupted (Ctrl-C) in the middle of an exchange" in str(error)
        assert "close() the strategy on every rank" in str(error)
    with pytest.raises(InterruptError, match="rank 0 was interrupted"):
        strategy.reduce("SUM", tf.constant([2000.0]), axis=None)


def test_one_worker_goes_on_after_an_interrupted_exchange(
    remote: tfps.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = remote._runtime.exchange
    push = exchange.push

    def interrupted(*arguments: Argument, **named: Argument) -> None:
        push(*arguments, **named)
        raise KeyboardInterrupt

    assert reduce(remote)()[0] == 1000.0
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "push", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reduce(remote)()
    for value in (2000.0, 3000.0):
        assert remote.reduce("SUM", tf.constant([value]), axis=None)[0] == value


def bucket(items: int) -> BucketSpec:
    return BucketSpec((f"b{items}",), "sum", 4 * items, "float32", 0)


@pytest.mark.parametrize("again", [4, 5], ids=["the same", "something else"])
def test_a_declaration_that_was_interrupted_may_come_again(again: int) -> None:
    with jobs.Cluster() as cluster:
        servers = [cluster.pserver(2) for _ in range(2)]
        workers = cluster.workers([server.address for server in servers], 2)
        first, second = map(DeclaredBuckets, workers)
        declarations = servers[0]._job.declarations
        sending = interrupt_when(lambda: [rank[:6] for rank in declarations.undeclared()] == ["rank 1"])
        with pytest.raises(KeyboardInterrupt):
            first.ids([("x", bucket(4))])
        sending.join()
        ids = jobs.together(lambda: first.ids([("x", bucket(again))]), lambda: second.ids([("x", bucket(again))]))
        assert ids == [[0], [0]]
        check_sums(workers, again)


def test_a_declaration_that_the_others_have_completed_meanwhile_is_known_when_it_comes_again() -> None:
    with jobs.Cluster() as cluster:
        servers = [cluster.pserver(2) for _ in range(2)]
        workers = cluster.workers([server.address for server in servers], 2)
        first, second = map(DeclaredBuckets, workers)
        declare = workers[0].declare
        agreed = threading.Event()

        def interrupted(
            specs: Sequence[BucketSpec], details: Sequence[str] = (), stop: threading.Event | None = None
        ) -> list[int]:
            ids = declare(specs, details, stop)
            agreed.set()
            assert stop is not None
            stop.wait(jobs.DEADLINE_S)  # the interruption comes before anybody knows of the agreement
            return ids

        workers[0].declare = interrupted  # type: ignore[method-assign]
        sending = interrupt_when(agreed.is_set)
        other = threading.Thread(target=second.ids, args=([("x", bucket(4))],))
        other.start()
        with pytest.raises(KeyboardInterrupt):
            first.ids([("x", bucket(4))])
        workers[0].declare = declare  # type: ignore[method-assign]
        for thread in (sending, other):
            thread.join()
        ids = jobs.together(*(lambda b=b: b.ids([("x", bucket(4)), ("y", bucket(5))]) for b in (first, second)))
        assert ids == [[0, 1], [0, 1]]
        check_sums(workers, 4)


def check_sums(workers: list[Worker], items: int) -> None:
    payloads = [np.full(items, 10.0**rank, np.float32) for rank in range(len(workers))]
    for reply in [jobs.push(worker, 0, payload) for worker, payload in zip(workers, payloads, strict=True)]:
        np.testing.assert_array_equal(jobs.summed(reply.wait()), np.full(items, 11.0, np.float32))
