"""How a worker that is late lets the others go on (`Config.quorum`, Decoupled DiLoCo, https://arxiv.org/abs/2604.21428).

Once a quorum has pushed its part of an exchange, pservers tell the others (AWAITED). One that has not pushed `grace_s`
later takes part with nothing, and keeps aside what comes back. When it is due by its own steps, it pushes its whole
change, which counts in the exchange under way, and goes on from the result. Each rank decides for itself, and for all
buckets of a fragment, so nobody has to agree on who is in an exchange; and all ranks have taken part in all of them.

Tested in tests/worker/test_quorum.py and tests/integration/test_quorum.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tfps.errors import TfpsError
from tfps.exchange.interface import Exchange, Reply
from tfps.exchange.rules import Floats, flushed


class Latecomer:
    """What this worker has let the others do without it, for one outer optimizer; any thread."""

    def __init__(
        self,
        exchange: Exchange,
        grace_s: float,
        fragments: int,
        settled: Callable[[int], bool],  # waits until a fragment's last exchange is over; False: it has failed
        base: Callable[[int], Floats | None],  # a bucket's parameters here, flat, if replies are changes of them
    ) -> None:
        self._exchange, self._grace_s, self._settled, self._base = exchange, grace_s, settled, base
        self._changed = threading.Condition()  # guards all below
        self._asked: set[tuple[int, int]] = set()  # fragments and steps for which a timer runs
        self._meeting = False
        self._under_way: Counter[int] = Counter()  # replies that are to come, by bucket
        self._latest: dict[int, Floats] = {}  # the parameters that the others have, by bucket
        self._changes: frozenset[int] = frozenset()  # buckets whose replies are changes
        self.skipped = [0] * fragments  # exchanges of each

    def note_awaited(self, fragment: int, buckets: Sequence[int], step: int) -> None:
        """Notes that a quorum waits for `step` of the buckets of a fragment."""
        with self._changed:
            if (fragment, step) in self._asked:
                return
            self._asked.add((fragment, step))
        timer = threading.Timer(self._grace_s, self._skip, [fragment, buckets, step])
        timer.name, timer.daemon = "tfps-late", True
        timer.start()

    def _skip(self, fragment: int, buckets: Sequence[int], step: int) -> None:
        if not self._settled(fragment):
            return
        try:
            bases = {bucket: self._base(bucket) for bucket in buckets}
            with self._changed:
                self._changed.wait_for(lambda: not self._meeting)  # who meets others takes part in all that they begin
                self._asked.discard((fragment, step))
                if not self._exchange.skip(buckets, step, self._take):
                    return
                self.skipped[fragment] += 1
                self._under_way.update(buckets)
                for bucket, base in bases.items():
                    if base is not None and bucket not in self._latest:
                        self._latest[bucket], self._changes = base, self._changes | {bucket}
        except Exception as error:  # others may not wait forever
            self._exchange.fail(TfpsError(f"rank {self._exchange.rank} could not let others go on: {error!r}"))

    def _take(self, bucket: int, reply: Reply) -> None:
        with self._changed:
            if reply.error is None:
                values = np.asarray(reply.sum).view(np.float32)
                if bucket in self._changes:
                    with flushed(), np.errstate(all="ignore"):
                        self._latest[bucket] += values
                else:
                    self._latest[bucket] = values
            self._under_way[bucket] -= 1
            self._changed.notify_all()

    def latest(self, bucket: int) -> Floats | None:
        """The parameters that the others have and this worker has not; it has them from now on."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way[bucket])
            return self._latest.pop(bucket, None)

    @property
    def busy(self) -> bool:
        """Whether an exchange that others make without this worker is under way."""
        with self._changed:
            return any(self._under_way.values())

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """In the block this worker takes part in all exchanges."""
        with self._changed:
            self._meeting = True
        try:
            yield
        finally:
            with self._changed:
                self._meeting = False
                self._changed.notify_all()
