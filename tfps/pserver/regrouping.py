"""Where workers meet that have lost a pserver: on another one; see tfps/membership/decision.py.

Tested in tests/worker/test_lost_pservers.py.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tfps.config import Security, check_address
from tfps.errors import ConnectError, ProtocolError, PserverLostError, TfpsError, WaitTimeoutError
from tfps.membership.decision import check_present, decide
from tfps.protos import tfps_pb2 as pb
from tfps.wire.control import Pserver
from tfps.wire.send_queue import SILENT_S

_GRACE_S = SILENT_S + 2.0  # by then others have noticed that a pserver is silent, or do not come
_KEPT = 16  # jobs
_OFFER_S, _PAUSE_S = 10.0, 0.5
_MOST = 2**16  # ranks


@dataclass(slots=True)
class _Meeting:
    """Of the workers of one job, who come to the next one when they lose a pserver again."""

    knows: bool
    reports: dict[int, pb.Report] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)
    outcome: pb.Decision | TfpsError | None = None
    resumed: bool = False  # whether the job goes on

    def __str__(self) -> str:
        if isinstance(self.outcome, pb.Decision):
            return f"{_ranks(self.outcome.ranks)} will go on with {', '.join(self.outcome.pservers)}"
        missing = set[int]().union(*(report.ranks for report in self.reports.values())).difference(self.reports)
        here = f"{_ranks(self.reports)} here" if self.reports else "nobody is here"
        return f"{here}, waits for {_ranks(missing) if missing else 'the others'}"


def _ranks(ranks: Iterable[int]) -> str:
    return f"rank {', '.join(map(str, sorted(ranks)))}"


class Meetings:
    """The last meeting of each job on one pserver; any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all below
        self._meetings: OrderedDict[str, _Meeting] = OrderedDict()  # by the job's first incarnation

    def knows(self, incarnation: str) -> bool:
        """Whether workers of this job have met here, or are about to."""
        with self._changed:
            return incarnation in self._meetings

    def was_of(self, incarnation: str) -> bool:
        """Whether this pserver has been one of the job's: workers that only failed to meet here make it none."""
        with self._changed:
            meeting = self._meetings.get(incarnation)
            return meeting is not None and (meeting.knows or isinstance(meeting.outcome, pb.Decision))

    def meet(
        self, request: pb.RegroupRequest, knows: bool, timeout_s: float, begin: Callable[[], object]
    ) -> pb.Decision:
        """Waits for the other workers; returns what they agree on. `begin` is called before it, and may raise.

        `knows`: this pserver has been one of the job's.

        TfpsError: they cannot go on, or not with this one.
        """
        rank, report = request.rank, request.report
        if not request.incarnation or rank >= _MOST or rank not in report.ranks:
            raise ProtocolError(
                "a worker that meets others must name its job and its own rank among those that take part, got rank "
                f"{rank} of {sorted(report.ranks)[:_MOST]}"
            )
        with self._changed:
            meeting = self._meetings.get(request.incarnation)
            if meeting is None or (meeting.outcome is not None and not self._is_late(meeting, report)):
                begin()
                meeting = self._meetings[request.incarnation] = _Meeting(knows)
                self._meetings.move_to_end(request.incarnation)
                while len(self._meetings) > _KEPT:
                    self._meetings.popitem(last=False)
            if meeting.outcome is None:
                meeting.reports[rank] = report
                self._decide(meeting, waited=False)
                left_s = meeting.began_s + _GRACE_S - time.monotonic()
                self._changed.wait_for(lambda: meeting.outcome is not None, min(timeout_s, left_s))
                if meeting.outcome is None and time.monotonic() >= meeting.began_s + _GRACE_S:
                    self._decide(meeting, waited=True)
            outcome = meeting.outcome
        if outcome is None:
            raise WaitTimeoutError("the other workers have not come to the pserver at which they meet")
        if isinstance(outcome, TfpsError):
            raise outcome
        check_present(rank, outcome)
        return outcome

    def _is_late(self, meeting: _Meeting, report: pb.Report) -> bool:
        """Whether the worker does not know yet what others have agreed on."""
        return isinstance(meeting.outcome, pb.Decision) and report.generation < meeting.outcome.generation

    def expect(self, incarnation: str, generation: int) -> None:
        """The workers of this job, whose view is `generation`, are about to meet, here or at another pserver."""
        with self._changed:
            meeting = self._meetings.get(incarnation)
            outcome = None if meeting is None else meeting.outcome
            if meeting is None or (isinstance(outcome, pb.Decision) and outcome.generation <= generation):
                self._meetings[incarnation] = _Meeting(knows=True)

    def resume(self, incarnation: str) -> None:
        """The workers of this job begin it anew."""
        with self._changed:
            if incarnation in self._meetings:
                self._meetings[incarnation].resumed = True
            self._changed.notify_all()

    def wait_resumed(self, timeout_s: float) -> None:
        """Waits while workers meet that go on with their job: no other may have this pserver meanwhile."""

        with self._changed:
            self._changed.wait_for(lambda: not self.under_way, min(timeout_s, 2 * _GRACE_S))

    @property
    def under_way(self) -> str:
        """Who has come, if workers meet, or what they agree on, if they have met and have not begun anew; else ""."""
        now_s = time.monotonic()
        with self._changed:
            for meeting in self._meetings.values():
                late = now_s - meeting.began_s > 2 * _GRACE_S
                if not (meeting.resumed or isinstance(meeting.outcome, TfpsError) or late):
                    return str(meeting)
        return ""

    def _decide(self, meeting: _Meeting, waited: bool) -> None:
        try:
            meeting.outcome = decide(meeting.reports, waited, meeting.knows)
        except TfpsError as error:
            if waited:  # else somebody may still come
                meeting.outcome = error
        if meeting.outcome is not None:
            self._changed.notify_all()


def offer(pserver: str, address: str, workers: int, security: Security, wait_s: float = 30.0) -> None:
    """Asks `pserver` to let the one at `address` take part in its job. TfpsError: it does not answer, or refuses.

    Asks again for up to `wait_s` while there is no job: it may have lost another pserver just now.
    """
    other, end_s = Pserver(check_address(pserver), security), time.monotonic() + wait_s
    try:
        while True:
            try:
                other.call("Offer", pb.OfferRequest(address=address, workers=workers), _OFFER_S)
            except (ConnectError, PserverLostError) as error:
                if time.monotonic() > end_s:
                    raise type(error)(f"pserver {pserver} (--join): {error}") from error
                time.sleep(_PAUSE_S)
            except TfpsError as error:
                raise type(error)(f"pserver {pserver} (--join): {error}") from error
            else:
                return
    finally:
        other.close()
