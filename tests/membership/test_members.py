"""Membership: who may join, with which rank, and what those are told who may not."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tfps.errors import ConnectError, MismatchError
from tfps.membership.members import STREAM_GRACE_S, Applicant, State
from tfps.membership.roster import Roster
from tfps.membership.view import View
from tfps.types import Argument

numbers = itertools.count(1)


def applicant(**fields: Argument) -> Applicant:
    number = next(numbers)
    default = Applicant("", None, 0, f"uid{number}", "host", number, 0, 1, "", {"slice_bytes": 10})
    return dataclasses.replace(default, **fields)


def test_ranks_are_given_in_order_of_joining_around_those_asked_for() -> None:
    members = Roster(View.first(3))
    assert [members.join(applicant(rank=rank), 0).rank for rank in (1, None, None)] == [1, 0, 2]


def test_a_repeated_call_gets_the_same_answer() -> None:
    members = Roster(View.first(1))
    me = applicant()
    assert members.join(me, 0) is members.join(me, 0)


def test_two_workers_of_one_rank_are_both_named() -> None:
    members = Roster(View.first(2))
    members.join(applicant(rank=1, host="a", pid=11), 0)
    with pytest.raises(ConnectError, match="two workers have rank 1: a:11 and b:22"):
        members.join(applicant(rank=1, host="b", pid=22), 0)


def test_a_worker_too_many_is_told_who_is_there() -> None:
    members = Roster(View.first(1))
    members.join(applicant(host="a", pid=11), 0)
    with pytest.raises(ConnectError, match=r"all 1 ranks of the job are taken \(rank 0 \(a:11\)\)"):
        members.join(applicant(), 0)


@pytest.mark.parametrize("rank", [2, 100])
def test_a_rank_beyond_the_number_of_workers_is_refused(rank: int) -> None:
    with pytest.raises(ConnectError, match=f"rank must be from 0 to 1 .*, got {rank}"):
        Roster(View.first(2)).join(applicant(rank=rank), 0)


def test_a_wrong_number_of_workers_names_both() -> None:
    with pytest.raises(ConnectError, match="started with --workers 2, this worker expects 3"):
        Roster(View.first(2)).join(applicant(workers=3), 0)


def test_a_pserver_for_one_job_refuses_others() -> None:
    with pytest.raises(ConnectError, match=r"only job 'a' .*belongs to 'b'"):
        Roster(View.first(2), "a").join(applicant(job="b"), 0)


def test_a_pserver_in_use_names_the_workers_of_the_other_job() -> None:
    members = Roster(View.first(2))
    members.join(applicant(job="a", host="h", pid=7), 0)
    with pytest.raises(ConnectError, match=r"used by another job 'a' \(its workers: rank 0 \(h:7\)\)"):
        members.join(applicant(job="b"), 0)


def test_the_incarnation_tells_jobs_of_one_name_apart() -> None:
    members = Roster(View.first(2))
    members.join(applicant(pserver_index=1, pservers=2, incarnation="t1"), 0)
    assert members.incarnation == "t1"
    members.join(applicant(pserver_index=1, pservers=2, incarnation="t1"), 0)
    with pytest.raises(ConnectError, match="used by another job"):
        members.join(applicant(pserver_index=1, pservers=2, incarnation="t2"), 0)


def test_a_worker_must_begin_with_the_first_pserver() -> None:
    with pytest.raises(ConnectError, match="first pserver of its list first"):
        Roster(View.first(2)).join(applicant(pserver_index=1, pservers=2), 0)


def test_lists_in_different_orders_are_refused() -> None:
    members = Roster(View.first(2))
    members.join(applicant(pservers=2, host="h", pid=7), 0)
    rule = r"lists of pservers differ: this pserver is number 1 of 2 for rank 0 \(h:7\) and number 2 of 2 for this"
    with pytest.raises(ConnectError, match=rule):
        members.join(applicant(pserver_index=1, pservers=2, incarnation="t"), 0)


def test_settings_that_differ_are_named_with_both_values() -> None:
    members = Roster(View.first(2))
    members.join(applicant(host="h", pid=7), 0)
    with pytest.raises(MismatchError, match=r"slice_bytes must be the same.*rank 0 \(h:7\) has 10, this worker 20"):
        members.join(applicant(settings={"slice_bytes": 20}), 0)


def test_a_member_that_died_before_its_stream_makes_room() -> None:
    members = Roster(View.first(1))
    members.join(applicant(rank=0), 0)
    with pytest.raises(ConnectError):
        members.join(applicant(rank=0), STREAM_GRACE_S)
    assert members.join(applicant(rank=0), STREAM_GRACE_S + 1).rank == 0


def test_a_member_with_a_stream_is_never_taken_for_dead() -> None:
    members = Roster(View.first(1))
    members.join(applicant(rank=0), 0).streams.add("Pull")
    with pytest.raises(ConnectError, match="two workers"):
        members.join(applicant(rank=0), 10 * STREAM_GRACE_S)


def test_a_job_is_over_when_all_that_joined_are_gone() -> None:
    members = Roster(View.first(2))
    assert not members.over
    first = members.join(applicant(), 0)
    first.state = State.STREAMING
    assert members.not_streaming() == [1]
    assert not members.over
    first.state = State.DEPARTED
    assert members.over
    assert members.departed() == [0]
