"""`Roster` beside plain sets, in any order of joins, losses, departures, questions and admissions."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tfps.errors import ConnectError
from tfps.membership.members import Applicant, Member, State
from tfps.membership.roster import Forget, How, Loss, Notify, NotifyAdmitted, Roster
from tfps.membership.view import View

RANKS = st.integers(0, 3)
WORKERS = 4
SETTINGS = {"max_workers": WORKERS}


class MachineOfRoster(RuleBasedStateMachine):
    """A job of up to four workers that has begun with some of them, and goes on as long as one is left."""

    @initialize(started=st.integers(1, WORKERS))
    def begin(self, started: int) -> None:
        self.started, self.members = started, Roster(View.first(started))
        self.count = 0
        self.here: set[int] = set()  # has a process that has joined
        self.part = set(range(started))  # takes part, or will once it has joined
        self.streaming: set[int] = set()
        self.parted: set[int] = set()  # has left of its own, and is still known
        self.lost = set(range(started, WORKERS))  # or has never been there
        self.ready: dict[int, int] = {}  # of joiners: the training
        self.changes = 1
        for rank in range(started):
            self._join(rank)
        self.members.least, self.members.begun, self.members.takes_joiners = 1, True, True

    def _join(self, rank: int) -> Member:
        self.count += 1
        uid = f"uid{self.count}"
        applicant = Applicant("", rank, self.started, uid, "host", self.count, 0, 1, "", SETTINGS)
        member = self.members.join(applicant, 0.0)
        assert self.members.join(applicant, 1.0) is member, "a repeated call gets the same answer"
        member.state = State.STREAMING
        self.here.add(rank)
        self.streaming.add(rank)
        self.ready[rank] = 0
        return member

    @precondition(lambda self: len(self.here) < WORKERS)
    @rule(data=st.data(), training=st.integers(0, 1))
    def join(self, data: st.DataObject, training: int) -> None:
        rank = data.draw(st.sampled_from(sorted(set(range(WORKERS)) - self.here)))
        assert self._join(rank).rank == rank
        self.members.members[rank].ready = self.ready[rank] = training

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def join_in_the_place_of_another(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.here)))
        try:
            self._join(rank)
        except ConnectError as error:
            assert f"two workers have rank {rank}" in str(error)
        else:
            raise AssertionError("a rank that is here was given again")

    @rule()
    def join_without_a_rank(self) -> None:
        free = sorted(set(range(WORKERS)) - self.here)
        self.count += 1
        applicant = Applicant("", None, 0, f"uid{self.count}", "host", self.count, 0, 1, "", SETTINGS)
        try:
            rank = self.members.join(applicant, 0.0).rank
        except ConnectError as error:
            assert "all 4 ranks of the job are taken" in str(error)
            assert not free
            return
        assert rank == free[0]
        self.here.add(rank)
        self.ready[rank] = 0
        self.streaming.discard(rank)  # it has opened none yet

    @rule(rank=RANKS)
    def stream(self, rank: int) -> None:
        if rank in self.here and rank not in self.parted:
            self.members.members[rank].state = State.STREAMING
            self.streaming.add(rank)

    @precondition(lambda self: len(self.part) > 1)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.part)))
        change = self.members.lose(rank, "died")
        assert change is not None
        view, effects = change
        assert view is self.members.view
        (told,) = [each.loss for each in effects if isinstance(each, Notify)]
        assert (told.rank, told.how, told.why) == (rank, How.LOST, self.members.lost[rank])
        assert [each.rank for each in effects if isinstance(each, Forget)] == [rank]
        for each in (self.part, self.here, self.streaming):
            each.discard(rank)
        self.lost.add(rank)
        self.changes += 1

    @rule(rank=RANKS)
    def drop_a_joiner(self, rank: int) -> None:
        if rank in self.here and rank not in self.part and rank not in self.parted:
            view, change = self.members.view, self.members.lose(rank, "died")
            assert change is not None
            assert change[0] is view, "nobody misses it"
            assert not any(isinstance(each, Notify) for each in change[1])
            self.here.discard(rank)
            self.streaming.discard(rank)

    @precondition(lambda self: len(self.part) > 1 and not self.parted)  # its rank is not given again
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.part)))
        self.members.members[rank].state = State.DEPARTED
        (told,) = self.members.leave(rank)[1]
        assert told == Notify(Loss(rank, How.ENDED, f"{self.members.members[rank]} has left"))
        self.streaming.discard(rank)
        self.part.discard(rank)
        self.parted.add(rank)
        self.changes += 1

    @precondition(lambda self: len(self.part) == 1)
    @rule()
    def the_last_one_stays_in_the_view(self) -> None:
        rank, view = min(self.part), self.members.view
        assert self.members.leave(rank) == (view, [])
        if self.members.members[rank].state is not State.DEPARTED:
            assert self.members.lose(rank, "died") is None

    @rule(rank=RANKS, training=st.integers(0, 1))
    def say_ready(self, rank: int, training: int) -> None:
        if rank in self.here and rank not in self.part:
            self.members.members[rank].ready = training
            self.ready[rank] = training

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        training = 1
        joiners = self.members.joiners(training)
        waiting = self.here - self.part - self.parted
        assert joiners == sorted(rank for rank in waiting if self.ready[rank] == training and rank in self.streaming)
        if joiners:
            chosen = data.draw(st.sets(st.sampled_from(joiners), min_size=1))
            before = self.members.view.ranks
            view, effects = self.members.admit({*chosen, *(set(range(WORKERS)) - self.here)}, 1.0, 1.0)
            self.part |= chosen
            assert chosen <= self.members.on_trial() <= self.part
            assert effects[-1] == NotifyAdmitted(before, view.ranks)
            assert len(effects) == 1 + len(chosen)
            self.lost -= chosen
            self.changes += 1

    @invariant()
    def same_as_the_sets(self) -> None:
        members, view = self.members, self.members.view
        assert set(view.ranks) == self.part
        assert list(view.ranks) == sorted(view.ranks)
        assert view.generation == self.changes
        assert set(members.members) == self.here
        assert set(members.lost) == self.lost
        assert members.not_streaming() == sorted(self.part - self.streaming)
        assert members.departed() == []
        assert not members.over
        assert [view.place(rank) for rank in view.ranks] == list(range(len(self.part)))
        for rank in self.lost:
            assert members.lost[rank].startswith((f"rank {rank} (host:", f"rank {rank} has not come yet"))


TestRoster = MachineOfRoster.TestCase
TestRoster.settings = settings(max_examples=300, stateful_step_count=40)
