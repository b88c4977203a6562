"""What a lost worker's last pushes counted for: which slices of which gradients have them.

Tested in tests/worker/test_lost_workers.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tfps.worker.bucket import Push, PushedBucket

logger = logging.getLogger("tfps")
_SETTLED_S = 1.0  # without news all buckets of the step have come


@dataclass(frozen=True, slots=True)
class Loss:
    """The first step of a bucket that lacks a lost rank's push, or parts of it."""

    rank: int
    bucket: str
    step: int
    slices: Sequence[int]  # that lack it
    missing_bytes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Lacking:
    """What the first step without a lost rank, or without parts of it, lacks."""

    rank: int
    step: int
    slices: Mapping[str, Sequence[int]]  # by bucket
    counted: float  # the part of the rank's gradients that had come

    @classmethod
    def of(cls, rank: int, losses: Sequence[Loss]) -> Lacking:
        """Of the losses of `rank`, at least one, one of each bucket."""
        # Buckets that its last step had already sent in full lack it one step later.
        step = min(loss.step for loss in losses)
        first = [loss for loss in losses if loss.step == step]
        missing, total = sum(loss.missing_bytes for loss in first), sum(loss.nbytes for loss in losses)
        return cls(rank, step, {loss.bucket: loss.slices for loss in first}, 1 - missing / total if total else 1)

    def __str__(self) -> str:
        return (
            f"step {self.step} is the first that lacks pushes of rank {self.rank}; what it had pushed of it counted "
            f"for {100 * self.counted:.0f} %"
        )


@dataclass
class Losses:
    """Notes and logs each lost rank's last step; any thread."""

    found: list[Loss] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # guards all
    _known: set[tuple[int, str]] = field(default_factory=set)
    _absent: set[int] = field(default_factory=set)  # since before this worker came
    _logged: int = 0  # of `found`
    _news_s: float = 0.0

    def note(self, bucket: PushedBucket, push: Push) -> None:
        """Notes whose pushes the reply to `push` lacks, if earlier replies had them."""
        with self._lock:
            for rank, slices in push.without.items():
                if rank in self._absent or (rank, bucket.spec.name) in self._known:
                    continue
                self._known.add((rank, bucket.spec.name))
                missing = sum(bucket.cutting.slices[index].nbytes for index in slices)
                loss = Loss(rank, bucket.spec.name, push.step, tuple(sorted(slices)), missing, bucket.spec.nbytes)
                self.found.append(loss)
                self._news_s = time.monotonic()

    def skip(self, ranks: Iterable[int]) -> None:
        """`ranks` took no part when this worker came, so they are no news to it."""
        with self._lock:
            self._absent.update(ranks)

    def forget(self, rank: int) -> None:
        """`rank` takes part again: notes its next loss."""
        with self._lock:
            self._absent.discard(rank)
            self._known = {(each, bucket) for each, bucket in self._known if each != rank}

    def lacking(self, rank: int, first: int) -> Lacking | None:
        """What the first step without `rank` lacks, by what has been found from number `first` on."""
        own: dict[str, Loss] = {}
        for loss in list(self.found)[first:]:
            if loss.rank == rank:
                own.setdefault(loss.bucket, loss)  # later ones are of another loss
        return Lacking.of(rank, list(own.values())) if own else None

    def log(self) -> None:
        """Logs what is new, once all of a step has come."""
        with self._lock:
            new = self.found[self._logged :]
            if not new or time.monotonic() - self._news_s < _SETTLED_S:
                return
            self._logged = len(self.found)
        for rank in sorted({loss.rank for loss in new}):
            logger.warning("tfps: %s", Lacking.of(rank, [loss for loss in new if loss.rank == rank]))
