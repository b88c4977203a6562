"""A network that is cut between workers and pservers: at most one side goes on, and who is on the other says so.

The processes are threads here, so what crosses the cut is held back where it would be sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from jobs import Cluster, poll
from moving import GRADIENT, Job

from tfps.config import Security
from tfps.errors import PserverLostError, WorkerLostError
from tfps.membership.view import View
from tfps.protos import tfps_pb2 as pb
from tfps.pserver import regrouping
from tfps.recovery import rendezvous
from tfps.recovery.rendezvous import meet
from tfps.types import Argument
from tfps.wire.send_queue import SendQueue
from tfps.worker import worker as worker_module
from tfps.worker.client import PserverClient
from tfps.worker.worker import Worker

# gRPC would close a stream across the cut.
pytestmark = pytest.mark.parametrize("cluster", ["both"], indirect=True)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regrouping, "_GRACE_S", 1.0)
    monkeypatch.setattr(worker_module, "_REJOIN_S", 1.0)


class Cut:
    """Between workers and pservers of a job, given which (rank, address) pairs cannot reach each other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, job: Job, apart: Callable[[int, str], bool]) -> None:
        self.healed, self.kept = threading.Event(), list[Worker]()
        ranks = {worker.core.worker.client.uid: worker.rank for worker in job.workers}
        ask, leave, hang_up = rendezvous._ask, PserverClient.leave, Worker._hang_up

        def asks(address: str, security: Argument, uid: str, *rest: Argument) -> rendezvous._Found:
            if uid in ranks and apart(ranks[uid], address) and not self.healed.is_set():
                return rendezvous._Found(rendezvous._Answer.SILENT)
            return ask(address, security, uid, *rest)

        def leaves(client: PserverClient, *reasons: Argument) -> None:
            if not self.healed.is_set():
                rank = client.membership.rank
                client.pservers = [each for each in client.pservers if not apart(rank, each.address)]
            leave(client, *reasons)

        def hangs_up(worker: Worker, reason: str = "") -> None:
            if self.healed.is_set():
                hang_up(worker, reason)
            else:
                worker._leave(reason)
                self.kept.append(worker)  # and its connections with it: their ends do not get through

        close = SendQueue.close
        monkeypatch.setattr(SendQueue, "close", lambda queue: close(queue) if self.healed.is_set() else None)
        monkeypatch.setattr(rendezvous, "_ask", asks)
        monkeypatch.setattr(PserverClient, "leave", leaves)
        monkeypatch.setattr(Worker, "_hang_up", hangs_up)


@pytest.mark.parametrize("heals", [False, True])
def test_the_side_with_more_workers_goes_on_and_the_other_never_takes_the_job_over(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, heals: bool
) -> None:
    """Rank 0 and the first pserver are alone. If the cut heals, it does so while rank 0 waits there for the others."""
    job = Job(cluster, pservers=2)
    job.step()
    own, other = [server.address for server in job.servers]
    cut = Cut(monkeypatch, job, lambda rank, address: (rank == 0) != (address == own))
    for worker in job.workers:
        silent = other if worker.rank == 0 else own
        worker.core.worker.silent_pservers.add(silent)
        worker.core.worker.fail(PserverLostError(f"pserver {silent} has been silent for 5.0 s"))
    poll(lambda: all(len(worker.info.links()) == 1 for worker in job.workers[1:]))
    if heals:
        cut.healed.set()
    alone = job.workers.pop(0)
    poll(lambda: alone.failure is not None)
    assert isinstance(alone.failure, WorkerLostError)
    poll(lambda: all(worker.view.ranks == (1, 2) for worker in job.workers))
    job.check(job.begin(GRADIENT))
    job.goes_on_with(job.servers[1:])


def test_workers_that_cannot_go_on_at_an_idle_pserver_do_not_make_it_one_of_their_job(cluster: Cluster) -> None:
    """Rank 0 alone reaches it, as it was started again; rank 1 may have gone on elsewhere. However often it asks."""
    server = cluster.pserver(2)
    for _ in range(2):
        report = pb.Report(ranks=[0, 1], reason="pserver 10.0.0.1:7070 was stopped")
        with pytest.raises(WorkerLostError, match="ranks 1 may go on elsewhere, with a pserver that does not answer"):
            meet(["127.0.0.1:1", server.address], Security(), "uid", "incarnation", 0, View.first(2), report)
