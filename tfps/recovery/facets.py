"""The `Info`, `State` and `Peers` of an `ElasticExchange`: they ask the worker that there is now.

Tested in tests/worker/test_lost_pservers.py and tests/worker/test_latest.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from tfps.exchange.codecs import Floats
from tfps.exchange.interface import Link, OnReply, Payload, as_bytes, declared
from tfps.recovery.core import Core
from tfps.recovery.journal import Push, Write
from tfps.recovery.pushing import Pushing
from tfps.types import Array
from tfps.worker.worker import Worker

_KNOWN = 8  # more than other ranks draw while an answer is on its way
_MOST_COUNTERS = 8  # of which numbers are known; an epoch has one


class ElasticInfo:
    """See `Info`."""

    embedded = one_host = False  # a worker that joins may be on another host

    def __init__(self, core: Core) -> None:
        self._core = core

    @property
    def run(self) -> str:
        return self._core.worker.info.run

    @property
    def slice_bytes(self) -> int:
        return self._core.worker.info.slice_bytes

    @property
    def window_bytes(self) -> int:
        return self._core.worker.info.window_bytes

    def owners(self, bucket: int) -> list[int]:
        return self._core.worker.info.owners(bucket)

    def progress(self, bucket: int) -> float:
        return self._core.worker.info.progress(bucket)

    def links(self) -> list[Link]:
        return self._core.call(lambda worker: worker.info.links())


class ElasticState:
    """See `State`."""

    def __init__(self, core: Core, pushing: Pushing) -> None:
        self._core, self._pushing = core, pushing

    def write(self, bucket: int, array: int, begin: int, values: Payload) -> None:
        target = declared(self._core.buckets, bucket)
        with target.lock:
            if (journal := self._core.journal(target)) is not None:  # it goes with the next push
                journal.write(Write(array, begin, bytes(as_bytes(values) or b"")))
                return
        self._core.call(lambda worker: worker.state.write(bucket, array, begin, values))

    def read(self, bucket: int, array: int, begin: int, nbytes: int) -> Array:
        declared(self._core.buckets, bucket)

        def read(worker: Worker) -> Array:
            self._core.check_there(bucket)
            return worker.state.read(bucket, array, begin, nbytes)

        return self._core.call(read)

    def steps(self, bucket: int) -> int:
        return self._core.worker.state.steps(bucket)

    def collect_residual(self, bucket: int, on_reply: OnReply) -> None:
        self._pushing.put(bucket, Push(None, on_reply, collects=True))

    def set_residual(self, bucket: int, values: Floats) -> None:
        self._core.call(lambda worker: worker.state.set_residual(bucket, values))


class ElasticPeers:
    """See `Peers`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._drawn: dict[str, deque[int]] = {}  # by counter, the last numbers

    @property
    def on_awaited(self) -> Callable[[int, int], object]:
        return self._core.worker.peers.on_awaited

    @on_awaited.setter
    def on_awaited(self, call: Callable[[int, int], object]) -> None:
        self._core.worker.peers.on_awaited = call

    def quiesce(self) -> None:
        def quiesce(worker: Worker) -> None:
            worker.peers.quiesce()
            with self._core.changed:
                self._core.check_current(worker)  # else it tells the next ones
                self._core.quiesced = True

        self._core.call(quiesce)

    def fetch_add(self, counter: str) -> int:
        def draw(worker: Worker) -> int:
            number = worker.peers.fetch_add(counter)
            with self._core.changed:
                self._core.check_current(worker)  # else another rank may get it from the next
                self._drawn[counter] = self._drawn.pop(counter, deque(maxlen=_KNOWN))  # last
                self._drawn[counter].append(number)
                if len(self._drawn) > _MOST_COUNTERS:
                    del self._drawn[next(iter(self._drawn))]
            return number

        return self._core.call(draw)

    @property
    def drawn(self) -> Mapping[str, Iterable[int]]:
        """By counter, the last numbers that this rank has drawn."""
        return self._drawn

    def is_awaited(self, bucket: int) -> bool:
        return self._core.call(lambda worker: worker.peers.is_awaited(bucket))

    def extend_deadline(self, bucket: int) -> None:
        self._core.worker.peers.extend_deadline(bucket)

    def tell_compiling(self, now: bool) -> None:
        self._core.worker.peers.tell_compiling(now)
