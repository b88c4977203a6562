"""Workers go on when pservers are lost, bitwise as if none had been (Config.min_workers)."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence

import jobs
import numpy as np
import pytest
from jobs import Cluster, Failed, Pending, attempt, bucket, poll, push, summed, together

from tfps.config import Config
from tfps.errors import MismatchError, PserverLostError, TfpsError, WorkerLostError
from tfps.exchange.interface import BucketSpec
from tfps.pserver.server import ParameterServer
from tfps.trace.recorder import Recorder
from tfps.worker.elastic import ElasticWorker

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

    def __init__(self, cluster: Cluster, workers: int = 3, pservers: int = 3, config: Config = CONFIG) -> None:
        self.cluster, self.config = cluster, config
        self.servers = [cluster.pserver(workers) for _ in range(pservers)]
        addresses = [server.address for server in self.servers]
        self.workers = together(*(functools.partial(self.worker, addresses, rank) for rank in range(workers)))
        self.declare(SPECS)
        self.random = np.random.default_rng(1)
        self.steps = 0

    def worker(self, addresses: Sequence[str], rank: int) -> ElasticWorker:
        worker = ElasticWorker(addresses, rank=rank, config=self.config, recorder=Recorder())
        self.cluster.callback(worker.close)
        return worker

    def declare(self, specs: Sequence[BucketSpec], details: Sequence[str] = ()) -> None:
        together(*(functools.partial(worker.declare, specs, details) for worker in self.workers))

    def begin(self, number: int) -> list[tuple[Pending, np.ndarray]]:
        values = [self.random.normal(size=ITEMS).astype(np.float32) for _ in self.workers]
        return [(push(worker, number, each), each) for worker, each in zip(self.workers, values, strict=True)]

    def check(self, pushed: list[tuple[Pending, np.ndarray]]) -> None:
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
        self.steps += 1
        assert {worker.steps(GRADIENT) for worker in self.workers} == {self.steps}


@pytest.mark.parametrize("which", [[0], [1], [2], [0, 1], [1, 2]])
def test_a_job_goes_on_without_pservers_that_end(cluster: Cluster, which: list[int]) -> None:
    job = Job(cluster)
    job.step()
    values = [np.full(ITEMS, 1 + worker.rank, np.float32) for worker in job.workers]
    first = push(job.workers[0], GRADIENT, values[0])  # the others have not begun this round
    for index in which:
        job.servers[index].stop(0)
    rest = zip(job.workers[1:], values[1:], strict=True)
    pushed = [first, *(push(worker, GRADIENT, each) for worker, each in rest)]
    for pending in pushed:
        np.testing.assert_array_equal(summed(pending.wait()), sum(values))
    job.steps += 1
    for each in (TOTAL, WORDS):
        for pending in [push(worker, each, None) for worker in job.workers]:
            pending.wait()
    job.step()
    left = {server.address for index, server in enumerate(job.servers) if index not in which}
    assert {link.pserver for link in job.workers[0].links()} == left
    assert all(worker.failure is None for worker in job.workers)
