"""SIGTERM, the notice of a host that is about to be taken away: this worker ends its update and leaves; no row is lost.

Installed where the others go on without it (`Config.min_workers`) and the program handles SIGTERM in no way of its own.

Tested in tests/elastic/test_lost.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time

from tfps.input.batch_agreement import BatchAgreement
from tfps.runtime.runtime import Runtime

logger = logging.getLogger("tfps")
REASON = "SIGTERM"
BETWEEN_UPDATES_S = 20.0  # then it leaves anyway: it does not train, or accumulates for long, and the host goes
SETTLE_S = 10.0  # for what its last step has sent


def leave_on_sigterm(runtime: Runtime, agreement: BatchAgreement | None) -> None:
    """Leaves the job of `runtime` at SIGTERM, and ends the process as SIGTERM does by default."""

    def notice(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the next one ends the process at once
        threading.Thread(target=leave, name="tfps-preemption", daemon=True).start()

    def leave() -> None:
        logger.warning("tfps: SIGTERM: this worker ends its step and leaves the job")
        if agreement is not None and not agreement.stop_after_update().wait(BETWEEN_UPDATES_S):
            logger.warning(
                "tfps: this worker has not ended an update within %.0f s, and leaves: what it has not sent is lost",
                BETWEEN_UPDATES_S,
            )
        runtime.settle(SETTLE_S)
        runtime.exchange.close(REASON)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
        os._exit(128 + signal.SIGTERM)  # process 1 of a container: a signal without a handler does not end it

    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, notice)
        runtime.before_close.append(lambda: _restore(notice))


def _restore(handler: object) -> None:
    with contextlib.suppress(ValueError):  # not the main thread: the process ends
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
