"""The status of a pserver's job, from its members and slices, and the pserver's error counts.

Tested in tests/pserver/test_metrics.py.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from tfps.errors import TfpsError
from tfps.pserver.membership import Membership
from tfps.pserver.slices import OwnedSlice
from tfps.wire.send_queue import Load
from tfps.wire.status import ErrorCount, JobStatus, MemberStatus


def job_status(
    membership: Membership,
    failure: TfpsError | None,
    buckets: int,
    slices: Sequence[OwnedSlice],
    loads: Mapping[int, Load],
) -> JobStatus:
    """Builds the status of a job from its members, slices and stream loads."""
    awaited = [ranks for item in slices if (ranks := item.missing())]
    members = sorted(membership.members.values(), key=lambda member: member.rank)
    return JobStatus(
        job=members[0].applicant.job if members else "",
        workers=membership.workers,
        state=_state(membership, failure),
        reason=str(failure or ""),
        buckets=buckets,
        slices=len(slices),
        shard_bytes=sum(item.admission.nbytes for item in slices),
        open_slices=len(awaited),
        members=tuple(
            MemberStatus(
                rank=member.rank,
                host=member.applicant.host,
                pid=member.applicant.pid,
                state=member.state.value,
                step=member.step,
                wait_s=member.wait_s,
                awaited_slices=sum(member.rank in ranks for ranks in awaited),
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
