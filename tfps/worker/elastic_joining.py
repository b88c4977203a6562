"""How an `ElasticWorker` joins a job under way, and lets others join.

Tested in tests/worker/test_newcomers.py and tests/worker/test_lost_meanwhile.py.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence

from tfps.errors import ClosedError, PserverLostError
from tfps.membership.view import View
from tfps.worker.elastic_tables import ElasticTables
from tfps.worker.worker import Worker


class ElasticJoining(ElasticTables):
    """The part of an `ElasticWorker` that knows newcomers. See `Joining`."""

    _admitting: Sequence[int]  # who may take part already, or not
    _expected: Sequence[int]  # who did when a pserver was lost last, as somebody knew
    _tries_out: bool
    _ended: set[int]
    _lines: list[str]
    _declarations: int

    @property
    @abc.abstractmethod
    def view(self) -> View: ...
    @abc.abstractmethod
    def _know(self, worker: Worker) -> None: ...

    @contextlib.contextmanager
    def trying_out(self) -> Iterator[None]:
        self._tries_out = True
        try:
            with self._worker.trying_out():
                yield
        finally:
            self._tries_out = False
            if (newcomer := self._worker.newcomer) is not None:
                newcomer.tries_out = False

    def take_part(self, training: int) -> Sequence[int] | None:
        def take_part(worker: Worker) -> Sequence[int] | None:
            lines = list(worker.lines())

            def joined() -> None:
                with self._changed:
                    self._check_current(worker)  # else it asks again
                    self._is_candidate = False
                    self._lines, self._declarations = lines, worker.declarations
                    self._know(worker)
                    for number, bucket in enumerate(self._buckets):
                        bucket.replies = worker.steps(number)
                        if bucket.log is not None:
                            bucket.log.begin(bucket.replies)

            worker.on_joined = joined
            return worker.take_part(training)

        return self._call(take_part)

    def lines(self) -> Sequence[str]:
        return self._call(lambda worker: worker.lines())

    def candidates(self, training: int) -> list[int]:
        return self._call(lambda worker: worker.candidates(training))

    def admit(self, candidates: Sequence[int]) -> Sequence[int] | None:
        before, self._admitting = self.view.ranks, candidates
        try:
            while True:
                worker = self._call(lambda now: now)
                try:
                    found = worker.admit(candidates)
                    for bucket in self._buckets:
                        with bucket.lock:
                            if bucket.log is not None and found is not None:
                                bucket.log.admit(self.rank, worker, tuple(found))
                    with self._changed:
                        self._ended.difference_update(worker.view.ranks)
                    return found
                except (PserverLostError, ClosedError):
                    if not self._is_lost(worker):
                        raise
                # Once it goes on with other pservers, all know whether anybody was admitted; if not, all call it again.
                self._call(lambda _: None)
                if set(candidates).intersection(self._expected):
                    return list(before)
        finally:
            self._admitting = ()
