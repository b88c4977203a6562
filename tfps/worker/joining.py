"""Joins a job on all its pservers, one after the other, and leaves it."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from tfps.config import Config
from tfps.errors import TfpsError
from tfps.protos import tfps_pb2 as pb
from tfps.wire.control import PROTOCOL_VERSION, Pserver, failure_of, memory_message, settings_of
from tfps.wire.shared_memory import Sharing
from tfps.worker.membership import Membership
from tfps.worker.patience import join_blocked_by, saying

_LEAVE_TIMEOUT_S = 5.0


class Joined(NamedTuple):
    """One pserver's answer to Join.

    Attributes:
        membership: the same from all pservers.
        shares_memory: whether this pserver uses the worker's memory instead of sockets.
        data_port: its port for data connections, 0 if none.
    """

    membership: Membership
    shares_memory: bool
    data_port: int


def join(
    pservers: Sequence[Pserver],
    config: Config,
    memory: Sharing,
    deadline_s: float,
    job: str,
    rank: int,
    workers: int,
) -> Iterator[Joined]:
    """Joins one pserver per item. The first one assigns rank and number of workers, which the others are told.

    Args:
        memory: offered to all of them.
        deadline_s: of `time.monotonic`.
        rank: -1 to assign ranks in order of joining.
        workers: 0 for the number that the pservers were started with.

    Raises:
        ConnectError: a pserver cannot be reached or refuses this worker.
        MismatchError: the settings differ between workers.
    """
    request = pb.JoinRequest(
        protocol_version=PROTOCOL_VERSION,
        job=job,
        rank=rank,
        workers=workers,
        uid=uuid.uuid4().hex,
        host=socket.gethostname(),
        pid=os.getpid(),
        pservers=len(pservers),
        settings=settings_of(config),
        memory=memory_message(memory.offer),
    )
    for index, pserver in enumerate(pservers):
        request.pserver_index = index
        with saying(partial(join_blocked_by, pserver)):
            reply = pserver.join(request, max(deadline_s - time.monotonic(), 0.1), config.connect_timeout_s)
        request.rank, request.workers, request.incarnation = reply.rank, reply.workers, reply.incarnation
        yield Joined(Membership(reply.rank, reply.workers, reply.incarnation), reply.shared_memory, reply.data_port)


def leave(pservers: Sequence[Pserver], membership: Membership, failure: TfpsError | None, reason: str = "") -> None:
    """Tells every pserver that this worker leaves; ignores unreachable pservers.

    Args:
        failure: why the job fails.
        reason: why this worker leaves, for those that wait for it; if nobody does, the job goes on.
    """
    farewell = None if failure is None else failure_of(failure)
    for pserver in pservers:
        request = pb.LeaveRequest(
            incarnation=membership.incarnation, rank=membership.rank, failure=farewell, reason=reason
        )
        try:
            pserver.call("Leave", request, _LEAVE_TIMEOUT_S)
        except TfpsError:
            continue
