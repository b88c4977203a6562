"""What a worker tells and asks its pservers: joining and leaving, measurements, and who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Iterator

import jobs
import numpy as np
import pytest
from jobs import Cluster, bucket, job, push

from tfps.errors import ClosedError, ConnectError
from tfps.exchange.interface import BucketSpec, FailureState
from tfps.protos import tfps_pb2 as pb
from tfps.wire.control import Pserver
from tfps.wire.shared_memory import Sharing
from tfps.worker.client import PserverClient


def client_of(cluster: Cluster, addresses: list[str], rank: int = -1) -> PserverClient:
    """Of a worker that has not joined."""
    pservers = [Pserver(address) for address in addresses]
    for pserver in pservers:
        cluster.callback(pserver.close)
    return PserverClient(pservers, jobs.CONFIG, [], FailureState(), rank)


def joining(client: PserverClient) -> Iterator[pb.JoinReply]:
    """Joins pserver after pserver, without shared memory."""
    return client.join("", 0, Sharing(False), time.monotonic() + jobs.DEADLINE_S)


def joined(cluster: Cluster, addresses: list[str], rank: int = -1) -> PserverClient:
    client = client_of(cluster, addresses, rank)
    assert not any(answer.shared_memory for answer in joining(client))
    return client


def test_all_pservers_give_a_worker_the_same_place(cluster: Cluster) -> None:
    addresses = cluster.pservers(2, 3)
    incarnations = set()
    for requested, rank in ((2, 2), (-1, 0)):
        client = client_of(cluster, addresses, requested)
        places = {client.membership for _ in joining(client)}
        assert [(place.rank, place.view.workers) for place in places] == [(rank, 3)]
        incarnations |= {place.incarnation for place in places}
    assert len(incarnations) == 1 and "" not in incarnations


def test_a_refusal_by_the_second_pserver_comes_after_the_place_in_the_job(cluster: Cluster) -> None:
    addresses = [cluster.pserver(workers).address for workers in (1, 2)]
    client = client_of(cluster, addresses)
    answers = joining(client)
    next(answers)
    assert client.membership.incarnation  # with it the first one can be left again
    with pytest.raises(ConnectError, match=f"pserver {addresses[1]}: .*--workers 2"):
        next(answers)
    client.leave(None)
    joined(cluster, addresses[:1])


def test_a_worker_that_leaves_says_why_to_every_pserver(cluster: Cluster) -> None:
    client = joined(cluster, [cluster.pserver(1).address for _ in range(2)])
    client.leave(ClosedError("its script has ended"))
    for pserver in client.pservers:
        request = pb.DeclareRequest(incarnation=client.membership.incarnation, rank=0, timeout_s=1.0)
        with pytest.raises(ClosedError, match="its script has ended"):
            pserver.call("Declare", request, jobs.DEADLINE_S)


def test_leaving_goes_on_where_a_pserver_is_gone(cluster: Cluster) -> None:
    servers = [cluster.pserver(1) for _ in range(2)]
    client = joined(cluster, [server.address for server in servers])
    servers[0].stop(0.0)
    client.leave(None)
    joined(cluster, [servers[1].address])


SPEC = BucketSpec(("kernel",), "sum", 1 << 20, "float32", 0)


def test_each_link_has_its_pserver_and_the_cpu_time_of_a_step_once_there_was_one(cluster: Cluster) -> None:
    addresses = cluster.pservers(2, 1)
    worker = cluster.worker(addresses)
    worker.declare([SPEC])
    before = worker.info.links()
    assert [link.pserver for link in before] == addresses
    assert [(link.bytes_per_s, link.cpu_s_per_step) for link in before] == [(0.0, None)] * 2
    for _ in range(3):
        push(worker, 0, np.ones(SPEC.nbytes // 4, np.float32)).wait()
    for link in worker.info.links():
        assert link.late_s == {0: 0.0}
        assert link.cpu_s_per_step is not None
        assert link.cpu_s_per_step > 0


def test_a_rate_is_known_once_slices_have_waited_long_enough(cluster: Cluster) -> None:
    (worker,) = cluster.workers(cluster.pservers(1, 1), 1)
    worker.declare([SPEC])

    def known() -> bool:
        push(worker, 0, np.ones(SPEC.nbytes // 4, np.float32)).wait()
        return worker.info.links()[0].bytes_per_s > 0

    assert worker.info.links()[0].bytes_per_s == 0
    jobs.poll(known)


def test_a_push_is_awaited_while_another_rank_waits_for_it(cluster: Cluster) -> None:
    first, second = job(cluster, 2, bucket(4096, 0), bucket(8192, 1), pservers=2)
    assert not first.peers.is_awaited(1)
    assert not second.peers.is_awaited(1)
    waiting = push(first, 1, bytes(8192))
    jobs.poll(lambda: second.peers.is_awaited(1))
    assert not first.peers.is_awaited(1)
    assert not second.peers.is_awaited(0)
    push(second, 1, None).wait()
    waiting.wait()
    assert not second.peers.is_awaited(1)


def test_a_deadline_that_is_extended_begins_anew(cluster: Cluster) -> None:
    first, second = job(cluster, 2, bucket(4096, 0))
    waiting = push(first, 0, bytes(4096))
    current = first._buckets[0].current
    assert current is not None
    began_s = current.started_s
    first.peers.extend_deadline(0)
    assert current.started_s > began_s
    push(second, 0, None).wait()
    waiting.wait()
