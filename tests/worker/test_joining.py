"""Joining and leaving: what a worker is told, pserver by pserver, and what it tells them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import jobs
import pytest
from jobs import Cluster

from tfps.errors import ClosedError, ConnectError
from tfps.protos import tfps_pb2 as pb
from tfps.wire.control import Pserver
from tfps.wire.shared_memory import Sharing
from tfps.worker.joining import Joined, join, leave


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def joined(
    cluster: Cluster, addresses: list[str], rank: int = -1, workers: int = 0
) -> tuple[list[Pserver], list[Joined]]:
    """A worker that has joined these pservers, without shared memory."""
    pservers = [Pserver(address) for address in addresses]
    memory = Sharing(False)
    for end in (memory.close, *(pserver.close for pserver in pservers)):
        cluster.callback(end)
    deadline_s = time.monotonic() + jobs.DEADLINE_S
    return pservers, list(join(pservers, jobs.CONFIG, memory, deadline_s, "", rank, workers))


def test_all_pservers_give_a_worker_the_same_place(cluster: Cluster) -> None:
    addresses = cluster.pservers(2, 3)
    _, first = joined(cluster, addresses, rank=2)
    _, second = joined(cluster, addresses)
    for answers, rank in ((first, 2), (second, 0)):
        memberships = [answer.membership for answer in answers]
        assert len(memberships) == 2
        assert set(memberships) == {memberships[0]}
        assert (memberships[0].rank, memberships[0].workers) == (rank, 3)
    assert first[0].membership.incarnation == second[0].membership.incarnation != ""
    assert not any(answer.shares_memory for answer in first + second)


def test_a_membership_does_not_change(cluster: Cluster) -> None:
    _, answers = joined(cluster, cluster.pservers(1, 1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        answers[0].membership.rank = 1  # type: ignore[misc]


def test_a_refusal_by_the_second_pserver_comes_after_the_place_in_the_job(cluster: Cluster) -> None:
    pservers = [Pserver(cluster.pserver(workers).address) for workers in (1, 2)]
    memory = Sharing(False)
    for end in (memory.close, *(pserver.close for pserver in pservers)):
        cluster.callback(end)
    answers = join(pservers, jobs.CONFIG, memory, time.monotonic() + jobs.DEADLINE_S, "", -1, 0)
    membership = next(answers).membership  # with it the first one can be left again
    with pytest.raises(ConnectError, match=f"pserver {pservers[1].address}: .*--workers 2"):
        next(answers)
    leave(pservers, membership, None)
    joined(cluster, [pservers[0].address])


def test_a_worker_that_leaves_says_why_to_every_pserver(cluster: Cluster) -> None:
    servers = [cluster.pserver(1) for _ in range(2)]
    pservers, answers = joined(cluster, [server.address for server in servers])
    leave(pservers, answers[0].membership, ClosedError("its script has ended"))
    for pserver in pservers:
        request = pb.DeclareRequest(incarnation=answers[0].membership.incarnation, rank=0, timeout_s=1.0)
        with pytest.raises(ClosedError, match="its script has ended"):
            pserver.call("Declare", request, jobs.DEADLINE_S)


def test_leaving_goes_on_where_a_pserver_is_gone(cluster: Cluster) -> None:
    servers = [cluster.pserver(1) for _ in range(2)]
    pservers, answers = joined(cluster, [server.address for server in servers])
    servers[0].stop(0.0)
    leave(pservers, answers[0].membership, None)
    joined(cluster, [servers[1].address])
