"""How a pserver is doing, as it tells whoever asks: the Status call, Prometheus and the console read the same."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfps.aggregate import GatherRound, SumRound
from tfps.errors import TfpsError
from tfps.membership import Membership
from tfps.protos import tfps_pb2 as pb
from tfps.send_queue import Load


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One member of the current job; for the fields see `protos/tfps.proto`. Totals are of this job."""

    rank: int
    host: str
    pid: int
    state: str
    step: int
    received_bytes: int
    received_slices: int
    sent_bytes: int
    sent_slices: int
    queued_slices: int
    in_flight_bytes: int
    window_bytes: int
    wait_s: float
    awaited_slices: int
    shared_memory: bool = False
    busy_bytes: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The current job of a pserver."""

    job: str
    workers: int
    state: str
    reason: str
    buckets: int
    slices: int
    shard_bytes: int
    open_slices: int
    members: tuple[MemberStatus, ...]


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """How often an error happened: `where` is the call that was refused, or "job" for jobs that failed."""

    where: str
    error: str
    count: int


@dataclass(frozen=True, slots=True)
class PserverStatus:
    """A pserver's process and its current job."""

    version: str
    cpu_s: float
    uptime_s: float
    memory_bytes: int
    jobs: int
    errors: tuple[ErrorCount, ...]
    job: JobStatus


def job_status(
    membership: Membership,
    failure: TfpsError | None,
    buckets: int,
    rounds: Sequence[SumRound | GatherRound],
    loads: Mapping[int, Load],
) -> JobStatus:
    """The status of a job with these members, rounds of slices and loads of the members' streams."""
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


def status_message(status: PserverStatus) -> Any:
    """A status as the reply to Status."""
    message = pb.StatusReply()
    for part in (status, status.job):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if isinstance(value, (str, int, float)):
                setattr(message, field.name, value)
    message.members.extend(pb.MemberStatus(**dataclasses.asdict(member)) for member in status.job.members)
    message.errors.extend(pb.ErrorCount(**dataclasses.asdict(error)) for error in status.errors)
    return message


def status_of(message: Any) -> PserverStatus:
    """The reverse of `status_message`."""
    members = tuple(_read(MemberStatus, member) for member in message.members)
    errors = tuple(_read(ErrorCount, error) for error in message.errors)
    job = _read(JobStatus, message, members=members)
    status: PserverStatus = _read(PserverStatus, message, errors=errors, job=job)
    return status


def _read(kind: Any, message: Any, **given: Any) -> Any:
    names = [field.name for field in dataclasses.fields(kind) if field.name not in given]
    return kind(**{name: getattr(message, name) for name in names}, **given)
