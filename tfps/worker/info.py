"""What there is to know about a worker, and what lasts of its buckets: its `Info` and its `State`.

Tested in tests/worker/test_worker.py and tests/worker/test_compression.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from tfps.config import Config
from tfps.exchange import interface
from tfps.exchange.codecs import Floats
from tfps.exchange.interface import Link, OnReply, Reply
from tfps.trace.capture import Setting
from tfps.wire.control import Pserver
from tfps.wire.send_queue import SendQueue
from tfps.wire.shared_memory import Sharing
from tfps.worker.bucket import Push, PushedBucket
from tfps.worker.client import PserverClient
from tfps.worker.pushes import Pushes

_STATUS_TIMEOUT_S = 30.0


class WorkerInfo:
    """See `Info`."""

    embedded = False

    def __init__(
        self,
        config: Config,
        client: PserverClient,
        buckets: Sequence[PushedBucket],
        pservers: Sequence[Pserver],
        queues: Sequence[SendQueue],
        memory: Sharing,
    ) -> None:
        self._config, self._client, self._buckets = config, client, buckets
        self._pservers, self._queues, self._memory = pservers, queues, memory
        self._cpu_s: list[float] = []  # of each pserver, when training began
        self.slice_bytes, self.window_bytes = config.first_slice_bytes, config.first_window_bytes

    @functools.cached_property
    def one_host(self) -> bool:
        """Asks the pservers, all of which say the same to all ranks once every worker has joined."""
        return len(self._memory.pservers) == len(self._pservers) and all(
            member.shared_memory for members in self._client.members(_STATUS_TIMEOUT_S) for member in members
        )

    @property
    def run(self) -> str:
        return self._client.membership.run

    def begin(self, *, anew: bool = False) -> None:
        """Training begins, maybe `anew`: CPU times count from now on."""
        if anew or not self._cpu_s:
            self._cpu_s = [cpu_s for cpu_s, _ in self._client.loads()]

    def owners(self, bucket: int) -> list[int]:
        return list(self._buckets[bucket].cutting.owners)

    def progress(self, bucket: int) -> float:
        target = self._buckets[bucket]
        with target.lock:
            push = target.current
            return 1.0 if push is None else len(push.copied) / max(len(target.cutting.slices), 1)

    def links(self) -> list[Link]:
        steps = max((bucket.steps for bucket in list(self._buckets)), default=0)
        now = self._client.loads() if steps and self._cpu_s else []
        found = []
        for index, (pserver, queue) in enumerate(zip(self._pservers, self._queues, strict=True)):
            cpu_s, late_s = ((now[index][0] - self._cpu_s[index]) / steps, now[index][1]) if now else (None, {})
            rate, shared = queue.throughput.bytes_per_s, index in self._memory.pservers
            found.append(Link(pserver.address, rate, cpu_s, shared, late_s))
        return found

    def settings(self) -> dict[str, Setting]:
        """For captures."""
        sizes: dict[str, Setting] = {"slice_bytes": self.slice_bytes, "window_bytes": self.window_bytes}
        return sizes | {"policy": self._config.policy, "compression": str(self._config.compression)}


class WorkerState:
    """See `State`."""

    def __init__(self, pushes: Pushes, client: PserverClient, is_chief: Callable[[], bool]) -> None:
        self._pushes, self._client, self._is_chief = pushes, client, is_chief
        self.write, self.read = client.write, client.read

    def steps(self, bucket: int) -> int:
        return self._pushes.buckets[bucket].steps

    def collect_residual(self, bucket: int, on_reply: OnReply) -> None:
        def take(reply: Reply) -> None:
            if reply.error is None:
                self.set_residual(bucket, np.asarray(reply.sum).view(np.float32))
            on_reply(reply)

        residual = interface.declared(self._pushes.buckets, bucket).uncoded_residual
        self._pushes.put(bucket, Push(residual, take, uncoded=True))

    def set_residual(self, bucket: int, values: Floats) -> None:
        if (residual := self._pushes.buckets[bucket].residual) is not None:
            residual[...] = values if self._is_chief() else 0
