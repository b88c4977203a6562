"""A job by itself: declarations and streams. Rounds and members are in test_server.py and in tests/worker/."""

from __future__ import annotations

import jobs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfps.errors import ConnectError, ProtocolError, WorkerLostError
from tfps.membership.members import Applicant, first_difference
from tfps.membership.view import View
from tfps.pserver.job import Counters, ErrorCounts, Job
from tfps.trace.recorder import Recorder
from tfps.wire.control import PULL, PUSH

texts = st.lists(st.sampled_from("abc"), max_size=4)


@given(declared=st.dictionaries(st.integers(0, 5), texts, min_size=1))
def test_a_difference_is_found_if_and_only_if_there_is_one(declared: dict[int, list[str]]) -> None:
    found = first_difference(declared, lambda rank: f"rank {rank}")
    assert (found is None) == (len({tuple(lines) for lines in declared.values()}) == 1)


def test_the_first_difference_names_what_every_rank_has() -> None:
    declared = {1: ["a", "x", "p"], 0: ["a", "y"], 2: ["a", "y", "q"]}
    found = first_difference(declared, lambda rank: f"rank {rank}")
    assert found is not None
    assert found.endswith("line 2 of what they declare differs: rank 0 has y; rank 1 has x; rank 2 has y")
    del declared[1]
    found = first_difference(declared, lambda rank: f"rank {rank}")
    assert found is not None
    assert found.endswith("line 3 of what they declare differs: rank 0 has nothing; rank 2 has q")


def joined(workers: int) -> Job:
    job = Job(View.first(workers), "", Recorder(), ErrorCounts())
    for rank in range(workers):
        applicant = Applicant(
            job="",
            rank=rank,
            workers=workers,
            uid=str(rank),
            host="h",
            pid=rank,
            pserver_index=0,
            pservers=1,
            incarnation="",
        )
        job.join(applicant, jobs.CONFIG)
    return job


def test_a_worker_that_dies_between_its_two_streams_fails_the_job_at_once() -> None:
    job = joined(2)
    for rank, stream in ((0, PUSH), (0, PULL), (1, PULL)):
        queue = job.open_stream(rank, stream)
    job.stream_ended(1, queue)
    with pytest.raises(WorkerLostError, match=r"^rank 1 \(h:1\) died at step 0"):
        job.declare(0, 0, [], [], jobs.DEADLINE_S)


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


def test_the_first_numbers_of_a_counter_go_to_the_ranks_of_the_view() -> None:
    counters = Counters(lambda: View.first(3).next(left=[1]))
    assert [counters.fetch_add("a", rank) for rank in (2, 0, 0, 2)] == [1, 0, 2, 3]
    with pytest.raises(ProtocolError, match=r"one of the 2 ranks, .* got rank 1 "):
        counters.fetch_add("a", 1)
