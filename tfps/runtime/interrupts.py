"""Handles Ctrl-C during operations that all ranks do together."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from tfps.errors import InterruptError, TfpsError
from tfps.exchange.interface import Exchange
from tfps.graph.tf_private import stopped

_TICK_S = 0.2


def wait(done: threading.Event, timeout_s: float = float("inf")) -> bool:
    """Waits until `done` is set; returns False on timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not done.wait(max(min(_TICK_S, deadline_s - time.monotonic()), 0.0)):
        if stopped():
            raise KeyboardInterrupt
        if time.monotonic() >= deadline_s:
            return False
    return True


@contextlib.contextmanager
def indivisible(exchange: Exchange, what: str) -> Iterator[None]:
    """Marks a block in which this rank does `what` with the others; no rank can skip or repeat it alone.

    If the block is interrupted (Ctrl-C), it is unknown which ranks got its values, and to which of their next values
    those of a retry would be added: the job fails on all ranks. A single worker continues.
    """
    try:
        yield
    except TfpsError:
        raise
    except BaseException as error:
        if exchange.view.workers > 1:
            how = "interrupted (Ctrl-C)" if isinstance(error, KeyboardInterrupt) else f"stopped by {error!r}"
            exchange.fail(
                InterruptError(
                    f"rank {exchange.rank} was {how} in the middle of an exchange with the other ranks ({what}); they "
                    "cannot know any more which values belong together: close() the strategy on every rank (or restart "
                    "the notebooks) and go on from a checkpoint with a new one"
                )
            )
        raise
