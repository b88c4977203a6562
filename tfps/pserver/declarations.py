"""What the workers of a job have declared on one pserver: all the same, in the same order.

Tested in tests/pserver/test_job.py, tests/worker/test_worker_starts.py and tests/worker/test_worker_ends.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tfps.errors import ClosedError, ConnectError, MismatchError, ProtocolError, WaitTimeoutError, WorkerLostError
from tfps.exchange.interface import BucketSpec
from tfps.exchange.layout import Layout
from tfps.membership.members import first_difference
from tfps.pserver.elastic import Elastic
from tfps.pserver.state import EVERY_RANK, JobState
from tfps.wire.control import bucket_message, layout_message
from tfps.wire.frames import Header, Kind

_MOST_STEPS = 2**62
# Declarations of workers that go on with other pservers, before the one with which all have written what they kept: one
# by which they join, and one of all buckets.
_RESUMING = 2


@dataclass(slots=True)
class Declaration:
    lines: dict[int, list[str]] = field(default_factory=dict)
    specs: Sequence[BucketSpec] = ()
    steps: Sequence[int] = ()  # the first of each bucket; empty: 0
    agreed: bool = False
    for_joiners: Sequence[str] = ()  # the details of one without buckets


class Declarations:
    """Any thread. Calls raise the job's failure."""

    def __init__(self, state: JobState, elastic: Elastic) -> None:
        self._state, self._elastic = state, elastic
        self.all: list[Declaration] = []
        self._layouts: list[Layout] = []  # as tuned

    @property
    def _is_restored(self) -> bool:
        """Whether all workers of a job that goes on with other pservers have written what they had kept."""
        return sum(each.agreed for each in self.all) > _RESUMING

    @property
    def _goes_on_now(self) -> bool:
        """Whether all workers have just written what they had kept: the last declaration says so."""
        return self._state.roster.resumed is not None and len(self.all) == _RESUMING + 1

    def declare(
        self,
        rank: int,
        number: int,
        details: Sequence[str],
        specs: Sequence[BucketSpec],
        timeout_s: float,
        steps: Sequence[int] = (),
    ) -> None:
        """Blocks until all ranks have declared the same (number 0: have joined); if it times out it may be repeated."""
        members = self._state.roster
        lines = [*details, *map(str, specs)]  # without the lock: there may be thousands
        if steps and (len(steps) != len(specs) or max(steps) >= _MOST_STEPS):
            raise ProtocolError(f"steps of a declaration must be one for each bucket, below 2**62, got {len(steps)}")
        lines += [f"{spec} from step {step} on" for spec, step in zip(specs, steps, strict=False)]
        with self._state.changed:
            self._state.raise_failure()
            if rank not in members.members:
                raise ConnectError(f"rank {rank} has not joined this pserver, or was lost: it cannot declare anything")
            self._state.shard.check(specs)
            count = len(self.all)
            if number > count or (number == count and number and not self.all[-1].agreed):
                raise ProtocolError(f"number of a declaration must be at most {count}, got {number}")
            if number == count:
                self.all.append(Declaration())
                if number == 0 and self._state.shard.index:
                    self._elastic.begin_without_missing()
            declaration = self.all[number]
            if rank in declaration.lines:
                raise ProtocolError(f"declaration {number} must come once from rank {rank}, got it twice")
            if not declaration.lines or rank not in members.on_trial():  # whose may differ
                declaration.specs, declaration.steps = specs, steps
                declaration.for_joiners = () if specs else tuple(details)
            declaration.lines[rank] = lines
            refused = self._compare(declaration) if declaration.lines.keys() >= set(members.view.ranks) else {}
            self._state.changed.notify_all()
        for other, why in refused.items():
            self._elastic.lose(other, why)
        with self._state.changed:
            # Whichever thread sees the last rank's declaration decides for all.
            self._state.changed.wait_for(lambda: self._decided(rank, declaration), timeout_s)
            self._state.raise_failure()
            if declaration.agreed:
                return
            if rank in (departed := members.departed()) or rank not in members.members:
                raise members.ends.get(rank, ClosedError("the worker has left the job, or was lost"))
            late = [r for r in members.view.ranks if r not in declaration.lines]
            what = "declared its variables" if number else "joined"
            if lost := [members.members[r] for r in late if r in departed]:
                why = f"it ended with {lost[0].reason}" if lost[0].reason else f"its script ended; {EVERY_RANK}"
                self._state.fail(WorkerLostError(f"{lost[0]} left before it had {what}: {why}"))
            self._state.raise_failure()
            declaration.lines.pop(rank, None)
            names = ", ".join(map(members.describe, late or members.not_streaming()))
            hint = EVERY_RANK if number else f"is it started? see its log; --workers is {members.view.workers} here"
            raise WaitTimeoutError(f"not {what}: {names} ({hint})")

    def _compare(self, declaration: Declaration) -> dict[int, str]:
        """Fails the job if what ranks have declared differs; who is on trial is taken out instead: returns why."""
        lines, describe, trial = declaration.lines, self._state.roster.describe, self._state.roster.on_trial()
        for rank in lines.keys() - set(self._state.roster.view.ranks):  # lost meanwhile, maybe as it differs
            del lines[rank]
        others = {rank: each for rank, each in lines.items() if rank not in trial} or dict(lines)
        if (difference := first_difference(others, describe)) is not None:
            self._state.fail(MismatchError(difference))
        refused = {}
        for rank in lines.keys() - others.keys():
            if (difference := first_difference({**others, rank: lines[rank]}, describe)) is not None:
                refused[rank] = f"differs from the others: {difference}"
        for rank in refused:
            del lines[rank]
        return refused

    def _decided(self, rank: int, declaration: Declaration) -> bool:
        if self._state.failure is not None or declaration.agreed:
            return True
        departed = self._state.roster.departed()
        if rank not in self._state.roster.members or any(r == rank or r not in declaration.lines for r in departed):
            return True
        if not declaration.lines.keys() >= set(self._state.roster.view.ranks) or self._state.roster.not_streaming():
            return False
        self._state.shard.add(declaration.specs, declaration.steps)
        if not self._state.roster.takes_joiners:
            self._state.tell("job begins")
        declaration.agreed = self._state.roster.begun = self._state.roster.takes_joiners = True
        self._state.roster.restored = self._is_restored
        declaration.lines = {r: [] for r in declaration.lines}  # only the ranks still matter
        if self._goes_on_now:
            self._state.shard.resume()
        self._state.changed.notify_all()
        return True

    def declared(self) -> dict[str, object]:
        """See DeclaredReply."""
        with self._state.changed:
            self._state.raise_failure()
            agreed = [each for each in self.all if each.agreed]
            return {
                "declarations": len(agreed),
                "buckets": [bucket_message(bucket.spec) for bucket in self._state.shard.buckets],
                "lines": [line for each in agreed for line in each.for_joiners],
                "layouts": [layout_message(layout) for layout in self._layouts],
                "steps": [bucket.steps for bucket in self._state.shard.buckets],
            }

    def undeclared(self) -> list[str]:
        """The ranks that have not joined, or not declared what others have."""
        with self._state.changed:
            self._state.raise_failure()
            return [self._state.roster.describe(rank) for rank in self.late()]

    def late(self) -> list[int]:
        """As `undeclared`."""
        with self._state.changed:
            ranks = set(self._state.roster.not_streaming())
            if self.all and not (last := self.all[-1]).agreed:
                ranks.update(rank for rank in self._state.roster.view.ranks if rank not in last.lines)
            return sorted(ranks)

    def tune(self, layout: Layout) -> None:
        """Cuts buckets anew, from the steps in `layout` on, and tells all workers."""
        with self._state.changed:
            self._state.raise_failure()
            self._state.shard.cut_anew(layout)
            self._layouts.append(layout)
            self._state.announce(Header(Kind.LAYOUT), layout_message(layout).SerializeToString())
            for queue in self._state.queues.values():
                queue.set_window(layout.window_bytes)
