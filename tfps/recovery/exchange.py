"""An `Exchange` that goes on when pservers are lost, come back, or join (`Config.outlives_pservers`).

Such a job keeps nothing on its pservers but rounds under way. So a lost pserver ends the job there; its workers meet,
agree where each bucket is, and begin the job anew: see tfps/membership/decision.py. What a worker has pushed is kept
until the reply, and the reply until the next one, by reference; of what pservers update more (journal.py).

Tested in tests/worker/test_lost_pservers.py, tests/worker/test_lost_meanwhile.py and
tests/elastic/test_lost_pservers.py.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from tfps.config import Config
from tfps.errors import ClosedError, TfpsError
from tfps.exchange.interface import BucketSpec, Captures, FailureListener, OnReply, Payload, Reply
from tfps.membership.view import View, run_of
from tfps.recovery.core import Core, ToDo
from tfps.recovery.declarations import Declarations
from tfps.recovery.facets import ElasticInfo, ElasticPeers, ElasticState
from tfps.recovery.joining import ElasticJoining
from tfps.recovery.journal import Push
from tfps.recovery.machine import Closed, Offered, TimedOut
from tfps.recovery.pushing import Pushing
from tfps.recovery.reconfiguration import Reconfiguration
from tfps.recovery.tables import ElasticTables
from tfps.recovery.workers import MOST_CONNECT_S, Workers
from tfps.trace.recorder import Recorder


class ElasticExchange:
    """Has one `Worker` after the other. The constructor is that of `Worker`."""

    def __init__(
        self,
        pservers: Sequence[str],
        *,
        rank: int | None = None,
        workers: int | None = None,
        job: str = "",
        config: Config,
        recorder: Recorder,
    ) -> None:
        self.config = config
        to_do: ToDo = queue.SimpleQueue()
        makes = Workers(pservers, job, config, recorder, lambda address: to_do.put(Offered(address)))
        worker = makes.first(rank, workers)
        self.core = core = Core(config, worker, to_do)
        self._declarations = Declarations(core, run_of(worker.client.first_incarnation))
        self._pushing = Pushing(core)
        self.info, self.state, self.peers = ElasticInfo(core), ElasticState(core, self._pushing), ElasticPeers(core)
        self.tables = ElasticTables(core, self._pushing)
        self.joining = ElasticJoining(core, self._declarations.joined)
        self.reconfiguration = Reconfiguration(
            core, makes, self._declarations, self._pushing, self.tables, self.peers, self.joining
        )

    @property
    def rank(self) -> int:
        return self.core.rank

    @property
    def view(self) -> View:
        return self.core.view

    @property
    def captures(self) -> Captures:
        return self.core.worker.captures

    @property
    def places(self) -> Sequence[int]:
        with self.core.changed:
            return sorted({*self.core.worker.places, *self.core.ended})

    @property
    def failure(self) -> TfpsError | None:
        return self.core.failures.failure

    @property
    def paused(self) -> bool:
        return self.core.paused

    def declare(
        self, specs: Sequence[BucketSpec], details: Sequence[str] = (), stop: threading.Event | None = None
    ) -> list[int]:
        return self._declarations.declare(specs, details, stop)

    def push(self, bucket: int, payload: Payload | None, on_reply: OnReply, step_scalars: bytes = b"") -> None:
        self._pushing.put(bucket, Push(payload, on_reply, step_scalars=step_scalars))

    def skip(self, buckets: Sequence[int], step: int, on_reply: Callable[[int, Reply], None]) -> bool:
        return self.core.worker.skip(buckets, step, on_reply)

    def add_failure_listener(self, listener: FailureListener) -> None:
        self.core.failures.add_listener(listener)

    def fail(self, error: TfpsError) -> None:
        self.core.fail(error)

    def close(self, reason: str = "") -> None:
        core = self.core
        if reason and not core.over:
            core.closing_reason = reason
        core.deliver(Closed())
        if not core.wait_over(MOST_CONNECT_S):  # others need what this worker has kept
            core.deliver(TimedOut())
        if core.failures.close():
            for worker in core.workers():
                worker.close(reason)
            core.answer(core.failures.end or ClosedError("the exchange is closed"))
            self.reconfiguration.wait(MOST_CONNECT_S)
