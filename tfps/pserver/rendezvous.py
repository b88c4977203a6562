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
class _Rendezvous:
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


class RendezvousHost:
    """The last rendezvous of each job on one pserver; any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all below
        self._rendezvous: OrderedDict[str, _Rendezvous] = OrderedDict()  # by the job's first incarnation

    def knows(self, incarnation: str) -> bool:
        """Whether workers of this job have met here, or are about to."""
        with self._changed:
            return incarnation in self._rendezvous

    def was_of(self, incarnation: str) -> bool:
        """Whether this pserver has been one of the job's: workers that only failed to meet here make it none."""
        with self._changed:
            rendezvous = self._rendezvous.get(incarnation)
            return rendezvous is not None and (rendezvous.knows or isinstance(rendezvous.outcome, pb.Decision))

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
            rendezvous = self._rendezvous.get(request.incarnation)
            if rendezvous is None or (rendezvous.outcome is not None and not self._is_late(rendezvous, report)):
                begin()
                rendezvous = self._rendezvous[request.incarnation] = _Rendezvous(knows)
                self._rendezvous.move_to_end(request.incarnation)
                while len(self._rendezvous) > _KEPT:
                    self._rendezvous.popitem(last=False)
            if rendezvous.outcome is None:
                rendezvous.reports[rank] = report
                self._decide(rendezvous, waited=False)
                left_s = rendezvous.began_s + _GRACE_S - time.monotonic()
                self._changed.wait_for(lambda: rendezvous.outcome is not None, min(timeout_s, left_s))
                if rendezvous.outcome is None and time.monotonic() >= rendezvous.began_s + _GRACE_S:
                    self._decide(rendezvous, waited=True)
            outcome = rendezvous.outcome
        if outcome is None:
            raise WaitTimeoutError("the other workers have not come to the pserver at which they meet")
        if isinstance(outcome, TfpsError):
            raise outcome
        check_present(rank, outcome)
        return outcome

    def _is_late(self, rendezvous: _Rendezvous, report: pb.Report) -> bool:
        """Whether the worker does not know yet what others have agreed on."""
        return isinstance(rendezvous.outcome, pb.Decision) and report.generation < rendezvous.outcome.generation

    def expect(self, incarnation: str, generation: int) -> None:
        """The workers of this job, whose view is `generation`, are about to meet, here or at another pserver."""
        with self._changed:
            rendezvous = self._rendezvous.get(incarnation)
            outcome = None if rendezvous is None else rendezvous.outcome
            if rendezvous is None or (isinstance(outcome, pb.Decision) and outcome.generation <= generation):
                self._rendezvous[incarnation] = _Rendezvous(knows=True)

    def resume(self, incarnation: str) -> None:
        """The workers of this job begin it anew."""
        with self._changed:
            if incarnation in self._rendezvous:
                self._rendezvous[incarnation].resumed = True
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
            for rendezvous in self._rendezvous.values():
                late = now_s - rendezvous.began_s > 2 * _GRACE_S
                if not (rendezvous.resumed or isinstance(rendezvous.outcome, TfpsError) or late):
                    return str(rendezvous)
        return ""

    def _decide(self, rendezvous: _Rendezvous, waited: bool) -> None:
        try:
            rendezvous.outcome = decide(rendezvous.reports, waited, rendezvous.knows)
        except TfpsError as error:
            if waited:  # else somebody may still come
                rendezvous.outcome = error
        if rendezvous.outcome is not None:
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
