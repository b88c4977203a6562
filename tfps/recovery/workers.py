"""Makes the workers of an `ElasticExchange`, one after the other.

Tested in tests/worker/test_lost_pservers.py and tests/worker/test_worker_starts.py.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

from tfps.config import Config, Security
from tfps.errors import ClosedError, ConnectError, PserverLostError
from tfps.membership.members import Resumed
from tfps.protos import tfps_pb2 as pb
from tfps.recovery.rendezvous import pservers_now
from tfps.trace.recorder import Recorder
from tfps.types import Argument, Options
from tfps.worker.worker import Worker

MOST_CONNECT_S = 15.0  # for all to begin anew, once they have met
PAUSE_S = 0.2  # before another attempt


class Workers:
    """Joins pservers; knows the addresses of all that the job has had."""

    def __init__(
        self, pservers: Sequence[str], job: str, config: Config, recorder: Recorder, on_offer: Callable[[str], object]
    ) -> None:
        self.security = Security.of_worker(config)
        self._config, self._lock = config, threading.Lock()  # guards the addresses
        self._addresses = list(pservers)
        self._about: Options = {"job": job, "config": config, "recorder": recorder, "on_offer": on_offer}

    @property
    def addresses(self) -> Sequence[str]:
        with self._lock:
            return list(self._addresses)

    def add_addresses(self, addresses: Sequence[str]) -> None:
        with self._lock:
            self._addresses = list(dict.fromkeys([*self._addresses, *addresses]))

    def first(self, rank: int | None, workers: int | None) -> Worker:
        """Joins the pservers, or those that the job has meanwhile."""
        given, end_s = self.addresses, time.monotonic() + self._config.connect_timeout_s
        addresses = pservers_now(given, self.security)
        while True:
            try:
                worker = self.new(addresses, rank=rank, workers=workers)
            except (ClosedError, ConnectError, PserverLostError) as error:
                before, addresses = addresses, pservers_now(given, self.security)
                moves = addresses != before or not isinstance(error, ConnectError)
                if not moves or time.monotonic() > end_s:
                    raise
                time.sleep(PAUSE_S)
            else:
                self.add_addresses(addresses)
                return worker

    def new(self, addresses: Sequence[str], **more: Argument) -> Worker:
        """Joins `addresses`; `more` as for `Worker`."""
        return Worker(addresses, **{**self._about, **more})

    def asking_again(self, rank: int) -> Worker:
        """Asks to join the job once more, with the pservers that it has now."""
        return self.new(pservers_now(self.addresses, self.security), rank=rank)

    def resumed(self, decision: pb.Decision, old: Worker, incarnation: str) -> Worker:
        """Goes on where `old` has ended, with the pservers on which all have agreed."""
        connect_s = min(self._config.connect_timeout_s, MOST_CONNECT_S)
        return self.new(
            list(decision.pservers),
            rank=old.rank,
            config=dataclasses.replace(self._config, connect_timeout_s=connect_s),
            losses=old.losses,
            uid=old.client.uid,
            resumed=Resumed(
                incarnation, decision.generation, tuple(decision.ranks), tuple(decision.pservers), decision.reason
            ),
        )
