"""A job by itself: declarations and streams. Rounds and members are in test_server.py and in tests/worker/."""

from __future__ import annotations

import functools

import jobs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfps.config import MAX_SLICE_BYTES
from tfps.errors import ClosedError, ConnectError, ProtocolError, WorkerLostError
from tfps.membership.members import Applicant, first_difference
from tfps.membership.view import View
from tfps.pserver.counters import Counters, ErrorCounts
from tfps.pserver.job import Job, Session
from tfps.trace.recorder import Recorder
from tfps.wire.control import PULL, PUSH
from tfps.wire.frames import Header, Kind

texts = st.lists(st.sampled_from("abc"), max_size=4)


@given(declared=st.dictionaries(st.integers(0, 5), texts, min_size=1))
def test_a_difference_is_found_if_and_only_if_there_is_one(declared: dict[int, list[str]]) -> None:
    found = first_difference(declared, lambda rank: f"rank {rank}")
    assert (found is None) == (len({tuple(lines) for lines in declared.values()}) == 1)


def test_the_first_difference_names_what_every_rank_has() -> None:
    declared = {1: ["a", "x", "p"], 0: ["a", "y"], 2: ["a", "y", "q"]}
    found = first_difference(declared, lambda rank: f"rank {rank}")
    assert found is not None
    assert "line 2 of what they declare differs: rank 0 has y; rank 1 has x; rank 2 has y; every rank" in found
    del declared[1]
    found = first_difference(declared, lambda rank: f"rank {rank}")
    assert found is not None
    assert "line 3 of what they declare differs: rank 0 has nothing; rank 2 has q; every rank" in found


PUSHED, WHOLE = Header(Kind.PUSH), memoryview(bytearray(MAX_SLICE_BYTES))


def joined(workers: int, recorder: Recorder | None = None) -> Job:
    job = Job(View.first(workers), "", recorder or Recorder(), ErrorCounts())
    for rank in range(workers):
        job.join(applicant(rank, workers), jobs.CONFIG)
    return job


def test_a_worker_that_dies_between_its_two_streams_fails_the_job_at_once() -> None:
    job = joined(2)
    for rank, stream in ((0, PUSH), (0, PULL), (1, PULL)):
        queue = job.open_stream(rank, stream)
    job.stream_ended(1, queue)
    with pytest.raises(WorkerLostError, match=r"^rank 1 \(h:1\) died at step 0"):
        job.declarations.declare(0, 0, [], [], jobs.DEADLINE_S)


def test_the_end_of_one_stream_ends_the_other_once() -> None:
    job, ended = joined(1), list[str]()
    job.open_stream(0, PUSH, lambda: ended.append("push"))
    queue = job.open_stream(0, PULL)
    job.stream_ended(0, queue)
    job.stream_ended(0, queue)
    assert ended == ["push"]
    assert queue.take() is None


@pytest.mark.parametrize("stream", [PUSH, PULL])
def test_a_stream_comes_once(stream: str) -> None:
    job = joined(1)
    job.open_stream(0, stream)
    with pytest.raises(ConnectError, match="has a stream already"):
        job.open_stream(0, stream)


def applicant(rank: int, workers: int) -> Applicant:
    return Applicant("", rank, workers, str(rank), "h", rank, 0, 1, "")


def test_a_worker_that_joins_again_keeps_the_queue_of_its_stream() -> None:
    job = joined(1)
    queue = job.open_stream(0, PULL)
    job.join(applicant(0, 1), jobs.CONFIG)
    assert job.open_stream(0, PUSH) is queue


@pytest.mark.parametrize("how", ["leaves", "the job fails"])
def test_a_push_stream_without_a_pull_stream_ends_when_its_worker(how: str) -> None:
    job, ended = joined(2), list[int]()
    for rank in range(2):
        job.open_stream(rank, PUSH, functools.partial(ended.append, rank))
    job.open_stream(1, PULL)
    if how == "leaves":
        job.leave(0, None)
    else:
        job.fail(ProtocolError("garbage"))
    assert ended == [0]  # the pull stream of rank 1 ends the other


def test_a_job_that_all_workers_have_left_records_nothing() -> None:
    recorder = Recorder()
    job = joined(1, recorder)
    job.leave(0, None)
    with pytest.raises(ClosedError, match="all workers have left"):
        job.trace(1, True)
    assert not recorder.enabled


def test_frames_under_way_are_bounded_by_what_is_declared() -> None:
    job = joined(1)
    job.open_stream(0, PUSH)
    session = Session(job, 0, job.open_stream(0, PULL), lambda when, error: error)
    session.queue.use_connection()
    job.declarations.declare(0, 0, [], [], jobs.DEADLINE_S)
    job.declarations.declare(0, 1, [], [jobs.bucket(MAX_SLICE_BYTES)], jobs.DEADLINE_S)
    for _ in range(1000):  # one after another, as many as one likes
        session.memory(PUSHED, MAX_SLICE_BYTES)
        session._arrived(WHOLE)
    with pytest.raises(ProtocolError, match="frames under way must have at most 268437504 bytes together"):
        for _ in range(5):
            session.memory(PUSHED, MAX_SLICE_BYTES)


def test_counters_that_were_drawn_from_last_are_kept() -> None:
    counters = Counters(lambda: View.first(2))
    assert [counters.fetch_add("outer", 1) for _ in range(2)] == [1, 2]
    for number in range(3 * 1023):
        counters.fetch_add(str(number), 0)
        if number % 1023 == 1022:
            assert counters.fetch_add("outer", 1) == 3 + number // 1023
    for number in range(1024):
        counters.fetch_add(str(number), 0)
    assert counters.fetch_add("outer", 1) == 1


@pytest.mark.parametrize(
    ("view", "told", "drawn"),
    [
        (View.first(2), ([2, 4, 7], [3, 5]), [6, 8, 9, 10]),
        (View.first(2), ([4, 7], [3, 5]), [6, 8, 9, 10]),  # 3 and what is before may have been drawn
        (View.first(3).next(left=[2]), ([2, 4, 7], [3, 5]), [8, 9, 10, 11]),  # the lost worker may have 6
    ],
)
def test_a_number_that_a_lost_pserver_gave_to_nobody_is_drawn_next(
    view: View, told: tuple[list[int], list[int]], drawn: list[int]
) -> None:
    counters = Counters(lambda: view)
    for rank, numbers in enumerate(told):
        for number in numbers:
            counters.follow("batches", rank, number + 1)
    assert [counters.fetch_add("batches", rank) for rank in (0, 1, 1, 0)] == drawn


def test_the_first_numbers_of_a_counter_go_to_the_ranks_of_the_view() -> None:
    counters = Counters(lambda: View.first(3).next(left=[1]))
    assert [counters.fetch_add("a", rank) for rank in (2, 0, 0, 2)] == [1, 0, 2, 3]
    with pytest.raises(ProtocolError, match=r"one of the 2 ranks, .* got rank 1 "):
        counters.fetch_add("a", 1)
