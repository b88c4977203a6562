"""A job on one pserver whose workers go on with other pservers, or come from others (Config.outlives_pservers).

Tested in tests/worker/test_lost_pservers.py and tests/worker/test_lost_meanwhile.py.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path

from tfps.errors import ConnectError, PserverLostError, UnsupportedError
from tfps.membership.members import Resumed
from tfps.membership.view import run_of
from tfps.pserver.state import JobState
from tfps.tables.files import remove_all_saves
from tfps.wire.frames import Header, Kind


class Moving:
    """Any thread."""

    def __init__(self, state: JobState) -> None:
        self._state = state

    @property
    def first_incarnation(self) -> str:
        """Of the job when it began, maybe with other pservers."""
        resumed = self._state.roster.resumed
        return self._state.roster.incarnation if resumed is None else resumed.incarnation

    @property
    def generation(self) -> int | None:
        """The generation of a job that has begun and goes on with other pservers; None: it does not."""
        with self._state.changed:
            begun = self._state.roster.takes_joiners or self._state.roster.resumed is not None
            moves = begun and self._state.shard.config.outlives_pservers
            lost = moves and isinstance(self._state.failure, PserverLostError)
            return self._state.roster.view.generation if lost else None

    def is_of(self, incarnation: str) -> bool:
        """Whether `incarnation` is that of this job when it began, maybe with other pservers."""
        own = self.first_incarnation
        return bool(own) and hmac.compare_digest(own.encode(), incarnation.encode())

    def end_before(self, resumed: Resumed) -> None:
        """Ends, if this is the job that goes on as `resumed` with other pservers: not all its workers may know yet."""
        own = self._state.roster.resumed
        if self.is_of(resumed.incarnation) and (own is None or own.generation < resumed.generation):
            self._state.fail(PserverLostError(resumed.reason))

    def remove_snapshots(self) -> None:
        """Removes those of tables: nobody needs them any more."""
        if folder := self._state.shard.config.snapshot_folder:
            try:
                remove_all_saves(Path(folder) / run_of(self.first_incarnation))
            except OSError as error:
                self._state.log(f"could not remove its snapshots in {folder}: {error}")

    def offer(self, address: str) -> None:
        """Tells the workers of a pserver that is to take part. UnsupportedError: they cannot go on with others."""
        with self._state.changed:
            self._state.raise_failure()
            if not self._state.roster.takes_joiners or self._state.over:
                raise ConnectError("no job is under way there: give its workers the address when you start them")
            if not self._state.shard.config.outlives_pservers:
                raise UnsupportedError(
                    "a pserver can join a job with min_workers that updates on workers in mode='sync', or has "
                    f"snapshot_steps; its workers have min_workers={self._state.shard.config.min_workers}, "
                    f"mode={self._state.shard.config.mode!r}, update={self._state.shard.config.update!r} and "
                    f"snapshot_steps={self._state.shard.config.snapshot_steps}"
                )
            if not self._state.shard.config.snapshot_folder and (table := next(self._state.shard.tables(), None)):
                raise UnsupportedError(
                    f"a pserver can join a job with tables if it has snapshots of these (snapshot_folder); nothing but "
                    f"this pserver and those beside it has the rows of {table[0]!r}"
                )
            self._state.log(f"is offered pserver {address}")
            self._state.announce(Header(Kind.OFFER), address.encode())

    @property
    def addresses(self) -> Sequence[str]:
        """Of the pservers of a job under way that goes on with others than it began with; else none."""
        with self._state.changed:
            resumed = self._state.roster.resumed
            return () if resumed is None or self._state.over else resumed.pservers
