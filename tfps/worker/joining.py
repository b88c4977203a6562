"""How a worker joins a job under way, and how it lets others join: the `Joining` of a `Worker`.

Tested in tests/worker/test_joiners.py and tests/worker/test_joining_again.py.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from tfps.config import Config
from tfps.errors import WaitTimeoutError
from tfps.exchange.interface import BucketSpec, FailureState
from tfps.membership.view import View
from tfps.protos import tfps_pb2 as pb
from tfps.worker.client import PserverClient
from tfps.worker.losses import Losses
from tfps.worker.presence import Presence
from tfps.worker.trial import JobsBuckets, Trial

logger = logging.getLogger("tfps")
_READY_S = 0.5  # between a joining worker's questions whether the training that it waits for is over
Commit = Callable[[Sequence[pb.DeclaredReply]], None]


class WorkerJoining:
    """See `Joining`. `learn` takes all buckets of the job, `commit` what pservers know, when this worker takes part."""

    def __init__(
        self,
        config: Config,
        client: PserverClient,
        presence: Presence,
        failures: FailureState,
        losses: Losses,
        learn: Callable[[], None],
        commit: Commit,
    ) -> None:
        self._config, self._client, self._presence = config, client, presence
        self._failures, self._losses, self._learn, self._commit = failures, losses, learn, commit
        self.least = config.min_workers or 0
        self.notified = False  # that others are ready to take part
        self.on_joined: Callable[[], object] = lambda: None  # called before it takes part
        self.trial: Trial | None = None  # until it takes part
        self.known: JobsBuckets | None = None  # of a job that this worker has come to

    def begin(self, rank: int) -> None:
        """This worker, which got `rank`, has come to a job under way."""
        if self.trial is None:
            self.trial = Trial(self._config, rank, len(self._client.pservers), self._client.declared)
            self.known = self.trial.buckets

    @property
    def _view(self) -> View:
        return self._client.membership.view

    @property
    def pending(self) -> bool:
        return self.trial is not None

    @property
    def tries_out(self) -> bool:
        """Whether it may exchange gradients, with nobody; see `trying_out`."""
        return self.trial is not None and self.trial.tries_out

    @tries_out.setter
    def tries_out(self, value: bool) -> None:
        if self.trial is not None:
            self.trial.tries_out = value

    def lines(self) -> Sequence[str]:
        if self.trial is None:
            return []
        begin_s, said_so = time.monotonic(), False
        while not self.trial.others_train() and time.monotonic() - begin_s < self._config.step_timeout_s:
            if not said_so:
                logger.info("tfps: this worker joins a job that has not trained yet, and waits until it does")
            said_so = True
            self._failures.check()
            time.sleep(_READY_S)
        self._learn()
        return self.trial.lines()

    @contextlib.contextmanager
    def trying_out(self) -> Iterator[None]:
        self.tries_out = True
        try:
            yield
        finally:
            self.tries_out = False

    def find(self, specs: Sequence[BucketSpec]) -> list[int] | None:
        """The numbers of buckets that the job has declared; None if it has declared none of them yet."""
        if self.known is None:
            return None
        found = self.known.find(specs)
        if found is None and self.trial is not None:
            self._learn()
            found = self.known.find(specs)
        return found

    def take_part(self, training: int) -> Sequence[int] | None:
        trial = self.trial
        if trial is None:
            return self._view.ranks
        deadline_s = time.monotonic() + self._config.rejoin_timeout_s
        while not trial.admitted.wait(_READY_S):
            self._failures.check()
            if self.begun(training) > training:
                return None
            if time.monotonic() > deadline_s:
                raise trial.overdue(self._config.rejoin_timeout_s)
        self._learn()
        self._commit(trial.replies())
        rank = self._client.membership.rank
        logger.info("tfps: rank %d takes part from now on, with %d workers", rank, len(self._view.ranks))
        return trial.others

    def committed(self) -> None:
        """From now on it takes part."""
        self._losses.skip(self._view.free)
        self.on_joined()
        self.trial, self.notified = None, False  # what it was notified of was itself

    def joiners(self, training: int) -> list[int]:
        return list(self._client.ready(training).candidates)

    def begun(self, training: int) -> int:
        return int(self._client.ready(training).training)

    def admit(self, joiners: Sequence[int]) -> Sequence[int] | None:
        before = self._presence.admissions()
        reply = self._client.admit(joiners, self._config.step_timeout_s)
        joined = sorted(set(reply.present).difference(reply.before))
        notified = self._presence.wait_admitted(
            before, lambda: self._failures.end is not None, self._config.step_timeout_s
        )
        self._failures.check()
        if not notified:
            rank = self._client.membership.rank
            raise WaitTimeoutError(f"rank {rank}: the pservers have not told who takes part now")
        for rank in joined:
            self._losses.forget(rank)
            logger.info("tfps: rank %d takes part from now on, with %d workers", rank, len(self._view.ranks))
        return list(reply.before) if joined else None
