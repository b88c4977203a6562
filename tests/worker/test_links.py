"""What a worker measures of the ways to its pservers."""

from __future__ import annotations

import jobs
import numpy as np
from jobs import Cluster, push

from tfps.exchange.interface import BucketSpec

SPEC = BucketSpec(("kernel",), "sum", 1 << 20, "float32", 0)


def test_each_link_has_its_pserver_and_the_cpu_time_of_a_step_once_there_was_one(cluster: Cluster) -> None:
    addresses = cluster.pservers(2, 1)
    worker = cluster.worker(addresses)
    worker.declare([SPEC])
    before = worker.links()
    assert [link.pserver for link in before] == addresses
    assert [(link.bytes_per_s, link.cpu_s_per_step) for link in before] == [(0.0, None)] * 2
    for _ in range(3):
        push(worker, 0, np.ones(SPEC.nbytes // 4, np.float32)).wait()
    for link in worker.links():
        assert link.cpu_s_per_step is not None
        assert link.cpu_s_per_step > 0


def test_a_rate_is_known_once_slices_have_waited_long_enough(cluster: Cluster) -> None:
    (worker,) = cluster.workers(cluster.pservers(1, 1), 1)
    worker.declare([SPEC])

    def known() -> bool:
        push(worker, 0, np.ones(SPEC.nbytes // 4, np.float32)).wait()
        return worker.links()[0].bytes_per_s > 0

    assert worker.links()[0].bytes_per_s == 0
    jobs.poll(known)
