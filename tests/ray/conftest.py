"""A Ray cluster on this machine: a head without CPUs, where the tests are, and two nodes for workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import on_ray
import pytest

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

CPUS = 2  # of each node
_STORE_BYTES = 80 * 2**20  # about the least that Ray takes


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Connected to; one for all tests, as it takes 10 s to start."""
    import ray

    os.environ.update(
        on_ray.WITHOUT_AUTH,
        RAY_TRAIN_METRICS_ENABLED="0",  # they would need the dashboard
        RAY_USAGE_STATS_ENABLED="0",  # tests tell nobody
    )
    for left in reversed(range(3)):
        try:
            cluster = _start()
            break
        except Exception:  # what Ray raises if a node is not there within 30 s: the machine is busy
            if not left:
                raise
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def clean(cluster: Cluster) -> Iterator[None]:
    """Nothing of a job is left after it, however it ended."""
    yield
    on_ray.nothing_is_left()


@pytest.fixture
def spot(cluster: Cluster) -> Iterator[Callable[[], None]]:
    """Adds a node with one CPU and one "spot", as `on_ray.SPOT` wants; afterwards all of them go."""
    nodes = []

    def add() -> None:
        nodes.append(cluster.add_node(num_cpus=1, resources={"spot": 1}, object_store_memory=_STORE_BYTES))

    yield add
    for node in nodes:
        cluster.remove_node(node)


def _start() -> Cluster:
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=0, object_store_memory=_STORE_BYTES, include_dashboard=False)
        for _ in range(2):
            cluster.add_node(num_cpus=CPUS, object_store_memory=_STORE_BYTES)
    except BaseException:
        cluster.shutdown()
        raise
    return cluster
