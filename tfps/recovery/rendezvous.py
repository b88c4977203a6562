"""How a worker that has lost a pserver finds the one at which all meet; see tfps/membership/decision.py.

Tested in tests/worker/test_lost_pservers.py and tests/worker/test_lost_meanwhile.py.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from tfps.config import Security
from tfps.errors import PserverLostError, TfpsError, WorkerLostError
from tfps.protos import tfps_pb2 as pb
from tfps.wire.control import Pserver
from tfps.wire.reach import split

logger = logging.getLogger("tfps")
_DIAL_S, _ASK_S = 2.0, 3.0
_MEET_S, _MARGIN_S = 30.0, 5.0
_MOVES_S, _PAUSE_S = 20.0, 0.3


class _Answer(enum.Enum):
    KNOWS = enum.auto()  # it has the job
    IDLE = enum.auto()  # it has not
    REFUSED = enum.auto()  # nothing runs there, or what has another job, or is stopping
    SILENT = enum.auto()


@contextlib.contextmanager
def _pserver(address: str, security: Security, uid: str) -> Iterator[Pserver]:
    pserver = Pserver(address, security)
    pserver.sign(uid)
    try:
        yield pserver
    finally:
        pserver.close()


class _Found(NamedTuple):
    """What is at an address."""

    answer: _Answer
    pservers: Sequence[str] = ()  # of the job that is under way there, if it was resumed
    moving: bool = False  # the workers of the job are about to go on with other pservers
    error: WorkerLostError | None = None  # the job goes on there without this worker


def _ask(address: str, security: Security, uid: str, request: pb.RegroupRequest, workers: int | None) -> _Found:
    try:
        socket.create_connection(split(address), _DIAL_S).close()
    except ConnectionRefusedError:
        return _Found(_Answer.REFUSED)
    except OSError:
        return _Found(_Answer.SILENT)
    with _pserver(address, security, uid) as pserver:
        try:
            reply = pserver.call("Regroup", request, _ASK_S)
        except WorkerLostError as error:
            return _Found(_Answer.KNOWS, error=error)
        except TfpsError:
            return _Found(_Answer.SILENT)
    answer = _Answer.KNOWS if reply.known else _Answer.IDLE
    if reply.busy or (workers is not None and workers != reply.workers):
        answer = _Answer.REFUSED
    return _Found(answer, list(reply.pservers), reply.moving)


def _ask_all(
    addresses: Sequence[str], security: Security, uid: str, request: pb.RegroupRequest, workers: int | None
) -> dict[str, _Found]:
    found: dict[str, _Found] = {}

    def ask(address: str) -> None:
        found[address] = _ask(address, security, uid, request, workers)

    threads = [threading.Thread(target=ask, args=[address], name="tfps-ask", daemon=True) for address in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def pservers_now(addresses: Sequence[str], security: Security) -> Sequence[str]:
    """The pservers of a job under way at `addresses` that has others now; `addresses` if there is none.

    Waits while the job is about to go on with others.
    """
    end_s = time.monotonic() + _MOVES_S
    while True:
        found = _ask_all(addresses, security, "", pb.RegroupRequest(asks=True), None).values()
        if all(not each.moving for each in found) or time.monotonic() > end_s:
            return next((each.pservers for each in found if each.pservers), addresses)
        time.sleep(_PAUSE_S)


def meet(
    addresses: Sequence[str],
    security: Security,
    uid: str,
    incarnation: str,
    rank: int,
    workers: int,
    report: pb.Report,
    silent: Collection[str] = (),
) -> pb.Decision:
    """Meets the others of the job, which began with `workers`, at one of `addresses`; returns what they agree on.

    Those of `silent` pservers are not asked: they have just not answered for long.

    PserverLostError, WaitTimeoutError: not now, maybe later. Other TfpsErrors: this worker cannot go on.
    """
    request = pb.RegroupRequest(incarnation=incarnation, asks=True, rank=rank)
    asked = _ask_all([each for each in addresses if each not in silent], security, uid, request, workers)
    for found in asked.values():
        if found.error is not None:  # elsewhere it might meet nobody, and begin alone
            raise found.error
    answers = {address: asked[address].answer if address in asked else _Answer.SILENT for address in addresses}

    def those(*kinds: _Answer) -> list[str]:
        return [address for kind in kinds for address in addresses if answers[address] is kind]

    report.reached[:] = [a for a in addresses if answers[a] in (_Answer.KNOWS, _Answer.IDLE)]
    report.refused[:], report.unreached[:] = those(_Answer.REFUSED), those(_Answer.SILENT)
    request = pb.RegroupRequest(incarnation=incarnation, rank=rank, report=report, timeout_s=_MEET_S)
    for address in those(_Answer.KNOWS, _Answer.IDLE):
        with _pserver(address, security, uid) as pserver:
            try:
                return pserver.call("Regroup", request, _MEET_S + _MARGIN_S).decision
            except PserverLostError as error:
                logger.info("tfps: rank %d met nobody at pserver %s: %s", rank, address, error)
    raise PserverLostError(f"no pserver of {', '.join(addresses)} answers")
