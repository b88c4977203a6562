"""Collects the residuals of compression on all ranks and pservers: one step of each bucket, between two training steps.

Tested in tests/integration/test_compression.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from tfps.errors import WaitTimeoutError
from tfps.exchange.codecs import Floats
from tfps.exchange.interface import OnReply, Reply
from tfps.runtime.interrupts import indivisible, wait
from tfps.runtime.runtime import Runtime


def settle(runtime: Runtime) -> None:
    """Returns once all that was sent has come back.

    Raises:
        WaitTimeoutError: it has not in time.
        TfpsError: the exchange failed.
    """
    if not runtime.settle(runtime.wait_s):
        raise WaitTimeoutError(f"updates under way must end within {runtime.wait_s:.0f} s before a state is collected")
    if (failure := runtime.exchange.failure) is not None:
        raise failure


def collect(runtime: Runtime, buckets: Sequence[int]) -> dict[int, Floats]:
    """Returns the sum of the residuals of each of `buckets`; every rank must call it. See `State.collect_residual`.

    Raises:
        TfpsError: the exchange failed, or another rank did not call it in time.
    """
    what = "what compression holds back"
    replies: dict[int, Reply] = {}
    done = threading.Event()

    def taking(bucket: int) -> OnReply:
        def take(reply: Reply) -> None:
            replies[bucket] = reply
            if len(replies) == len(buckets):
                done.set()

        return take

    with indivisible(runtime.exchange, what):
        for bucket in buckets:
            with runtime._progress:
                runtime._pushed[bucket] += 1  # so that later steps have the numbers of their rounds
            runtime.exchange.state.collect_residual(bucket, taking(bucket))
        deadline_s = time.monotonic() + runtime.wait_s * 2  # the exchange fails earlier and says why
        while not wait(done, runtime.wait_s * 2):
            if time.monotonic() >= deadline_s:
                raise WaitTimeoutError(f"no reply with {what} within {runtime.wait_s * 2:.0f} s")
        for reply in replies.values():
            if reply.error is not None:
                raise reply.error
        return {bucket: np.asarray(reply.sum).view(np.float32) for bucket, reply in replies.items()}
