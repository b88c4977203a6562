"""The pushes of a worker: its buckets, how slices and rows go to their pservers, and the end of all that.

Tested in tests/worker/test_worker.py, tests/worker/test_worker_ends.py and tests/worker/test_tables.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from tfps.config import Config
from tfps.errors import ProtocolError, PserverLostError
from tfps.exchange import interface
from tfps.exchange.interface import BucketSpec, FailureState, OnReply, Payload, Reply, as_bytes
from tfps.exchange.kinds import ByKind
from tfps.exchange.layout import Cutting, Placer
from tfps.membership.view import View
from tfps.wire.frames import Header, Kind, encode, pack_counts
from tfps.wire.send_queue import Outgoing, SendQueue
from tfps.wire.shared_memory import Sharing
from tfps.worker.bucket import Failed, Push, PushedBucket
from tfps.worker.table_bucket import TableBucket

# How the bucket of a declaration is made.
_MADE = ByKind(sum=PushedBucket.new, gather=PushedBucket.new, table=TableBucket.new)


class Pushes:
    """A worker's buckets and what is under way; any thread. `encoding_failed`: see `Encoding`."""

    def __init__(
        self,
        config: Config,
        failures: FailureState,
        queues: Sequence[SendQueue],
        memory: Sharing,
        encoding_failed: Failed,
    ) -> None:
        self.buckets: list[PushedBucket] = []
        self.step = 0  # for messages
        self.on_stable: Callable[[Sequence[int]], object] = lambda counts: None
        self._config, self._failures, self._queues, self._memory = config, failures, queues, memory
        self._encoding_failed = encoding_failed

    def specs(self) -> list[BucketSpec]:
        """Of all buckets, by number."""
        return [bucket.spec for bucket in list(self.buckets)]

    def declared(self, specs: Sequence[BucketSpec], placer: Placer, view: View) -> list[int]:
        """Has new buckets; returns their numbers."""
        first, size = len(self.buckets), self._config.first_slice_bytes
        for spec in specs:
            bucket = _MADE[spec.kind](spec, size, placer, view)
            bucket.before = {} if self._config.outlives_pservers else None
            if spec.replaces is not None:
                bucket.steps = self.buckets[spec.replaces].steps
            self.buckets.append(bucket)
        return list(range(first, len(self.buckets)))

    # Buckets of variables

    def push(self, bucket: int, payload: Payload | None, on_reply: OnReply, step_scalars: bytes = b"") -> None:
        self.put(bucket, Push(as_bytes(payload), on_reply, step_scalars=step_scalars))

    def put(self, bucket: int, push: Push) -> None:
        """Begins `push` when those before it have been answered."""
        target = interface.declared(self.buckets, bucket)
        interface.check_payload(target.spec, push.payload)
        with target.lock:
            # Under the lock: either this sees a failure, or the failure sees this push.
            if (end := self._failures.end) is None:
                target.waiting.append(push)
                self.start_next(bucket, target)
        if end is not None:
            push.on_reply(Reply(error=end))

    def give_back(self, bucket: int) -> None:
        """Gives memory back that was kept for the next push of `bucket`: there may be none."""
        if self._memory.arena is not None:
            self._memory.arena.give_back(self.buckets[bucket].spec.nbytes)

    def tell_received(self, counts: Sequence[int]) -> None:
        """Tells how many results of each bucket this worker has; `on_stable` is called with what all have."""
        self._queues[0].put_urgent(encode(Header(Kind.RECEIVED), pack_counts(counts)))

    def redeliver(self, bucket: int, donor: int, result: Payload | None, on_reply: OnReply) -> None:
        """Takes a step of `bucket` in which `donor` gives the `result` of a round to those that lack it.

        The reply is a PserverLostError on all ranks if `donor` was lost before it had given all.
        """
        spec = self.buckets[bucket].spec

        def take(reply: Reply) -> None:
            if reply.error is None and (donor in push.without or donor not in reply.ranks):
                text = f"rank {donor} was lost while it gave others the last result of '{spec.name}'"
                reply = Reply(error=PserverLostError(text))
            on_reply(reply)

        push = Push(as_bytes(result), take, uncoded=spec.codec is not None)
        self.put(bucket, push)

    def skip(self, buckets: Collection[int], step: int, on_reply: Callable[[int, Reply], None]) -> bool:
        targets = [(number, interface.declared(self.buckets, number)) for number in sorted(buckets)]
        with contextlib.ExitStack() as locks:
            for _, target in targets:
                locks.enter_context(target.lock)
            if self._failures.end or any(target.steps != step or target.waiting for _, target in targets):
                return False
            for number, target in targets:
                target.waiting.append(Push(None, functools.partial(on_reply, number)))
                self.start_next(number, target)
        return True

    def start_next(self, number: int, bucket: PushedBucket) -> None:
        """Sends the oldest waiting push if none is outstanding. Caller holds the bucket's lock."""
        if (push := bucket.start_next()) is None:
            return
        self.step = max(self.step, push.step)
        shards: list[list[Outgoing]] = [[] for _ in self._queues]
        size = self._config.first_slice_bytes
        for owner, item in bucket.frames(number, push, size, self._memory, self._encoding_failed):
            shards[owner].append(item)
        header = Header(Kind.SCALARS, bucket=number, step=push.step)
        scalars = push.step_scalars and encode(header, push.step_scalars)
        for queue, items in zip(self._queues, shards, strict=True):
            if items and scalars:
                queue.put_urgent(scalars)
            if items:
                queue.put(items)

    def take_residual(self, number: int, old: Pushes, step: int) -> None:
        """Goes on with a bucket's residual of `old`, as it was before it pushed `step`, which it pushes again."""
        ours, theirs = self.buckets[number], old.buckets[number]
        if ours.residual is not None and theirs.residual is not None:
            ours.residual[...] = (theirs.before or {}).get(step, theirs.residual)

    def cut_anew(self, cuttings: Mapping[int, Cutting], *, at_once: bool) -> None:
        """Buckets are cut anew from a step on; one that has begun it stays, or (`at_once`) is cut now."""
        for number, cutting in cuttings.items():
            bucket = self.buckets[number]
            with bucket.lock:
                if bucket.steps <= cutting.step:
                    bucket.next[cutting.step] = cutting
                elif at_once:
                    bucket.cutting = cutting

    # Tables

    def table(self, number: int) -> TableBucket:
        if not isinstance(target := interface.declared(self.buckets, number), TableBucket):
            raise ProtocolError(f"bucket '{target.spec.name}' is no table")
        return target

    def send(self, frames: Iterable[tuple[int, Outgoing]]) -> None:
        """Sends frames of a table, each to its pserver."""
        for pserver, item in frames:
            self._queues[pserver].put([item])

    # The end

    def end(self) -> None:
        """Answers all pending pushes with the reason why the exchange has ended."""
        error = self._failures.end
        for bucket in list(self.buckets):
            with bucket.lock:
                pushes = [push for push in (bucket.current, *bucket.waiting) if push is not None]
                bucket.current = None
                bucket.waiting.clear()
            for push in pushes:
                push.on_reply(Reply(error=error))
