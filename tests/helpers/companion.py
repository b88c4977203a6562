"""A second rank without TensorFlow, so that a test decides when a bucket's sum is complete.

The strategy under test is rank 0 of two; the companion is rank 1. It declares what the strategy declares and
contributes nothing (an empty push) to each bucket, at once or, for held buckets, when the test says so. Nothing is
faked: both talk to real pservers, and the strategy's sums are exactly its own gradients.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from jobs import DEADLINE_S

import tfps
from tfps.errors import TfpsError
from tfps.exchange.interface import BucketSpec, Exchange, OnReply, Reply
from tfps.pserver.server import ParameterServer
from tfps.types import Array, Value
from tfps.worker.worker import Worker

# What a strategy's constructor exchanges.
SPEC = BucketSpec(("random states",), "gather", 0, "uint8", 0, occasional=True, alike=("random states",))


class Companion:
    """Rank 1. `holds(spec)` says for which buckets it waits for `release`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._declare_thread = ThreadPoolExecutor(1)
        self._lock = threading.Lock()  # guards _held; whoever asks `holds` has it, so that `release` misses none
        self._held: list[int] = []
        self._has_held = threading.Event()
        self.specs: list[BucketSpec] = [SPEC]
        self.batches: int | None = None  # of each of its iterators
        self.announced = 0  # how often rank 0 has announced one
        self.holds: Callable[[BucketSpec], bool] = lambda spec: False

    def of_batches(self, said: Array) -> Array:
        """What this rank announces of its next batch where rank 0 has said `said`: the same, up to `batches`."""
        self.announced += 1
        own = said.copy()
        if self.batches is not None and own[1] & 0xFFFFFFFF >= self.batches:
            own[0] = 0
        return own

    def follow(self, exchange: Exchange) -> None:
        """Does from now on what `exchange`, rank 0's, does."""
        declare, push = exchange.declare, exchange.push

        def declare_both(
            specs: Sequence[BucketSpec], details: Sequence[str] = (), stop: threading.Event | None = None
        ) -> list[int]:
            mine = self._declare_thread.submit(self._worker.declare, specs, details)
            ids = declare(specs, details, stop)
            assert mine.result(DEADLINE_S) == ids
            self.specs.extend(specs)
            return ids

        def push_both(bucket: int, payload: Value, on_reply: OnReply, step_scalars: bytes = b"") -> None:
            push(bucket, payload, on_reply, step_scalars)
            with self._lock:
                if held := self.holds(self.specs[bucket]):
                    self._held.append(bucket)
            if held:
                self._has_held.set()
            elif self.specs[bucket].name == "batches":
                self._worker.push(bucket, self.of_batches(np.frombuffer(payload, np.int64)), _ignore)
            else:
                self._worker.push(bucket, None, _ignore)

        setattr(exchange, "declare", declare_both)  # noqa: B010
        setattr(exchange, "push", push_both)  # noqa: B010

    def wait_held(self) -> bool:
        """Waits until rank 0 has pushed a held bucket."""
        return bool(self._has_held.wait(DEADLINE_S))

    def release(self) -> int:
        """Contributes to the held buckets and holds none any more; returns how many were held."""
        with self._lock:
            self.holds = lambda spec: False
            held, self._held = self._held, []
        for bucket in held:
            self._worker.push(bucket, None, _ignore)
        return len(held)

    def fail(self, error: TfpsError) -> None:
        """Ends the job of both."""
        self._worker.fail(error)

    def close(self) -> None:
        self._worker.close()
        self._declare_thread.shutdown()


def wait_until(truth: Callable[[], object], deadline_s: float = DEADLINE_S) -> bool:
    """Polls `truth` until a deadline; whether it came true."""
    poll = threading.Event()
    for _ in range(int(deadline_s * 200)):
        if truth():
            return True
        poll.wait(0.005)
    return False


def passes_while_held(
    other: Companion, train: Callable[[], object], passes: list[int], last_layer: int
) -> tuple[bool, int, int, bool]:
    """Runs `train`, two steps that note forward passes of layers in `passes`, and holds the reply of the last layer.

    Returns whether the second forward pass of the layer before it ran meanwhile, how many of the last one had, how many
    replies were held, and whether training ended after that.
    """
    last = max(other.specs, key=lambda spec: spec.priority)
    assert last.priority == last_layer
    other.holds = lambda spec: spec is last
    passes.clear()
    trainer = threading.Thread(target=train)
    trainer.start()
    ahead = wait_until(lambda: passes.count(last_layer - 1) == 2)
    behind = passes.count(last_layer)
    assert other.wait_held()
    released = other.release()
    trainer.join(DEADLINE_S)
    return ahead, behind, released, not trainer.is_alive()


def _joined(addresses: Sequence[str], config: tfps.Config) -> Worker:
    """Rank 1, which has taken part in what a strategy's constructor exchanges."""
    worker = Worker(addresses, rank=1, workers=2, config=config)
    (bucket,) = worker.declare([SPEC])
    worker.push(bucket, None, _ignore)
    return worker


def _ignore(reply: Reply) -> None:
    pass


@contextmanager
def strategy_with_companion(
    monkeypatch: pytest.MonkeyPatch, config: tfps.Config, pservers: int = 2, check_every: int = 0
) -> Iterator[tuple[tfps.Strategy, Companion]]:
    """A strategy, rank 0 of two, and its companion, on real pservers of this process."""
    config = dataclasses.replace(config, check_every=check_every)  # who contributes nothing has nothing to compare
    servers = [ParameterServer("127.0.0.1", 0, workers=2) for _ in range(pservers)]
    addresses = [server.address for server in servers]
    monkeypatch.setenv("TFPS_RANK", "0")
    monkeypatch.setenv("TFPS_WORKERS", "2")
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(_joined, addresses, config)
        strategy = tfps.Strategy(addresses, config=config)
        companion = Companion(joining.result(DEADLINE_S))
    companion.follow(strategy._runtime.exchange)
    try:
        yield strategy, companion
    finally:
        companion.release()
        strategy.close()
        companion.close()
        for server in servers:
            server.stop()
