"""A worker learns that another one waits for its push, and lets its own wait begin anew."""

from __future__ import annotations

import jobs
import pytest
from jobs import Cluster, bucket, job, push

from tfps.errors import TfpsError
from tfps.worker.embedded import EmbeddedExchange


def test_a_push_is_wanted_while_another_rank_waits_for_it(cluster: Cluster) -> None:
    first, second = job(cluster, 2, bucket(4096, 0), bucket(8192, 1), pservers=2)
    assert not first.wanted(1)
    assert not second.wanted(1)
    waiting = push(first, 1, bytes(8192))
    jobs.poll(lambda: second.wanted(1))
    assert not first.wanted(1)
    assert not second.wanted(0)
    push(second, 1, None).wait()
    waiting.wait()
    assert not second.wanted(1)


def test_a_wait_that_is_renewed_begins_anew(cluster: Cluster) -> None:
    first, second = job(cluster, 2, bucket(4096, 0))
    first.renew(0)  # nothing is outstanding
    waiting = push(first, 0, bytes(4096))
    current = first._buckets[0].current
    assert current is not None
    began_s = current.started_s
    first.renew(0)
    assert current.started_s > began_s
    push(second, 0, None).wait()
    waiting.wait()


def test_a_failed_exchange_says_so(cluster: Cluster) -> None:
    (worker,) = job(cluster, 1, bucket(4096, 0))
    worker.fail(TfpsError("stopped"))
    with pytest.raises(TfpsError, match="stopped"):
        worker.wanted(0)


def test_nobody_waits_for_a_single_worker() -> None:
    exchange = EmbeddedExchange()
    (number,) = exchange.declare([bucket(4096, 0)])
    assert not exchange.wanted(number)
    exchange.renew(number)
