"""How a worker joins a job under way, and how it lets others join: the `Joining` of a `Worker`.

Tested in tests/worker/test_newcomers.py and tests/worker/test_joining_again.py.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tfps.config import Config
from tfps.errors import WaitTimeoutError
from tfps.exchange.interface import BucketSpec, FailureState
from tfps.exchange.layout import Layout
from tfps.membership.view import View
from tfps.wire.control import bucket_of, layout_of
from tfps.worker.bucket import PushedBucket
from tfps.worker.client import PserverClient
from tfps.worker.losses import Losses
from tfps.worker.newcomer import Newcomer

logger = logging.getLogger("tfps")
_READY_S = 0.5  # between a newcomer's questions whether the training that it waits for is over


class UnderWay(abc.ABC):
    """The part of a `Worker` that knows candidates."""

    config: Config
    losses: Losses
    newcomer: Newcomer | None  # until it takes part
    on_joined: Callable[[], object]
    _joined: Newcomer | None  # from then on
    _client: PserverClient
    _failures: FailureState
    _buckets: list[PushedBucket]
    _declaring: threading.Lock
    _view_changed: threading.Condition
    _admissions: list[int]

    @property
    @abc.abstractmethod
    def rank(self) -> int: ...
    @property
    @abc.abstractmethod
    def view(self) -> View: ...
    @abc.abstractmethod
    def _add(self, specs: Sequence[BucketSpec]) -> list[int]: ...
    @abc.abstractmethod
    def _cut_anew(self, layout: Layout) -> None: ...

    def _learn(self) -> None:
        """Knows all buckets that the job has declared."""
        newcomer = self.newcomer or self._joined
        if newcomer is None:
            return
        specs = list(map(bucket_of, newcomer.replies()[0].buckets))
        self._add(specs[len(self._buckets) :])
        newcomer.alone.declare([replace(spec, update=None) for spec in specs[len(newcomer.alone.specs) :]])
        newcomer.learn(specs)

    @property
    def candidate(self) -> bool:
        return self.newcomer is not None

    def lines(self) -> Sequence[str]:
        return [] if self.newcomer is None else self.newcomer.lines()

    @contextlib.contextmanager
    def trying_out(self) -> Iterator[None]:
        newcomer = self.newcomer
        if newcomer is not None:
            newcomer.tries_out = True
        try:
            yield
        finally:
            if newcomer is not None:
                newcomer.tries_out = False

    def take_part(self, training: int) -> Sequence[int] | None:
        newcomer = self.newcomer
        if newcomer is None:
            return self.view.ranks
        deadline_s = time.monotonic() + self.config.rejoin_timeout_s
        while not newcomer.admitted.wait(_READY_S):
            self._failures.check()
            if self._client.ready(training).training > training:
                return None
            if time.monotonic() > deadline_s:
                raise newcomer.overdue(self.config.rejoin_timeout_s)
        self._learn()
        replies = newcomer.replies()
        with self._declaring:
            for bucket, steps in zip(self._buckets, zip(*(each.steps for each in replies), strict=True), strict=True):
                bucket.steps = max(steps)
                bucket.next.clear()
            for layout in map(layout_of, replies[0].layouts):
                self._cut_anew(layout)
            self._client.goes_on(replies[0].declarations)
            self.losses.skip(set(range(self.view.workers)).difference(self.view.ranks))
            self.on_joined()
            self._joined, self.newcomer = newcomer, None
        logger.info("tfps: rank %d takes part from now on, with %d workers", self.rank, len(self.view.ranks))
        return newcomer.others

    def candidates(self, training: int) -> list[int]:
        return list(self._client.ready(training).candidates)

    def admit(self, candidates: Sequence[int]) -> Sequence[int] | None:
        before = list(self._admissions)
        reply = self._client.admit(candidates, self.config.step_timeout_s)
        joined = sorted(set(reply.present).difference(reply.before))

        def is_told() -> bool:
            told = all(now > then for now, then in zip(self._admissions, before, strict=True))
            return told or self._failures.end is not None

        with self._view_changed:  # streams tell it in the order of losses before and after
            told = self._view_changed.wait_for(is_told, self.config.step_timeout_s)
        self._failures.check()
        if not told:
            raise WaitTimeoutError(f"rank {self.rank}: the pservers have not told who takes part now")
        for rank in joined:
            self.losses.forget(rank)
            logger.info("tfps: rank %d takes part from now on, with %d workers", rank, len(self.view.ranks))
        return list(reply.before) if joined else None
