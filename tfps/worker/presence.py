"""Who takes part in a worker's job, as its pservers tell.

Tested in tests/worker/test_lost_workers.py and tests/worker/test_joining_again.py.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Collection, Sequence

from tfps.membership.view import View
from tfps.wire import frames
from tfps.worker.client import PserverClient

logger = logging.getLogger("tfps")


class Presence:
    """The view of a worker; any thread. A change counts once all pservers have told it.

    `note` gets each new view and the reason for it.
    """

    def __init__(self, client: PserverClient, note: Callable[[View, str], object]) -> None:
        self._client, self._note = client, note
        self._changed = threading.Condition()  # guards the view and what follows; notified when others are admitted
        self.present: list[set[int]] = []  # by pserver: who takes part, as it has told
        self._ended: set[int] = set()  # who took part until the end of its program
        self._suspected: set[int] = set()  # who was lost and may be alive
        self._admissions: list[int] = []  # by pserver: how many it has told

    @property
    def view(self) -> View:
        return self._client.membership.view

    @property
    def places(self) -> Sequence[int]:
        """See `Exchange`."""
        with self._changed:
            return sorted({*self.view.ranks, *self._ended})

    @property
    def suspected(self) -> Sequence[int]:
        """Who was lost, but may be alive."""
        with self._changed:
            return sorted(self._suspected)

    def joined(self, present: Collection[int]) -> None:
        """The next pserver has been joined, with whom `present` take part."""
        self.present.append(set(present))
        self._admissions.append(0)

    def begin(self) -> None:
        """All pservers have been joined."""
        with self._changed:
            self._agree()

    def lose(self, pserver: int, rank: int, what: str, how: int) -> None:
        """Goes on without `rank`, which `pserver` has lost; what other pservers say of it later has no effect."""
        ended = how == frames.ENDED
        with self._changed:
            self.present[pserver].discard(rank)
            if ended:
                self._ended.add(rank)
            elif how == frames.SUSPECTED:
                self._suspected.add(rank)
            if not self._agree(what):
                return
        left = len(self.view.ranks)
        workers = left, max(left + 1, self._client.started)  # more may have come since
        level = logging.DEBUG if ended else logging.WARNING  # others' programs soon end, too
        logger.log(level, "tfps: %s; the job goes on with %d of %d workers", what, *workers)

    def admit(self, pserver: int, ranks: Sequence[int]) -> None:
        """`pserver` has told that `ranks` take part from now on."""
        with self._changed:
            self.present[pserver] = set(ranks)
            self._ended -= self.present[pserver]
            self._suspected -= self.present[pserver]
            self._admissions[pserver] += 1
            self._agree()
            self._changed.notify_all()

    def admissions(self) -> Sequence[int]:
        """How many each pserver has told."""
        with self._changed:
            return list(self._admissions)

    def wait_admitted(self, before: Sequence[int], over: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until all pservers have told another admission than `before`, or all is `over`; False: not in time."""

        def is_notified() -> bool:
            return over() or all(now > then for now, then in zip(self._admissions, before, strict=True))

        with self._changed:  # streams tell it in the order of losses before and after
            return self._changed.wait_for(is_notified, timeout_s)

    def wake(self) -> None:
        """Something that waits may be over."""
        with self._changed:
            self._changed.notify_all()

    def _agree(self, reason: str = "") -> bool:
        """Takes part with those whom all pservers have; returns whether that is a change. Caller holds the lock."""
        view = self.view
        ranks = tuple(sorted({*set.intersection(*self.present), self._client.membership.rank}))
        if ranks != view.ranks:
            view = dataclasses.replace(view, generation=view.generation + 1, ranks=ranks)
            self._client.membership = dataclasses.replace(self._client.membership, view=view)
            self._note(view, reason)
            return True
        return False
