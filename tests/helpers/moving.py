"""A job of elastic workers, whose pservers may be lost, in this process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jobs
import numpy as np
import pytest
from jobs import Cluster, Pending, bucket, poll, push, summed, together

from tfps.config import Config, Security
from tfps.errors import PserverLostError, TfpsError
from tfps.exchange.codecs import codec_of
from tfps.exchange.interface import BucketSpec
from tfps.membership.decision import decide
from tfps.protos import tfps_pb2 as pb
from tfps.pserver import rendezvous
from tfps.pserver.rendezvous import offer
from tfps.pserver.server import ParameterServer
from tfps.recovery.exchange import ElasticExchange
from tfps.trace.recorder import Recorder
from tfps.types import Argument, Array
from tfps.wire.frames import Header
from tfps.wire.shared_memory import Place
from tfps.worker.bucket import Incoming, PushedBucket
from tfps.worker.worker import Worker

CONFIG = dataclasses.replace(jobs.CONFIG, min_workers=1, deterministic=True, rejoin_timeout_s=jobs.DEADLINE_S)
ITEMS = 1024
GRADIENT, WORDS, TOTAL = 0, 1, 2
SPECS = [
    bucket(4 * ITEMS, name="a gradient of four slices"),
    BucketSpec(("words",), "gather", 0, "uint8", 0),
    dataclasses.replace(bucket(4 * ITEMS, name="a total of four slices"), occasional=True),
]


class Job:
    """Workers and pservers, which may be lost."""

    def __init__(
        self, cluster: Cluster, workers: int = 3, pservers: int = 3, config: Config = CONFIG, codec: str = "none"
    ) -> None:
        self.cluster, self.config = cluster, config
        self.servers = [cluster.pserver(workers) for _ in range(pservers)]
        addresses = [server.address for server in self.servers]
        self.workers = together(*(functools.partial(self.worker, addresses, rank) for rank in range(workers)))
        self.specs = [dataclasses.replace(SPECS[GRADIENT], codec=codec_of(codec)), *SPECS[1:]]
        self.declare(self.specs)
        self.random = np.random.default_rng(1)

    def worker(self, addresses: Sequence[str], rank: int) -> ElasticExchange:
        worker = ElasticExchange(addresses, rank=rank, config=self.config, recorder=Recorder())
        self.cluster.callback(worker.close)
        return worker

    def declare(self, specs: Sequence[BucketSpec], details: Sequence[str] = ()) -> None:
        together(*(functools.partial(worker.declare, specs, details) for worker in self.workers))

    def begin(self, number: int, workers: int = 3) -> list[tuple[Pending, Array]]:
        """A round in which the first `workers` have pushed."""
        values = [self.random.normal(size=ITEMS).astype(np.float32) for _ in self.workers[:workers]]
        return [(push(worker, number, each), each) for worker, each in zip(self.workers, values, strict=False)]

    def check(self, pushed: list[tuple[Pending, Array]]) -> None:
        """All have the sum of what all have pushed, in rank order."""
        (_, total), *others = pushed
        for _, values in others:
            total = total + values
        for pending, _ in pushed:
            np.testing.assert_array_equal(summed(pending.wait()), total)

    def step(self) -> None:
        self.check(self.begin(GRADIENT))
        self.check(self.begin(TOTAL))
        pushed = [push(worker, WORDS, f"rank {worker.rank}".encode()) for worker in self.workers]
        for pending in pushed:
            parts = pending.wait().parts
            assert parts is not None
            assert {rank: bytes(part) for rank, part in parts.items()} == {
                worker.rank: f"rank {worker.rank}".encode() for worker in self.workers
            }
        assert len({worker.state.steps(GRADIENT) for worker in self.workers}) == 1

    def goes_on_with(self, servers: Sequence[ParameterServer]) -> None:
        """All workers have these pservers, and no failure."""
        for worker in self.workers:
            assert [link.pserver for link in worker.info.links()] == [server.address for server in servers]
            assert worker.failure is None

    def received(self, rank: int) -> int:
        """How many slices of a rank the pservers have got."""
        return sum(server.status().members[rank].received_slices for server in self.servers)

    def lose(self, *numbers: int) -> None:
        """Ends pservers; returns when all workers go on with others."""
        before = [worker.core.worker for worker in self.workers]
        for number in numbers:
            self.servers[number].stop(0)
        poll(lambda: all(worker.core.worker is not old for worker, old in zip(self.workers, before, strict=True)))

    def lose_to(self, lost: int, other: int) -> None:
        """Ends a pserver; all go on with another one, which offers itself before."""
        offer(self.servers[lost].address, self.servers[other].address, 3, Security())
        address = self.servers[other].address
        poll(lambda: all(address in [link.pserver for link in worker.info.links()] for worker in self.workers))
        self.lose(lost)

    def leave(self, place: int) -> None:
        """One of the workers leaves, and the others know it."""
        self.workers.pop(place).close("SIGTERM")
        left = tuple(worker.rank for worker in self.workers)
        poll(lambda: all(worker.view.ranks == left for worker in self.workers))

    def joiner(self, rank: int, specs: Sequence[BucketSpec] = ()) -> ElasticExchange:
        """One more worker, which takes part from now on."""
        new = self.worker([server.address for server in self.servers], rank)
        assert new.joining.pending
        specs = specs or self.specs
        assert new.declare(specs) == list(range(len(specs)))
        poll(lambda: all(worker.view.ranks == self.workers[0].view.ranks for worker in self.workers))

        def admit(worker: ElasticExchange) -> Sequence[int] | None:
            poll(lambda: bool(worker.joining.joiners(1)))
            return worker.joining.admit([rank])

        together(
            functools.partial(new.joining.take_part, 1), *(functools.partial(admit, worker) for worker in self.workers)
        )
        self.workers.append(new)
        return new


def refused(push: Callable[[], Pending]) -> Exception:
    """The error of a push, at once or as its reply."""
    try:
        return push().error()
    except TfpsError as error:
        return error


def unawaited(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Ranks for which workers that meet do not wait: none yet. They wait for all others, however long that takes."""
    ranks = set[int]()

    def decides(reports: Mapping[int, pb.Report], waited: bool, known: bool) -> pb.Decision | None:
        awaited = set[int]().union(*(report.ranks for report in reports.values())) - ranks
        return decide(reports, awaited <= reports.keys(), known)

    monkeypatch.setattr(rendezvous, "decide", decides)
    return ranks


Deaf = Callable[[ElasticExchange], None]


def deafening(monkeypatch: pytest.MonkeyPatch) -> Deaf:
    """Lets no more replies reach a worker that is passed to what it returns, as of now."""
    take, deaf = Incoming.data, list[Sequence[PushedBucket]]()

    def data(self: Incoming, header: Header, payload: memoryview, place: Place | None) -> None:
        if not any(self._buckets is each for each in deaf):
            take(self, header, payload, place)

    monkeypatch.setattr(Incoming, "data", data)
    return lambda worker: deaf.append(worker.core.worker._buckets)


def lose_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last pserver's answer to the next declaration reaches rank 0 alone."""
    declare = Worker.declare

    def lose_it(worker: Worker, *arguments: Argument) -> list[int]:
        ids = declare(worker, *arguments)
        if worker.rank:
            monkeypatch.setattr(Worker, "declare", declare)
            worker.fail(PserverLostError("its answer did not come"))
            raise PserverLostError("its answer did not come")
        return ids

    monkeypatch.setattr(Worker, "declare", lose_it)
