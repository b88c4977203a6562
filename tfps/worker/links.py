"""Measurements of a worker's links to its pservers."""

from __future__ import annotations

from collections.abc import Sequence

from tfps.exchange.interface import Link
from tfps.protos import tfps_pb2 as pb
from tfps.wire.control import Pserver
from tfps.wire.send_queue import SendQueue
from tfps.wire.shared_memory import Sharing
from tfps.worker.membership import Membership

_STATUS_TIMEOUT_S = 10.0
_LEAST_BUSY_S = 0.02  # minimum for a meaningful throughput


class Links:
    """Measures the links to all pservers. Not thread-safe.

    Args:
        queues: of the pservers, in the same order.
        memory: knows which of them use shared memory.
    """

    def __init__(
        self, pservers: Sequence[Pserver], queues: Sequence[SendQueue], memory: Sharing, membership: Membership
    ) -> None:
        self._pservers, self._queues, self._memory = pservers, queues, memory
        self._incarnation = membership.incarnation
        self._cpu_s: list[float] = []  # of each pserver, when training began

    def begin(self) -> None:
        """Notes the pservers' CPU time before the first step; later calls do nothing.

        Raises:
            TfpsError: a pserver did not answer.
        """
        if not self._cpu_s:
            self._cpu_s = [self._cpu_s_of(pserver) for pserver in self._pservers]

    def measured(self, steps: int) -> list[Link]:
        """Returns the measurements of the `steps` steps so far.

        Raises:
            TfpsError: a pserver did not answer.
        """
        found = []
        for index, (pserver, queue) in enumerate(zip(self._pservers, self._queues, strict=True)):
            busy = queue.throughput
            rate = busy.nbytes / busy.seconds if busy.seconds >= _LEAST_BUSY_S else 0.0
            cpu_s = None
            if steps and self._cpu_s:
                cpu_s = (self._cpu_s_of(pserver) - self._cpu_s[index]) / steps
            found.append(Link(pserver.address, rate, cpu_s, index in self._memory.pservers))
        return found

    def _cpu_s_of(self, pserver: Pserver) -> float:
        status = pserver.call("Status", pb.StatusRequest(incarnation=self._incarnation), _STATUS_TIMEOUT_S)
        return float(status.cpu_s)
