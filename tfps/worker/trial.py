"""A worker that has joined a job under way, until it takes part: what it exchanges, and the job's buckets.

Tested in tests/worker/test_joiners.py and tests/elastic/test_joined.py.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from tfps.config import Config
from tfps.errors import JoinError, WaitTimeoutError
from tfps.exchange.interface import BATCHES, BucketSpec, OnReply, Payload, Reply, declared
from tfps.protos import tfps_pb2 as pb
from tfps.worker.embedded import EmbeddedExchange


class JobsBuckets:
    """The buckets that the job of `rank` has declared, which this worker finds by what its ranks compare."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._free: defaultdict[str, deque[int]] = defaultdict(deque)  # numbers of buckets, by what ranks compare
        self._known = 0

    def __len__(self) -> int:
        return self._known

    def learn(self, specs: Sequence[BucketSpec]) -> None:
        """Takes all buckets of the job, by number."""
        for number, spec in enumerate(specs[self._known :], self._known):
            self._free[str(spec)].append(number)
        self._known = len(specs)

    def skip(self, buckets: int) -> None:
        """Notes so many new buckets of the job, which this worker has declared with the others."""
        self._known += buckets

    def find(self, specs: Sequence[BucketSpec]) -> list[int] | None:
        """The numbers of buckets that the job has declared; None if it has declared none of them yet.

        JoinError: it has declared some.
        """
        texts = list(map(str, specs))
        missing = [text for text in texts if texts.count(text) > len(self._free[text])]
        if not texts or len(missing) == len(texts):
            return None
        if missing:
            raise JoinError(
                f"rank {self._rank}: a worker that joins must declare what the others have declared, together: they "
                f"have not declared {missing[0]}"
            )
        return [self._free[text].popleft() for text in texts]


class Trial:
    """What a worker that joins pushes and looks up, with nobody; it takes the place of `Pushes`.

    Whatever it exchanges comes back unchanged, as if it trained alone: it can trace its steps and declare its buckets
    while the others go on. `declared` asks a pserver by its place.
    """

    def __init__(self, config: Config, rank: int, pservers: int, declared: Callable[[int], pb.DeclaredReply]) -> None:
        self.buckets = JobsBuckets(rank)
        self.tries_out = False  # whether it takes a step of training for itself, to trace it
        self.others: Sequence[int] = ()  # who took part before
        self.admitted = threading.Event()
        self._alone = EmbeddedExchange(config, rank=rank)
        self.tables = self._alone.tables
        self._rank, self._declared, self._pservers = rank, declared, pservers
        self._ahead = config.staging_depth + 1
        self._admitted: set[int] = set()  # the pservers that have told

    def lines(self) -> Sequence[str]:
        """What every worker that joins needs to know."""
        return list(self._declared(0).lines)

    def replies(self) -> list[pb.DeclaredReply]:
        """What all pservers know of the job."""
        return [self._declared(index) for index in range(self._pservers)]

    def others_train(self) -> bool:
        """Whether the others have taken a step of a training, and so declared all that they need for it."""
        told = self.replies()
        # Eager steps have occasional buckets only, but batches that have been agreed on: some of them ahead.
        least = [self._ahead if [*each.names] == [BATCHES] else 2**63 * each.occasional for each in told[0].buckets]
        return any(step > most for reply in told for step, most in zip(reply.steps, least, strict=False))

    def learn(self, specs: Sequence[BucketSpec]) -> None:
        """Takes all buckets of the job, by number."""
        new = specs[len(self._alone.specs) :]
        self._alone.declare([replace(spec, update=None) for spec in new])
        self.buckets.learn(specs)

    def push(self, bucket: int, payload: Payload | None, on_reply: OnReply, step_scalars: bytes = b"") -> None:
        """Gives back what is pushed, also to who waits for parameters: all that it has will be replaced."""
        spec = declared(self._alone.specs, bucket)
        if spec.kind == "sum" and not spec.occasional and not self.tries_out:
            text = "a worker can join a job under way in model.fit only, whose position in the data it then takes over"
            on_reply(Reply(error=JoinError(f"rank {self._rank}: {text}")))
            return
        self._alone.push(bucket, payload, on_reply)

    def notify_admitted(self, pserver: int, others: Sequence[int]) -> None:
        """Notes that a pserver lets it take part, and the ranks of those who took part before."""
        self._admitted.add(pserver)
        if pserver == 0:
            self.others = others
        if len(self._admitted) == self._pservers:
            self.admitted.set()

    def overdue(self, limit_s: float) -> WaitTimeoutError:
        """The error of having waited so long."""
        return WaitTimeoutError(
            f"rank {self._rank}: the other workers have come to no place in a training where it could join "
            f"within {limit_s:.3g} s; TFPS_REJOIN_TIMEOUT_S (rejoin_timeout_s) sets how long it waits"
        )
