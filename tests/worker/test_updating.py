"""Buckets with an update: pushes bring gradients and numbers, replies the parameters that pservers keep."""

from __future__ import annotations

import re

import jobs
import numpy as np
import pytest
from jobs import Cluster, job, push, summed, together

from tfps.config import Config
from tfps.errors import MismatchError, ProtocolError
from tfps.exchange.interface import BucketSpec, Exchange
from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.wire.control import STATE_PIECE_BYTES
from tfps.worker.embedded import EmbeddedExchange

ITEMS = 5000


CONFIG = Config(slice_bytes=1024, window_bytes=4096, update="server", connect_timeout_s=60, step_timeout_s=60)


def momentum(items: int = ITEMS, name: str = "w") -> BucketSpec:
    update = UpdateSpec("sgd", (("momentum", 0.5), ("nesterov", 0.0)), (("momentum", 0.0),), (items,), (False,))
    return BucketSpec((name,), "sum", 4 * items, "float32", 0, update=update)


def numbers(step: int, rate: float = 0.25, mark: int = 0) -> bytes:
    return StepScalars(mark, (float(step), rate), wrote=bool(mark)).pack()


def pushed(exchange: Exchange, gradient: np.ndarray, given: bytes, bucket: int = 0) -> jobs.Pending:
    pending = jobs.Pending()
    exchange.push(bucket, gradient, pending, step_scalars=given)
    return pending


def expected(start: np.ndarray, gradients: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    w, m = start.copy(), np.zeros_like(start)
    for gradient in gradients:
        m = m * np.float32(0.5) - gradient * np.float32(0.25)
        w = w + m
    return w, m


START = np.arange(ITEMS, dtype=np.float32)
GRADIENT = np.linspace(-1, 1, ITEMS, dtype=np.float32)


@pytest.mark.parametrize("cluster", ["tcp", "grpc", "shared memory", "both"], indirect=True)
def test_every_rank_gets_the_parameters_after_an_update_with_the_sum(cluster: Cluster) -> None:
    workers = job(cluster, 2, momentum(), pservers=2, config=CONFIG)
    workers[0].state.write(0, 0, 0, START)
    for step in range(3):
        pending = [pushed(worker, GRADIENT * (rank + 1), numbers(step)) for rank, worker in enumerate(workers)]
        replies = [summed(each.wait()).copy() for each in pending]
        w, m = expected(START, [GRADIENT + GRADIENT * 2] * (step + 1))
        for reply in replies:
            np.testing.assert_array_equal(reply, w)
    for worker in workers:  # either rank, alone
        np.testing.assert_array_equal(worker.state.read(0, 1, 0, 4 * ITEMS).view(np.float32), m)
        np.testing.assert_array_equal(worker.state.read(0, 0, 4000, 8000).view(np.float32), w[1000:3000])


def test_a_rank_without_a_contribution_gets_the_parameters_too(cluster: Cluster) -> None:
    workers = job(cluster, 2, momentum(), config=CONFIG)
    workers[0].state.write(0, 0, 0, START)
    pending = [pushed(workers[0], GRADIENT, numbers(0)), jobs.Pending()]
    workers[1].push(0, None, pending[1], step_scalars=numbers(0))
    for each in pending:
        np.testing.assert_array_equal(summed(each.wait()), expected(START, [GRADIENT])[0])


def test_large_slices_are_put_and_got_in_pieces(cluster: Cluster) -> None:
    items = 3 * STATE_PIECE_BYTES // 8 + 1
    config = Config(slice_bytes=2 * STATE_PIECE_BYTES, update="server")
    (worker,) = job(cluster, 1, momentum(items), config=config)
    values = np.arange(items, dtype=np.float32)
    worker.state.write(0, 0, 0, values)
    pushed(worker, np.zeros(items, np.float32), numbers(0)).wait()
    np.testing.assert_array_equal(worker.state.read(0, 0, 0, 4 * items).view(np.float32), values)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            numbers(0, rate=0.5),
            r"at step 0 of bucket 'w' ranks \d and \d have different learning_rate 0\.\d+ and 0\.\d+",
        ),
        (numbers(1), "ranks . and . have different iteration"),
        (numbers(0, mark=2**32), "different values that the program has assigned"),
    ],
)
def test_ranks_that_do_not_step_alike_fail_by_name(cluster: Cluster, given: bytes, message: str) -> None:
    workers = job(cluster, 2, momentum(), config=CONFIG)
    workers[0].state.write(0, 0, 0, START)
    pending = [pushed(workers[0], GRADIENT, numbers(0)), pushed(workers[1], GRADIENT, given)]
    for each in pending:
        error = each.error(MismatchError)
        assert re.search(message, str(error)), error


def test_a_push_without_numbers_or_before_the_parameters_fails_by_name(cluster: Cluster) -> None:
    (worker,) = job(cluster, 1, momentum(), config=CONFIG)
    worker.state.write(0, 0, 0, START)
    assert "step scalars of bucket 'w' must come before the slices of step 0" in str(push(worker, 0, GRADIENT).error())
    (other,) = job(cluster, 1, momentum(), config=CONFIG)
    assert "must be put before its first update" in str(pushed(other, GRADIENT, numbers(0)).error())


def test_parts_of_buckets_that_there_are_not_are_refused(cluster: Cluster) -> None:
    (worker,) = job(cluster, 1, momentum(), jobs.bucket(8), config=CONFIG)
    for call in (
        lambda: worker.state.read(7, 0, 0, 4),
        lambda: worker.state.read(0, 0, 4 * ITEMS, 4),
        lambda: worker.state.write(0, 5, 0, bytes(4)),
        lambda: worker.state.read(1, 0, 0, 4),
    ):
        with pytest.raises(ProtocolError, match="bucket"):
            call()
    worker.state.write(0, 0, 0, START)  # the job goes on
    pushed(worker, GRADIENT, numbers(0)).wait()


def test_the_embedded_exchange_keeps_parameters_as_pservers_do() -> None:
    exchange = EmbeddedExchange()
    exchange.declare([momentum()])
    exchange.state.write(0, 0, 0, START)
    first = pushed(exchange, GRADIENT, numbers(0)).wait().sum
    before = bytes(first)
    second = summed(pushed(exchange, GRADIENT, numbers(1)).wait())
    assert bytes(first) == before  # TensorFlow may hold it
    w, m = expected(START, [GRADIENT] * 2)
    np.testing.assert_array_equal(second, w)
    np.testing.assert_array_equal(exchange.state.read(0, 1, 0, 4 * ITEMS).view(np.float32), m)
    with pytest.raises(ProtocolError, match="bucket must be one with an update, got 3"):
        exchange.state.read(3, 0, 0, 4)


def test_slices_that_keep_something_are_never_cut_anew(cluster: Cluster) -> None:
    workers = job(cluster, 2, momentum(), jobs.bucket(40_000), config=CONFIG)
    workers[0].state.write(0, 0, 0, START)
    for step in range(7):
        together(
            *(lambda w=w, s=step: pushed(w, GRADIENT, numbers(s)).wait() for w in workers),
            *(lambda w=w: push(w, 1, bytes(40_000)).wait() for w in workers),
        )
        if step == 2:
            workers[0].tune(2048, 8192)
    w, _ = expected(START, [GRADIENT + GRADIENT] * 7)
    np.testing.assert_array_equal(workers[1].state.read(0, 0, 0, 4 * ITEMS).view(np.float32), w)
    assert len(workers[0].info.owners(1)) == 20
    assert len(workers[0].info.owners(0)) == 20
