"""The status of a pserver's job, from its members and rounds, and the pserver's error counts.

Tested in tests/pserver/test_metrics.py.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from tfps.errors import TfpsError
from tfps.exchange.aggregate import GatherRound, SumRound
from tfps.pserver.membership import Membership
from tfps.wire.send_queue import Load
from tfps.wire.status import ErrorCount, JobStatus, MemberStatus


def job_status(
    membership: Membership,
    failure: TfpsError | None,
    buckets: int,
    rounds: Sequence[SumRound | GatherRound],
    loads: Mapping[int, Load],
) -> JobStatus:
    """Builds the status of a job from its members, rounds and stream loads."""
    arrived = [ranks for round_ in rounds if (ranks := round_.arrived)]  # a round that ends replaces its set
    members = sorted(membership.members.values(), key=lambda member: member.rank)
    return JobStatus(
        job=members[0].applicant.job if members else "",
        workers=membership.workers,
        state=_state(membership, failure),
        reason=str(failure or ""),
        buckets=buckets,
        slices=len(rounds),
        shard_bytes=sum(round_.nbytes for round_ in rounds if isinstance(round_, SumRound)),
        open_slices=len(arrived),
        members=tuple(
            MemberStatus(
                rank=member.rank,
                host=member.applicant.host,
                pid=member.applicant.pid,
                state=member.state.value,
                step=member.step,
                wait_s=member.wait_s,
                awaited_slices=sum(member.rank not in ranks for ranks in arrived),
                shared_memory=member.memory is not None,
                **loads[member.rank]._asdict(),
            )
            for member in members
        ),
    )


def _state(membership: Membership, failure: TfpsError | None) -> str:
    if failure is not None:
        return "failed"
    if not membership.members or membership.over:
        return "idle"
    if membership.ending:
        return "ending"
    return "joining" if membership.not_streaming() else "running"


class ErrorCounts:
    """Counts errors by place and class; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _counts
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, where: str, error: Exception) -> None:
        with self._lock:
            self._counts[where, type(error).__name__] += 1

    def all(self) -> tuple[ErrorCount, ...]:
        with self._lock:
            return tuple(ErrorCount(*key, count) for key, count in sorted(self._counts.items()))
