"""Buckets with both a codec and an update: pushes bring encoded gradients, replies encoded changes of parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jobs
import numpy as np
import pytest
from jobs import Cluster, Pending, declare, job, summed
from recorded import sends

from tfps.config import Config
from tfps.errors import ConfigError
from tfps.exchange.codecs import codec_of, known
from tfps.exchange.interface import BucketSpec, Exchange, kept_arrays
from tfps.exchange.rules import flushed
from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.trace.recorder import Recorder
from tfps.types import Argument
from tfps.worker.embedded import EmbeddedExchange

NAMES = ["bfloat16", "float16", "int8", "topk:0.05", "onebit"]
ITEMS, SLICE = 5003, 256  # does not divide: slices of 1 KiB, blocks of 256 and of 1024
SHOWN = 2  # number of what workers have: after the parameters and the momentum
CONFIG = Config(
    *(4 * SLICE, 4096), update="server", deterministic=True, connect_timeout_s=jobs.DEADLINE_S, step_timeout_s=60
)


def spec(codec: str, items: int = ITEMS) -> BucketSpec:
    update = UpdateSpec("sgd", (("momentum", 0.5), ("nesterov", 0.0)), (("momentum", 0.0),), (items,), (False,))
    return BucketSpec(("w",), "sum", 4 * items, "float32", 0, codec=codec_of(codec), update=update)


def random(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=ITEMS).astype(np.float32)


def kept(exchange: Exchange, number: int) -> np.ndarray:
    return exchange.state.read(0, number, 0, 4 * ITEMS).view(np.float32)


class Ranks:
    """All ranks of a job, each with a variable that begins with `start`."""

    def __init__(self, workers: Sequence[Exchange], start: np.ndarray) -> None:
        self.workers, self.variable, self.steps = workers, start.copy(), 0
        workers[0].state.write(0, 0, 0, start)

    def begin(self, gradients: Sequence[np.ndarray | None], mark: int = 0) -> list[Pending]:
        pending = []
        for worker, gradient in zip(self.workers, gradients, strict=True):
            pending.append(Pending())
            numbers = StepScalars(mark, (float(self.steps), 0.25), wrote=worker is self.workers[0]).pack()
            worker.push(0, gradient, pending[-1], step_scalars=numbers)
        self.steps += 1
        return pending

    def step(self, gradients: Sequence[np.ndarray | None]) -> np.ndarray:
        """What all ranks then have, bitwise the same."""
        first, *others = [summed(each.wait()) for each in self.begin(gradients)]
        for other in others:
            assert other.tobytes() == first.tobytes()
        with flushed():
            self.variable = self.variable + first
        return self.variable

    def collected(self) -> np.ndarray:
        """The residuals of the ranks' gradients."""
        pending = []
        for worker in self.workers:
            pending.append(Pending())
            worker.state.collect_residual(0, pending[-1])
        first, *_ = [summed(each.wait()).copy() for each in pending]  # each rank's: it holds from its reply on
        return first


class ByHand:
    """The same slice by slice, without tfps' rounds, rules and changes."""

    def __init__(self, codec: str, workers: int, start: np.ndarray) -> None:
        self.codec, self.parameters, self.shown = known(codec), start.copy(), start.copy()
        self.momentum = np.zeros_like(start)
        self.held = [np.zeros_like(start) for _ in range(workers)]

    def _sent(self, values: np.ndarray, held: np.ndarray | None = None) -> np.ndarray:
        decoded = np.empty_like(values)
        self.codec.decode(self.codec.encode(values, held), decoded)
        return decoded

    def step(self, gradients: Sequence[np.ndarray]) -> None:
        for begin in range(0, ITEMS, SLICE):
            where = slice(begin, min(begin + SLICE, ITEMS))
            total = np.zeros(where.stop - begin, np.float32)
            for gradient, held in zip(gradients, self.held, strict=True):
                total = total + self._sent(gradient[where], held[where])
            self.momentum[where] = self.momentum[where] * np.float32(0.5) - total * np.float32(0.25)
            self.parameters[where] += self.momentum[where]
            self.shown[where] += self._sent(self.parameters[where] - self.shown[where])


CASES = [*(("tcp", 2, codec) for codec in NAMES), ("grpc", 3, "int8"), ("shared memory", 3, "topk:0.05")]


