"""The status of a pserver, the same for the Status call, Prometheus and the console.

Tested in tests/pserver/test_metrics.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from tfps.protos import tfps_pb2 as pb
from tfps.types import Argument


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


def status_message(status: PserverStatus) -> pb.StatusReply:
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


def status_of(message: pb.StatusReply) -> PserverStatus:
    """The reverse of `status_message`."""
    members = tuple(_read(MemberStatus, member) for member in message.members)
    errors = tuple(_read(ErrorCount, error) for error in message.errors)
    job = _read(JobStatus, message, members=members)
    status: PserverStatus = _read(PserverStatus, message, errors=errors, job=job)
    return status


_T = TypeVar("_T", MemberStatus, ErrorCount, JobStatus, PserverStatus)


def _read(kind: type[_T], message: Message, **given: Argument) -> _T:
    names = [field.name for field in dataclasses.fields(kind) if field.name not in given]
    return kind(**{name: getattr(message, name) for name in names}, **given)
