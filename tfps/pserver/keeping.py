"""The calls Put and Get: what slices with an update keep. Rest and Take: mode "async".

Tested in tests/pserver/test_slices.py and tests/worker/test_async.py.
"""

from __future__ import annotations

from collections.abc import Callable

from tfps.errors import ProtocolError
from tfps.exchange.parameter_shard import ParameterShard
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.job import Job
from tfps.pserver.slices import OwnedSlice
from tfps.wire.control import KEPT_PIECE_BYTES


def put(job_of: Callable[[str], Job], request: pb.PutRequest, context: object) -> pb.PutReply:
    """Answers Put.

    Raises:
        ProtocolError: there is no such part, it is not rank 0 that puts, or more than one call takes.
        TfpsError: the job has failed, or is not known.
    """
    owned, kept = _kept(job_of, request)
    nbytes = len(request.values)
    if request.rank or nbytes > KEPT_PIECE_BYTES or nbytes % 4 or request.begin % 4:
        raise ProtocolError(
            f"a call of Put must be rank 0's, with at most {KEPT_PIECE_BYTES} bytes, a multiple of 4 bytes from a "
            f"multiple of 4 on, got {nbytes} bytes from {request.begin} on of rank {request.rank}"
        )
    with owned.lock:
        kept.put(request.number, request.begin, request.values)
    return pb.PutReply()


def get(job_of: Callable[[str], Job], request: pb.GetRequest, context: object) -> pb.GetReply:
    """Answers Get.

    Raises:
        ProtocolError: there is no such part, or it is larger than one call returns.
        TfpsError: the job has failed, or is not known.
    """
    owned, kept = _kept(job_of, request)
    if request.nbytes > KEPT_PIECE_BYTES:
        raise ProtocolError(f"a call of Get must ask for at most {KEPT_PIECE_BYTES} bytes, got {request.nbytes}")
    with owned.lock:
        return pb.GetReply(values=kept.get(request.number, request.begin, request.nbytes))


def rest(job_of: Callable[[str], Job], request: pb.RestRequest, context: object) -> pb.RestReply:
    """Answers Rest.

    Raises:
        MismatchError: others wait for this rank to assign values.
        TfpsError: the job has failed, or is not known.
    """
    job_of(request.incarnation).rest(request.rank)
    return pb.RestReply()


def take(job_of: Callable[[str], Job], request: pb.TakeRequest, context: object) -> pb.TakeReply:
    """Answers Take.

    Raises:
        ProtocolError: see `Counters.take`.
        TfpsError: the job is not known.
    """
    return pb.TakeReply(number=job_of(request.incarnation).counters.take(request.counter, request.rank))


def _kept(job_of: Callable[[str], Job], request: pb.PutRequest | pb.GetRequest) -> tuple[OwnedSlice, ParameterShard]:
    bucket = job_of(request.incarnation).bucket(request.bucket)
    owned = bucket.slices.get(request.slice)
    if owned is None or owned.parameters is None:
        raise ProtocolError(f"bucket '{bucket.spec.name}' has no slice {request.slice} here that keeps anything")
    return owned, owned.parameters
