"""Mode "async": each push is applied as it comes, and brings the newest parameters to its rank alone."""

from __future__ import annotations

from collections.abc import Iterator

import jobs
import numpy as np
import pytest
from jobs import Cluster, job, summed

from tfps.config import Config
from tfps.exchange.interface import BucketSpec
from tfps.exchange.update_spec import StepNumbers, UpdateSpec
from tfps.worker.worker import Worker

ITEMS = 3000
ASSIGNED = 2**32
CONFIG = Config(
    slice_bytes=1024, window_bytes=4096, update="server", mode="async", connect_timeout_s=60, step_timeout_s=60
)
START = np.arange(ITEMS, dtype=np.float32)
GRADIENT = np.linspace(-1, 1, ITEMS, dtype=np.float32)


@pytest.fixture
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Over the first pserver's data connection and other pservers' shared memory, unless a test asks for a path."""
    jobs.use(getattr(request, "param", "both"), monkeypatch)
    with Cluster() as cluster:
        yield cluster


def sgd(momentum: float = 0.5, name: str = "w") -> BucketSpec:
    slots = (("momentum", 0.0),) if momentum else ()
    update = UpdateSpec("sgd", (("momentum", momentum), ("nesterov", 0.0)), slots, (ITEMS,), (False,))
    return BucketSpec((name,), "sum", 4 * ITEMS, "float32", 0, update=update.text())


def adam() -> BucketSpec:
    constants = (("beta_1", 0.9), ("beta_2", 0.999), ("epsilon", 1e-7))
    update = UpdateSpec("adam", constants, (("momentum", 0.0), ("velocity", 0.0)), (ITEMS,), (False,))
    return BucketSpec(("w",), "sum", 4 * ITEMS, "float32", 0, update=update.text())


class Rank:
    """A rank that counts its steps as a program does."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.steps = worker, 0

    def push(self, gradient: np.ndarray | None, *more: float, rate: float = 0.25, mark: int = 0) -> jobs.Pending:
        """Pushes the gradient of the next step; the first one has assigned values, as every program does."""
        pending = jobs.Pending()
        numbers = StepNumbers(mark or (0 if self.steps else ASSIGNED), (float(self.steps), rate, *more))
        self.steps += 1
        self.worker.push(0, gradient, pending, numbers=numbers.pack())
        return pending

    def step(self, gradient: np.ndarray | None, *more: float) -> np.ndarray:
        return summed(self.push(gradient, *more).wait()).copy()

    def read(self) -> np.ndarray:
        pending = jobs.Pending()
        self.worker.push(0, None, pending)
        return summed(pending.wait()).copy()


def begun(
    cluster: Cluster, workers: int, spec: BucketSpec, config: Config = CONFIG, pservers: int = 2, start: float = 1.0
) -> list[Rank]:
    """Ranks that have taken a first step, without a gradient: all have the parameters that rank 0 has put."""
    members = job(cluster, workers, spec, pservers=pservers, config=config)
    members[0].put(0, 0, 0, START * np.float32(start))
    ranks = [Rank(each) for each in members]
    alpha = (0.001,) if "adam" in spec.update else ()
    for each in [rank.push(None, *alpha) for rank in ranks]:
        np.testing.assert_array_equal(summed(each.wait()), START * np.float32(start))
    return ranks


@pytest.mark.parametrize("cluster", ["tcp", "grpc", "shared memory", "both"], indirect=True)
def test_every_push_is_applied_as_it_comes_and_its_rank_gets_the_newest(cluster: Cluster) -> None:
    ranks = begun(cluster, 3, sgd())
    w, m = START.copy(), np.zeros_like(START)
    for number in (0, 2, 2, 1, 0, 2, 1, 1, 1):
        gradient = GRADIENT * np.float32(number + 1)
        m = m * np.float32(0.5) - gradient * np.float32(0.25)
        w = w + m
        np.testing.assert_array_equal(ranks[number].step(gradient), w)
    np.testing.assert_array_equal(ranks[1].worker.get(0, 1, 0, 4 * ITEMS).view(np.float32), m)


def test_adam_goes_by_the_numbers_of_the_rank_that_pushes(cluster: Cluster) -> None:
    ranks = begun(cluster, 2, adam())
    f = np.float32
    w, m, v = START, np.zeros(ITEMS, np.float32), np.zeros(ITEMS, np.float32)
    for number in (1, 1, 0, 1):
        alpha = 0.01 * (number + 1)
        m = m + (GRADIENT - m) * f(1 - 0.9)
        v = v + (np.square(GRADIENT) - v) * f(1 - 0.999)
        w = w - m * f(alpha) / (np.sqrt(v) + f(1e-7))
        np.testing.assert_array_equal(ranks[number].step(GRADIENT, alpha), w)
