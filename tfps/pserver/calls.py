"""The control calls that a job answers, and what they share with the streams of a pserver: metadata, and refusals.

Tested in tests/pserver/test_server.py, tests/pserver/test_slices.py (Put, Get) and tests/worker/test_async.py (Rest,
Take).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from google.protobuf.message import Message

from tfps.compression import NONE
from tfps.errors import ConnectError, ProtocolError, TfpsError
from tfps.exchange.codecs import codec_of
from tfps.exchange.interface import BucketKind, BucketSpec
from tfps.exchange.parameter_shard import ParameterShard
from tfps.exchange.update_spec import UpdateSpec
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.job import Job
from tfps.pserver.slices import OwnedSlice
from tfps.wire.control import PROTOCOL_VERSION, RANK_KEY, STATE_PIECE_BYTES, failure_of, layout_of, reply_type

_MAX_WAIT_S = 60.0  # of a call, whatever its client says


def rank_of(metadata: dict[str, object]) -> int:
    """The rank that a stream is of.

    Raises:
        ConnectError: it is no number.
    """
    text = str(metadata.get(RANK_KEY, ""))
    if not text.isdigit():
        raise ConnectError(f"metadata {RANK_KEY} must be a number, got {text!r}")
    return int(text)


def refusal(name: str, error: TfpsError) -> Message:
    """The reply to a control call that has failed."""
    version = {"protocol_version": PROTOCOL_VERSION} if name in ("Join", "Probe") else {}
    reply: Message = reply_type(name)(**({} if name == "Leave" else {"failure": failure_of(error)}), **version)
    return reply


# The calls. All raise TfpsError if the job has failed.


def _declare(job: Job, request: pb.DeclareRequest) -> pb.DeclareReply:
    specs = [_spec(bucket) for bucket in request.buckets]
    job.declare(request.rank, request.number, request.details, specs, _bounded(request.timeout_s))
    return pb.DeclareReply()


def _waiting(job: Job, request: pb.WaitingRequest) -> pb.WaitingReply:
    return pb.WaitingReply(
        missing=job.undeclared() if request.declaration else job.missing(request.bucket, request.rank)
    )


def _put(job: Job, request: pb.PutRequest) -> pb.PutReply:
    """Raises ProtocolError: there is no such part, it is not rank 0 that puts, or more than one call takes."""
    owned, parameters = _parameters(job, request)
    nbytes = len(request.values)
    if request.rank or nbytes > STATE_PIECE_BYTES or nbytes % 4 or request.begin % 4:
        raise ProtocolError(
            f"a call of Put must be rank 0's, with at most {STATE_PIECE_BYTES} bytes, a multiple of 4 bytes from a "
            f"multiple of 4 on, got {nbytes} bytes from {request.begin} on of rank {request.rank}"
        )
    with owned.lock:
        parameters.put(request.number, request.begin, request.values)
    return pb.PutReply()


def _get(job: Job, request: pb.GetRequest) -> pb.GetReply:
    """Raises ProtocolError: there is no such part, or it is larger than one call returns."""
    owned, parameters = _parameters(job, request)
    if request.nbytes > STATE_PIECE_BYTES:
        raise ProtocolError(f"a call of Get must ask for at most {STATE_PIECE_BYTES} bytes, got {request.nbytes}")
    with owned.lock:
        return pb.GetReply(values=parameters.get(request.number, request.begin, request.nbytes))


def _quiesce(job: Job, request: pb.RestRequest) -> pb.RestReply:
    job.quiesce(request.rank)
    return pb.RestReply()


def _fetch_add(job: Job, request: pb.TakeRequest) -> pb.TakeReply:
    return pb.TakeReply(number=job.counters.fetch_add(request.counter, request.rank))


def _tune(job: Job, request: pb.TuneRequest) -> pb.TuneReply:
    job.tune(layout_of(request.layout))
    return pb.TuneReply()


def _trace(job: Job, request: pb.TraceRequest) -> pb.TraceReply:
    job.trace(request.number, request.on)
    return pb.TraceReply()


def _upload(job: Job, request: pb.UploadRequest) -> pb.UploadReply:
    job.recording.upload(request.number, request.rank, request.records)
    return pb.UploadReply()


def _collect(job: Job, request: pb.CollectRequest) -> pb.CollectReply:
    return pb.CollectReply(records=job.recording.collect(request.number, _bounded(request.timeout_s)))


#: By name. Each request has the job's incarnation.
JOB_CALLS: dict[str, Callable[..., Message]] = {
    "Declare": _declare,
    "Waiting": _waiting,
    "Put": _put,
    "Get": _get,
    "Rest": _quiesce,
    "Take": _fetch_add,
    "Tune": _tune,
    "Trace": _trace,
    "Upload": _upload,
    "Collect": _collect,
}


def _bounded(wait_s: float) -> float:
    """How long a call may wait: `wait_s`, if it is a time, up to a bound."""
    return max(wait_s, 0.0) if wait_s < _MAX_WAIT_S else _MAX_WAIT_S


def _spec(bucket: pb.Bucket) -> BucketSpec:
    """A declared bucket. Here, and only here, the texts of its codec and update are parsed.

    Raises:
        ConfigError: a value is out of range.
    """
    return BucketSpec(
        names=tuple(bucket.names),
        kind=cast("BucketKind", bucket.kind),
        nbytes=bucket.nbytes,
        dtype=bucket.dtype,
        priority=bucket.priority,
        occasional=bucket.occasional,
        codec=codec_of(bucket.codec or NONE),
        update=UpdateSpec.parse(bucket.update) if bucket.update else None,
    )


def _parameters(job: Job, request: pb.PutRequest | pb.GetRequest) -> tuple[OwnedSlice, ParameterShard]:
    bucket = job.bucket(request.bucket)
    owned = bucket.slices.get(request.slice)
    if owned is None or owned.parameters is None:
        raise ProtocolError(f"bucket '{bucket.spec.name}' has no slice {request.slice} here that keeps anything")
    return owned, owned.parameters
