"""Slices of mode "async", without a network: whom a push answers, and who waits for whom."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfps.config import Config
from tfps.errors import ConfigError
from tfps.exchange.aggregate import SliceFormat
from tfps.exchange.interface import BucketSpec
from tfps.exchange.parameter_shard import ParameterShard
from tfps.exchange.staleness import StalenessBound
from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.membership.view import RankSets, View
from tfps.pserver import shard as shard_module
from tfps.pserver.async_slice import AsyncSlice, RankScalars
from tfps.pserver.shard import Shard
from tfps.pserver.slices import Answer, Push
from tfps.trace.recorder import Recorder
from tfps.wire.frames import Header, Kind

SGD = UpdateSpec("sgd", (("momentum", 0.0), ("nesterov", 0.0)), (), (4,), (False,))
ASSIGNED = 2**32


class Ranks:
    """The ranks of one slice of four ones, from which each push takes one."""

    def __init__(self, workers: int, staleness: int | None) -> None:
        self.bound = StalenessBound(View.first(workers), staleness)
        self.scalars = RankScalars("w", SGD, View.first(workers))
        parameters = ParameterShard("slice 0 of bucket 'w'", SGD, 0, 16)
        parameters.put(0, 0, np.ones(4, np.float32).data)
        format_ = SliceFormat("slice 0 of bucket 'w'", np.dtype(np.float32), 16)
        sets = RankSets(range(workers), print)
        self.slice = AsyncSlice(Recorder(), format_, sets, parameters, self.scalars, self.bound, 0.0)
        self.steps = [0] * workers
        for rank in range(workers):
            self.answered = self.push(rank, ASSIGNED)

    def push(self, rank: int, mark: int = 0) -> dict[int, float]:
        """The answers: rank and its first parameter."""
        step, self.steps[rank] = self.steps[rank], self.steps[rank] + 1
        scalars = StepScalars(mark, (float(step), 1.0), wrote=mark > 0 and rank == 0)
        assert self.scalars.take(rank, step, memoryview(scalars.pack()), ()) is None
        gradient = memoryview(np.ones(4, np.float32).tobytes())
        return self.values(self.slice.take(Push(rank, Header(Kind.PUSH, step=step), gradient))[0])

    def released(self) -> dict[int, float]:
        return self.values(self.slice.released())

    @staticmethod
    def values(answers: Collection[Answer]) -> dict[int, float]:
        found: dict[int, float] = {}
        for answer in answers:
            assert isinstance(answer.payload, memoryview)
            found |= dict.fromkeys(answer.ranks, float(np.frombuffer(answer.payload, np.float32)[0]))
        return found


@given(
    workers=st.integers(1, 4),
    staleness=st.one_of(st.none(), st.integers(0, 3)),
    moves=st.lists(st.tuples(st.sampled_from(["push", "push", "push", "quiesce"]), st.integers(0, 3)), max_size=60),
)
def test_answers_keep_ranks_within_the_limit_and_hold_nobody_else_back(
    workers: int, staleness: int | None, moves: list[tuple[str, int]]
) -> None:
    ranks = Ranks(workers, staleness)
    assert ranks.answered.keys() == set(range(workers))
    done, waiting, quiesced = [1] * workers, set[int](), set[int]()
    for move, number in moves:
        rank = number % workers
        if rank in waiting:
            continue
        answers: dict[int, float] = {}
        if move == "push":
            answers = ranks.push(rank)
            done[rank] += 1
            waiting.add(rank)
        else:
            ranks.bound.quiesce(rank)
            quiesced.add(rank)
            if len(quiesced) == workers:
                done, quiesced = [0] * workers, set()
            answers = ranks.released()
        slowest = min((done[each] for each in range(workers) if each not in quiesced), default=0)
        due = {each for each in waiting if staleness is None or done[each] - slowest <= staleness}
        assert answers.keys() == due
        waiting -= due
        behind = {each for each in range(workers) if each not in quiesced and waiting and done[each] == slowest}
        assert behind <= set(ranks.slice.missing())


def test_an_answer_keeps_its_values_while_others_push() -> None:
    ranks = Ranks(2, None)
    answers, _ = ranks.slice.take(Push(0, Header(Kind.PUSH, flags=1, step=1), memoryview(b"")))
    ranks.push(1)
    assert Ranks.values(answers) == {0: -1.0}


def test_a_rank_alone_is_told_whom_it_waits_for() -> None:
    ranks = Ranks(3, 1)
    for rank in (0, 0, 1):
        ranks.push(rank)
    assert ranks.slice.missing(0) == [2]
    assert ranks.slice.missing(1) == []
    assert ranks.slice.late([2]) is None  # without it they go on: it may leave
    ranks.bound.quiesce(2, departed=True)
    assert ranks.released().keys() == {0}


def test_what_ranks_have_takes_memory_if_delay_is_compensated() -> None:
    spec = BucketSpec(("w",), "sum", 16, "float32", 0, update=SGD)
    for delay, workers, fits in ((0.0, 3, True), (0.5, 3, False), (0.5, 1, True)):
        config = Config(mode="async", update="server", slice_bytes=1024, delay_compensation=delay)
        beside = shard_module._SLICE_BYTES + shard_module._ARRAY_BYTES + shard_module._text_bytes(spec)
        shard = Shard(config, View.first(workers), 0, Recorder(), max_memory=beside + 4 * 16)
        if fits:
            shard.check([spec])
        else:
            with pytest.raises(ConfigError, match="must fit into"):
                shard.check([spec])
