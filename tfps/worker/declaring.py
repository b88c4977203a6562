"""Declares buckets atomically: on all pservers once all ranks declare them, else nowhere.

Tested in tests/runtime/test_interrupts.py and tests/worker/test_worker_starts.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

from tfps.compression import NONE
from tfps.errors import InterruptError, WaitTimeoutError
from tfps.exchange.interface import BucketSpec
from tfps.protos import tfps_pb2 as pb
from tfps.wire.control import Pserver
from tfps.worker.membership import Membership
from tfps.worker.patience import Blame, saying

_LOOK_S = 1.0  # interval at which a wait for other ranks checks whether to stop
_ANSWER_MARGIN_S = 10.0  # by how much a call's deadline exceeds the pserver's


class Declarations:
    """Makes a worker's declarations, one after the other."""

    def __init__(self, pservers: Sequence[Pserver], blame: Blame, membership: Membership) -> None:
        self._pservers, self._blame, self._membership = pservers, blame, membership
        self._number = 0  # of the next declaration

    def declare(
        self,
        specs: Sequence[BucketSpec],
        details: Sequence[str],
        timeout_s: float,
        stop: threading.Event | None = None,
    ) -> None:
        """Returns when all ranks have declared the same.

        Raises:
            InterruptError: `stop` was set meanwhile; nothing has been declared.
            MismatchError: the ranks differ.
            WaitTimeoutError: some ranks did not declare in time; the message names them.
            TfpsError: the job has failed.
        """
        request = pb.DeclareRequest(
            incarnation=self._membership.incarnation,
            rank=self._membership.rank,
            number=self._number,
            details=details,
            buckets=[
                pb.Bucket(
                    names=spec.common_names,
                    kind=spec.kind,
                    nbytes=spec.nbytes,
                    dtype=spec.dtype,
                    priority=spec.priority,
                    occasional=spec.occasional,
                    codec=NONE if spec.codec is None else spec.codec.name,
                    update="" if spec.update is None else spec.update.text(),
                )
                for spec in specs
            ],
        )
        for index, pserver in enumerate(self._pservers):
            with saying(partial(self._blame.declaring, pserver, self._number)):
                self._declare(pserver, request, timeout_s, None if index else stop)
        self._number += 1

    def _declare(
        self, pserver: Pserver, request: pb.DeclareRequest, timeout_s: float, stop: threading.Event | None
    ) -> None:
        """Declares on one pserver, in calls of `_LOOK_S`; a call that times out withdraws its declaration.

        Buckets declared by all ranks on the first pserver must be declared on the others, so that wait has no `stop`.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            request.timeout_s = max(min(deadline_s - time.monotonic(), _LOOK_S), 0.0)
            try:
                pserver.call("Declare", request, request.timeout_s + _ANSWER_MARGIN_S)
                return
            except WaitTimeoutError as error:
                if stop is not None and stop.is_set():
                    raise InterruptError(
                        f"rank {self._membership.rank}: interrupted while it waited for other ranks"
                    ) from None
                if time.monotonic() >= deadline_s:
                    name = "step_timeout_s" if request.number else "connect_timeout_s"
                    raise WaitTimeoutError(
                        f"pserver {pserver.address}: after {timeout_s:.3g} s {error}; TFPS_{name.upper()} ({name}) "
                        "sets how long ranks wait for each other"
                    ) from None
