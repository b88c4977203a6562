"""What becomes of a job on one pserver whose workers are lost or leave, and who joins it (Config.min_workers).

`Roster` decides; what follows is done here.

Tested in tests/worker/test_lost_workers.py, tests/worker/test_joiners.py and tests/worker/test_joining_again.py.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from tfps.errors import ProtocolError, TfpsError, WaitTimeoutError, WorkerLostError
from tfps.membership import roster
from tfps.membership.members import Applicant, State
from tfps.membership.roster import How
from tfps.pserver.rounds import Rounds
from tfps.pserver.state import JobState
from tfps.wire import frames
from tfps.wire.frames import Header, Kind
from tfps.wire.send_queue import SILENT_S, SendQueue

_NOTICED_S = 10.0  # by then it is noticed that a worker has been silent for too long, also on a busy machine
_STEPS = {How.LOST: 0, How.SUSPECTED: frames.SUSPECTED, How.ENDED: frames.ENDED}  # of frames


@dataclass(slots=True)
class Admission:
    """Joining workers that are about to take part, and the ranks that have agreed."""

    joiners: frozenset[int]
    limit_s: float  # for a step
    called: set[int] = field(default_factory=set)
    before: Sequence[int] = ()  # who took part until it was over
    present: Sequence[int] = ()  # and from then on
    over: bool = False


class Elastic:
    """Changes of the view; any thread."""

    def __init__(self, state: JobState, rounds: Rounds) -> None:
        self._state, self._rounds = state, rounds
        self.admission: Admission | None = None  # under way
        self._training = 0  # that members have said they are in
        self._stable: tuple[int, ...] = ()  # what all have been told last: see `received`

    def check_present(self, rank: int, uid: str) -> None:
        """Raises with what worker `uid` of `rank` ends, if the others went on without it, which it may not know."""
        with self._state.changed:
            members = self._state.roster
            member = members.members.get(rank)
            if member is not None and uid not in ("", member.applicant.uid):
                raise WorkerLostError(f"the other workers went on without this one: {member} has its place")
            if rank in members.lost and member is None:
                lost = WorkerLostError(f"the other workers went on without this one: {members.lost[rank]}")
                raise members.ends.get(rank, lost)

    def is_current(self, rank: int, queue: SendQueue) -> bool:
        """Whether `queue` is that of `rank`: not of a worker that has been lost, whose last frames may come later."""
        return self._state.queues.get(rank) is queue

    def may_put(self, rank: int) -> bool:
        """Whether `rank` may be the first of those that are left, as far as it and this pserver know."""
        return rank == 0 or (self._state.shard.config.elastic and rank in self._state.roster.view.ranks)

    def wait_for_place(self, applicant: Applicant, timeout_s: float) -> None:
        """Waits while another worker has its rank in a job that goes on without lost ones: it may just be silent."""
        state, members, rank = self._state, self._state.roster, applicant.rank
        with state.changed:
            if applicant.resumed is None and members.resumed is not None:  # its own workers come first
                state.changed.wait_for(lambda: members.restored or state.failure is not None, timeout_s)
            if rank is None or not members.takes_joiners or members.least is None:
                return

            def is_free() -> bool:
                member = members.members.get(rank)
                return member is None or member.applicant.uid == applicant.uid or state.failure is not None

            state.changed.wait_for(is_free, min(timeout_s, SILENT_S + _NOTICED_S))

    def ready(self, rank: int, training: int) -> dict[str, object]:
        """The joiners that are ready, as `rank` is from now on if it is one; see ReadyRequest."""
        with self._state.changed:
            self._state.raise_failure()
            members = self._state.roster
            if rank in members.view.ranks:
                self._training = training
            elif rank in members.members and members.members[rank].ready != training:
                members.members[rank].ready = training
                self._state.announce(Header(Kind.READY))
            return {"candidates": members.joiners(training), "training": self._training}

    def admit(self, rank: int, joiners: Collection[int], timeout_s: float) -> dict[str, object]:
        """Returns who takes part once all ranks of the view have called it; see AdmitRequest."""
        state, members = self._state, self._state.roster
        with state.changed:
            state.raise_failure()
            admission = self.admission = self.admission or Admission(frozenset(joiners), timeout_s)
            if admission.joiners != frozenset(joiners):
                raise ProtocolError(
                    f"all ranks must admit the same joining workers, got {sorted(joiners)} from rank {rank}, others "
                    f"{sorted(admission.joiners)}"
                )
            admission.called.add(rank)
            state.changed.notify_all()
            state.changed.wait_for(lambda: self._admitted(admission) or state.failure is not None, timeout_s)
            state.raise_failure()
            if not admission.over:
                admission.called.discard(rank)
                names = ", ".join(map(members.describe, set(members.view.ranks) - admission.called))
                raise WaitTimeoutError(f"not come to the boundary at which others may join: {names}")
            return {"before": admission.before, "present": admission.present}

    def _admitted(self, admission: Admission) -> bool:
        if admission.over or not admission.called >= set(self._state.roster.view.ranks):
            return admission.over
        admission.before = self._state.roster.view.ranks
        view, effects = self._state.roster.admit(admission.joiners, time.monotonic(), admission.limit_s)
        if view.ranks != admission.before:
            self._state.shard.set_view(view)
            for _, item in self._state.shard.slices():
                item.change_view(view)  # nothing is under way
        admission.present = view.ranks
        for rank in sorted(set(view.ranks).difference(admission.before)):
            self._state.tell(f"worker {rank} takes part")
        self._execute(effects)
        admission.over, self.admission = True, None
        self._state.changed.notify_all()
        return True

    def received(self, rank: int, queue: SendQueue, counts: tuple[int, ...]) -> None:
        """Notes how many results of each bucket `rank` has; tells all what all have, which nobody will ask them for.

        Such messages are called stable (Birman, Schiper and Stephenson: Lightweight causal and atomic group multicast,
        1991, https://doi.org/10.1145/128738.128742).
        """
        with self._state.changed:
            if not self.is_current(rank, queue):
                return
            members, ranks = self._state.roster.members, self._state.roster.view.ranks
            members[rank].received = counts
            here = [members[each].received if each in members else () for each in ranks]
            before, self._stable = self._stable, tuple(map(min, zip(*here, strict=False)))  # some have declared more
            if self._stable != before:
                self._state.announce(Header(Kind.RECEIVED), frames.pack_counts(self._stable))

    def _execute(self, effects: Iterable[roster.Effect]) -> list[Callable[[], object]]:
        """Executes effects of a change, with the lock; returns what comes after it, without the lock."""
        after: list[Callable[[], object]] = []
        for effect in effects:
            match effect:
                case roster.Log(what):
                    self._state.log(what)
                case roster.Notify(loss):
                    self._state.announce(Header(Kind.LOST, index=loss.rank, step=_STEPS[loss.how]), loss.why.encode())
                case roster.NotifyAdmitted(before, present):
                    # In the same stream as what tells of losses before and after, so that all come in their order.
                    frame = frames.encode_admitted(before, present)
                    for rank in present:
                        if rank in self._state.queues:
                            self._state.queues[rank].put_urgent(frame)
                case roster.Forget(rank, error):
                    self._state.memory.pop(rank, None)
                    after.append(functools.partial(self._state.queues.pop(rank).fail, error))
                    if (end := self._state.ends.pop(rank, None)) is not None:
                        after.append(end)
                case roster.Fail(error):
                    self._state.fail(error)
        self._state.changed.notify_all()
        return after

    def lose(self, rank: int, why: str, how: How = How.LOST) -> bool:
        """Takes `rank` out, and lets the others go on, if the job can; else returns False."""
        with self._state.changed:
            before = self._state.roster.view
            if self._state.failure is not None or (change := self._state.roster.lose(rank, why, how)) is None:
                return False
            after = self._execute(change[1])
            if (changed := change[0] is not before) and (ended := self._state.recording.departed(rank)):
                self._state.announce(Header(Kind.TRACE, step=ended))
        for each in after:
            each()
        if changed:
            self._state.shard.bound.quiesce(rank, departed=True)
            self._change_view()
        return True

    def lose_on_trial(self, rank: int, why: str) -> bool:
        """As `lose`, if `rank` is on trial."""
        with self._state.changed:
            on_trial = rank in self._state.roster.on_trial()
        return on_trial and self.lose(rank, why)

    @property
    def losses(self) -> int:
        """How many workers the others have gone on without."""
        return self._state.roster.left

    def lose_differing(self, rank: int, why: str) -> None:
        """Loses `rank`, which differs from another one, if it is on trial, else those that are."""
        with self._state.changed:
            on_trial = self._state.roster.on_trial()
        for each in sorted({rank} & on_trial or on_trial):
            self.lose(each, why)

    def lose_overdue(self, undeclared: Collection[int]) -> None:
        """Loses those on trial for which others wait after their time, such as the `undeclared`."""
        state = self._state
        with state.changed:
            if not state.roster.on_trial():
                return
            awaited = {*undeclared, *(rank for _, item in state.shard.slices() for rank in item.missing())}
            overdue = state.roster.overdue(awaited, time.monotonic())
        for rank in overdue:
            self.lose(
                rank,
                "was let in, and has not come to its first step in time, for which the others wait: a tenth of "
                "step_timeout_s (is it in a callback, or do its data take long to skip?)",
            )

    def leave_view(self, rank: int) -> None:
        with self._state.changed:
            self._execute(self._state.roster.leave(rank)[1])
        self._change_view()

    def begin_without_missing(self) -> None:
        view, effects = self._state.roster.begin_without_missing()
        self._execute(effects)
        self._state.shard.set_view(view)

    def _change_view(self) -> None:
        """Lets what waits go on with the ranks of the view."""
        with self._state.changed:
            view = self._state.roster.view
            self._state.shard.set_view(view)
            buckets = list(enumerate(self._state.shard.buckets))
            self._state.changed.notify_all()
        try:
            for number, bucket in buckets:
                for index, item in list(bucket.slices.items()):
                    self._state.send(item.change_view(view, bucket.next))
                    self._rounds.hurry(number, item, index)
        except TfpsError as error:
            self._state.fail(error)
        self._rounds.release()

    def beat(self, late: bool) -> bool:
        """Sends a heartbeat to every worker, and loses those that are silent, unless this process was `late`."""
        state = self._state
        if not state.shard.config.elastic:  # other workers have come, before anybody began
            return not state.over
        with state.changed:
            queues = {rank: queue for rank, queue in state.queues.items() if rank in state.roster.members}
        silent = []
        for rank, queue in queues.items():
            queue.put_urgent(frames.BEAT)
            silent_s = queue.silent_s(renew=late)
            if silent_s > SILENT_S and state.roster.members[rank].state is State.STREAMING:
                silent.append((rank, f"has been silent for {silent_s:.1f} s"))
        for rank, why in silent:
            if not self.lose(rank, why, How.SUSPECTED) and state.failure is None and rank in state.roster.members:
                state.fail(WorkerLostError(f"{state.roster.describe(rank)} {why}"))
        config = state.shard.config
        if (error := state.roster.too_few(time.monotonic(), config.rejoin_timeout_s)) is not None:
            state.fail(error)
        return not state.over
