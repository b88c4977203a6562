"""The `Joining` of an `ElasticExchange`: how it joins a job under way, and lets others join.

Tested in tests/worker/test_joiners.py and tests/worker/test_lost_meanwhile.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from tfps.errors import ClosedError, PserverLostError
from tfps.recovery.core import Core, take
from tfps.worker.worker import Worker


class ElasticJoining:
    """See `Joining`. `joined` is called with a worker and the job's lines, as this one takes part from now on."""

    def __init__(self, core: Core, joined: Callable[[Worker, Sequence[str]], None]) -> None:
        self._core, self._joined = core, joined
        self.tries_out = False  # see `trying_out`
        self.admitting: Sequence[int] = ()  # who may take part already, or not
        self.expected: Sequence[int] = ()  # who did when a pserver was lost last, as somebody knew

    @property
    def least(self) -> int:
        return self._core.worker.joining.least

    @property
    def notified(self) -> bool:
        return self._core.worker.joining.notified

    @notified.setter
    def notified(self, value: bool) -> None:
        self._core.worker.joining.notified = value

    @property
    def pending(self) -> bool:
        return self._core.worker.joining.pending

    @contextlib.contextmanager
    def trying_out(self) -> Iterator[None]:
        self.tries_out = self._core.worker.joining.tries_out = True
        try:
            yield
        finally:
            self.tries_out = self._core.worker.joining.tries_out = False

    def take_part(self, training: int) -> Sequence[int] | None:
        def take_part(worker: Worker) -> Sequence[int] | None:
            lines = list(worker.joining.trial.lines()) if worker.joining.trial else []
            worker.joining.on_joined = lambda: self._joined(worker, lines)
            return worker.joining.take_part(training)

        return self._core.call(take_part)

    def lines(self) -> Sequence[str]:
        return self._core.call(lambda worker: worker.joining.lines())

    def joiners(self, training: int) -> list[int]:
        return self._core.call(lambda worker: worker.joining.joiners(training))

    def begun(self, training: int) -> int:
        return self._core.call(lambda worker: worker.joining.begun(training))

    def admit(self, joiners: Sequence[int]) -> Sequence[int] | None:
        core, before, self.admitting = self._core, self._core.view.ranks, joiners
        try:
            while True:
                worker = core.call(lambda now: now)
                try:
                    found = worker.joining.admit(joiners)
                    for number, bucket in enumerate(core.buckets):
                        with bucket.lock:
                            if (journal := bucket.journal) is not None and found is not None:
                                if (wanted := journal.admit(tuple(found))) is not None:
                                    take(number, worker, journal, wanted)
                                journal.admitted(tuple(found))
                    with core.changed:
                        core.ended.difference_update(worker.view.ranks)
                    return found
                except (PserverLostError, ClosedError):
                    if not core.is_lost(worker):
                        raise
                # Once it goes on with other pservers, all know whether anybody was admitted; if not, all call it again.
                core.call(lambda _: None)
                if set(joiners).intersection(self.expected):
                    return list(before)
        finally:
            self.admitting = ()
