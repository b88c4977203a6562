"""Logs whom this worker waits for once a wait takes longer than a few seconds."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tfps.errors import PserverLostError, TfpsError, WaitTimeoutError
from tfps.protos import tfps_pb2 as pb
from tfps.wire.control import Pserver
from tfps.wire.reach import trouble
from tfps.wire.status import status_of
from tfps.worker.bucket import Push, PushedBucket
from tfps.worker.membership import Membership

logger = logging.getLogger("tfps")
PATIENCE_S = 5.0  # before a wait is logged
_AGAIN_S = 60.0  # before a wait for the same ranks is logged again
_ASK_TIMEOUT_S = 5.0


@contextlib.contextmanager
def saying(whom: Callable[[], str]) -> Iterator[None]:
    """Logs `tfps: waits for <whom>` once if the block takes too long.

    `whom` is called on a thread, repeatedly while it returns "".
    """
    over = threading.Event()

    def say() -> None:
        while not over.wait(PATIENCE_S):
            with contextlib.suppress(Exception):  # a missing log line must not fail the job
                if (text := whom()) and not over.is_set():
                    logger.warning("tfps: waits for %s", text)
                    return

    thread = threading.Thread(target=say, name="tfps-patience", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * _ASK_TIMEOUT_S)


def join_blocked_by(pserver: Pserver) -> str:
    """Returns why `pserver` does not answer a Join, "" if it is about to."""
    try:
        status = status_of(pserver.call("Status", pb.StatusRequest(details=True), _ASK_TIMEOUT_S))
    except TfpsError:
        why = trouble(pserver.address)
        return f"pserver {pserver.address}, which does not answer{why and f' ({why})'}; is tfps_pserver running there?"
    members = ", ".join(f"rank {m.rank} ({m.host}:{m.pid})" for m in status.job.members if m.state != "gone")
    return f"pserver {pserver.address}, where an earlier job has not ended: {members} is there" if members else ""


class Answer(NamedTuple):
    """A pserver's answer about a push: the ranks it waits for, or why it did not answer."""

    pserver: str
    missing: Sequence[str] = ()
    error: TfpsError | None = None


class Blame:
    """Finds out whom a worker waits for by asking its pservers; each call has a deadline.

    Only one thread may call `look`.
    """

    def __init__(self, pservers: Sequence[Pserver], membership: Membership) -> None:
        self._pservers, self._membership = pservers, membership
        self._asked_s = float("-inf")
        self._said, self._said_s = "", 0.0  # whom the last log line named, and when

    def declaring(self, pserver: Pserver, number: int) -> str:
        """Returns the ranks yet to join (`number` 0) or to declare what this worker has; "" if none."""
        request = pb.WaitingRequest(
            incarnation=self._membership.incarnation, rank=self._membership.rank, declaration=True
        )
        try:
            missing = self._others(pserver.call("Waiting", request, _ASK_TIMEOUT_S).missing)
        except TfpsError as error:
            return str(error)
        return f"{', '.join(missing)} to {'declare the same variables' if number else 'join'}" if missing else ""

    def pushing(self, number: int, bucket: PushedBucket, push: Push) -> list[Answer]:
        """Asks the pservers that still owe replies to `push` of bucket `number`."""
        with bucket.lock:
            owners = sorted({owner for index, owner in enumerate(bucket.cutting.owners) if index not in push.arrived})
        request = pb.WaitingRequest(incarnation=self._membership.incarnation, rank=self._membership.rank, bucket=number)
        answers = []
        for pserver in (self._pservers[owner] for owner in owners):
            try:
                missing = list(pserver.call("Waiting", request, _ASK_TIMEOUT_S).missing)
                answers.append(Answer(pserver.address, missing))
            except TfpsError as error:
                answers.append(Answer(pserver.address, error=error))
        return answers

    def timeout(self, number: int, bucket: PushedBucket, push: Push, limit_s: float) -> TfpsError:
        """Returns the error for a push that has waited for `limit_s`, naming the ranks it waits for."""
        what = f"bucket '{bucket.spec.name}' step {push.step}: no result within {limit_s:.3g} s"
        blame = [
            str(answer.error)
            if answer.error is not None
            else f"pserver {answer.pserver} waits for "
            f"{', '.join(answer.missing) or 'nobody: its replies do not arrive'}"
            for answer in self.pushing(number, bucket, push)
        ]
        return WaitTimeoutError(f"{what}; {'; '.join(blame)}")

    def look(self, buckets: Sequence[PushedBucket]) -> None:
        """Logs whom the oldest push waits for if it takes too long, unless the same was logged recently."""
        now_s = time.monotonic()
        waiting = [
            (push.started_s, number) for number, each in enumerate(buckets) if (push := each.current) is not None
        ]
        started_s, number = min(waiting, default=(now_s, 0))
        if now_s - max(started_s, self._asked_s) < PATIENCE_S:
            return
        push = buckets[number].current
        if push is None:
            return
        self._asked_s = now_s
        answers = self.pushing(number, buckets[number], push)
        whom = ", ".join(self._others(sorted({rank for answer in answers for rank in answer.missing})))
        silent = [answer.pserver for answer in answers if isinstance(answer.error, PserverLostError)]
        if silent:
            whom = f"pserver {', '.join(silent)}, which does not answer"
        elif not whom and all(answer.error is None for answer in answers):
            whom = f"the network: slices are on their way to or from pserver {', '.join(a.pserver for a in answers)}"
        if not whom or buckets[number].current is not push or (whom == self._said and now_s < self._said_s + _AGAIN_S):
            return
        self._said, self._said_s = whom, now_s
        name, *more = buckets[number].spec.names
        what = f"{name}{f' and {len(more)} more' if more else ''}"
        logger.warning("tfps: waits for %s; %.0f s so far, step %d of %s", whom, now_s - started_s, push.step, what)

    def _others(self, ranks: Sequence[str]) -> list[str]:
        """Returns `ranks` without this worker, whose message may still be in flight."""
        return [rank for rank in ranks if not rank.startswith(f"rank {self._membership.rank} ")]
