"""What an `ElasticWorker` asks the `Worker` that there is now.

Tested in tests/worker/test_lost_pservers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfps.exchange.interface import Captures, Reply
from tfps.membership.view import View
from tfps.worker.worker import Worker


class CurrentWorker:
    """Passes on what needs nothing but `_worker`; parts of `Exchange`, `Info`, `State`, `Peers` and `Joining`."""

    embedded = False
    _worker: Worker

    @property
    def rank(self) -> int:
        return self._worker.rank

    @property
    def view(self) -> View:
        return self._worker.view

    @property
    def captures(self) -> Captures:
        return self._worker.captures

    @property
    def run(self) -> str:
        return self._worker.run

    @property
    def slice_bytes(self) -> int:
        return self._worker.slice_bytes

    @property
    def window_bytes(self) -> int:
        return self._worker.window_bytes

    def owners(self, bucket: int) -> list[int]:
        return self._worker.owners(bucket)

    def progress(self, bucket: int) -> float:
        return self._worker.progress(bucket)

    def steps(self, bucket: int) -> int:
        return self._worker.steps(bucket)

    @property
    def on_awaited(self) -> Callable[[int, int], object]:
        return self._worker.peers.on_awaited

    @on_awaited.setter
    def on_awaited(self, call: Callable[[int, int], object]) -> None:
        self._worker.peers.on_awaited = call

    def extend_deadline(self, bucket: int) -> None:
        self._worker.peers.extend_deadline(bucket)

    def skip(self, buckets: Sequence[int], step: int, on_reply: Callable[[int, Reply], None]) -> bool:
        return self._worker.skip(buckets, step, on_reply)

    @property
    def least(self) -> int:
        return self._worker.least

    @property
    def told(self) -> bool:
        return self._worker.told

    @told.setter
    def told(self, value: bool) -> None:
        self._worker.told = value

    @property
    def candidate(self) -> bool:
        return self._worker.candidate