@pytest.mark.parametrize(("cluster", "workers", "codec"), CASES, indirect=["cluster"])
def test_ranks_and_pservers_have_bitwise_what_numpy_has(cluster: Cluster, codec: str, workers: int) -> None:
    ranks = Ranks(job(cluster, workers, spec(codec), pservers=2, config=CONFIG), random(0))
    by_hand = ByHand(codec, workers, random(0))
    for number in range(4):
        gradients = [random(100 * number + rank) for rank in range(workers)]
        by_hand.step(gradients)
        assert ranks.step(gradients).tobytes() == by_hand.shown.tobytes()
        for worker in ranks.workers:  # either rank, alone
            assert kept(worker, SHOWN).tobytes() == by_hand.shown.tobytes()
            np.testing.assert_array_equal(kept(worker, 0), by_hand.parameters)
            np.testing.assert_array_equal(kept(worker, 1), by_hand.momentum)


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "topk:0.05"])
def test_what_is_put_counts_from_the_next_push_on_and_is_shown_with_it(cluster: Cluster, codec: str) -> None:
    ranks = Ranks(job(cluster, 2, spec(codec), pservers=3, config=CONFIG), random(0))
    by_hand = ByHand(codec, 2, random(0))
    gradients = [random(1), random(2)]
    by_hand.step(gradients)
    ranks.step(gradients)
    ranks.workers[0].state.write(0, 0, 4 * 100, random(3)[100:900])  # a part, across slices
    ranks.workers[0].state.write(0, 0, 4 * 2000, random(3)[2000:2010])
    ranks.workers[0].state.write(0, SHOWN, 4 * 2005, random(4)[2005:2010])  # as from a checkpoint
    assert kept(ranks.workers[1], 0).tobytes() == by_hand.parameters.tobytes()  # a slower rank still reads
    assert kept(ranks.workers[1], SHOWN).tobytes() == by_hand.shown.tobytes()
    for where in (slice(100, 900), slice(2000, 2010)):
        by_hand.parameters[where] = by_hand.shown[where] = random(3)[where]
    by_hand.shown[2005:2010] = random(4)[2005:2010]
    ranks.variable = by_hand.shown.copy()  # every rank assigns it locally
    by_hand.step(gradients)
    assert ranks.step(gradients).tobytes() == by_hand.shown.tobytes()
    assert kept(ranks.workers[1], 0).tobytes() == by_hand.parameters.tobytes()


@pytest.mark.parametrize("codec", ["int8", "onebit"])
def test_to_collect_the_residuals_changes_nothing_that_pservers_keep(cluster: Cluster, codec: str) -> None:
    ranks = Ranks(job(cluster, 2, spec(codec), pservers=2, config=CONFIG), random(0))
    by_hand = ByHand(codec, 2, random(0))
    for number in range(4):
        gradients = [random(number), random(number + 10)]
        by_hand.step(gradients)
        ranks.step(gradients)
        if number in (1, 2):
            for _ in range(number):  # twice in a row, too
                held = ranks.collected()
            assert held.tobytes() == (by_hand.held[0] + by_hand.held[1]).tobytes()
            by_hand.held = [held, np.zeros_like(held)]
        assert kept(ranks.workers[0], 0).tobytes() == by_hand.parameters.tobytes()
        assert ranks.variable.tobytes() == by_hand.shown.tobytes()


def test_ranks_without_rows_get_the_change_too(cluster: Cluster) -> None:
    ranks = Ranks(job(cluster, 2, spec("int8"), config=CONFIG), random(0))
    ranks.step([random(1), None])
    before = ranks.variable
    ranks.step([None, None])  # the momentum goes on
    assert (ranks.variable != before).any()
    assert kept(ranks.workers[1], SHOWN).tobytes() == ranks.variable.tobytes()


def test_both_directions_are_encoded(cluster: Cluster) -> None:
    recorder = Recorder()
    server = cluster.pserver(1)
    worker = cluster.worker([server.address], 0, config=CONFIG, recorder=recorder)
    declare([worker], spec("int8"))
    ranks = Ranks([worker], random(0))
    recorder.start()
    ranks.step([random(1)])
    encoded = ITEMS + 4 * -(-ITEMS // 256)
    assert sum(each.nbytes for each in sends(recorder)) == encoded
    (member,) = server.status().members
    assert member.sent_bytes == member.received_bytes == encoded


def test_the_embedded_exchange_replies_with_the_change_too() -> None:
    exchange = EmbeddedExchange()
    exchange.declare([spec("int8")])
    ranks = Ranks([exchange], random(0))
    for number in range(3):
        ranks.step([random(number)])
        assert kept(exchange, SHOWN).tobytes() == ranks.variable.tobytes()
    np.testing.assert_allclose(ranks.variable, kept(exchange, 0), atol=0.02)


def test_what_workers_have_takes_memory_and_residuals_do_not() -> None:
    assert [kept_arrays(spec(codec)) for codec in ("none", "bfloat16", "int8")] == [2, 3, 3]
    assert [kept_arrays(dataclasses.replace(spec(codec), update=None)) for codec in ("none", "bfloat16", "int8")] == [
        *(0, 0, 1)
    ]


@pytest.mark.parametrize("fields", [{"dtype": "float64"}, {"nbytes": 8}])
def test_other_buckets_are_refused(fields: dict[str, Argument]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        dataclasses.replace(spec("int8"), **fields)
