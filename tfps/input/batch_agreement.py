"""Ends an epoch on all ranks together: a training worker takes batch n once every rank has one.

Each rank announces one step ahead whether it has the next batch; the announcements are summed over all ranks while the
previous step computes. If one rank has no batch, the data ends there for all of them.

Where a job goes on without lost workers, a rank announces a batch only once all that it pushed two steps before has
been answered. So what a worker's death takes with it is the step in flight and the batch after it, no more.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from tfps.collectives import AllGather
from tfps.errors import ClosedError, JoinError, MismatchError, TfpsError, WorkerLostError, to_text
from tfps.exchange.interface import BATCHES, Reply
from tfps.graph import ops as graph_ops
from tfps.graph.rows import UNKNOWN
from tfps.graph.tf_private import has_function, outer_graphs
from tfps.input import batch_digests
from tfps.runtime.runtime import Runtime
from tfps.runtime.transfers import Transfer
from tfps.types import Array, Value

logger = logging.getLogger("tfps")
_NONE, _UNKNOWN, _FAILED = 0, -1, -2  # sent in place of the number of batches left, including this one
CLOSED = graph_ops.CLOSED

# Batch key, or None and the reason; rows summed over all ranks; the ranks that take the batch together, if they do.
Answer = Callable[[int | None, str, int, Sequence[int]], None]


@dataclass(eq=False)
class _Decision:
    """The ranks' joint result for one position: all have a batch, or the reason why not."""

    all_have: bool
    error: str = ""
    warning: str = ""
    rows: int = UNKNOWN  # of the batch, summed over all ranks
    ranks: Sequence[int] = ()  # that take it


@dataclass(eq=False)
class IteratorProgress:
    """How far one iterator is, here and on the other ranks. Any thread may set `closed`; `agreement` guards others."""

    agreement: BatchAgreement
    batches: int | None  # how many there are, if known
    answer: Answer  # called once per request, on any thread
    meets: bool  # the ranks synchronize at the first batch that eager code takes
    knows_end: bool  # the end of the data is known before the next batch is requested
    is_global: bool = False  # each rank has the global batch, and knows its part when the ranks that take it are known
    begin: int = 0  # the first position here: others have taken those before
    closed: bool = False
    place: int | None = None  # index among the iterators in lockstep, the same on all ranks
    asked: int = 0  # number of positions requested
    known: int = 0  # number that exist
    owed: int = 0  # number due for announcement
    held: set[int] = field(default_factory=set)  # positions that wait for answers to pushes of earlier steps
    agreed: int = 0  # announced positions before this one exist on all ranks
    stops: bool = False  # whether some rank has no batch at position `agreed`
    allowed: int | None = None  # batches that may be read so far; None: all
    digests: dict[int, int] = field(default_factory=dict)  # of batches that may still be announced, by position
    digest_of: Callable[[int], int] | None = None  # the digest of a staged batch, by key
    joined: int | None = None  # the first position that somebody takes who has joined; the ranks compare that batch
    end: int | None = None  # the first position without a batch; `error` is the reason
    error: str = ""
    over: bool = False  # END has been answered
    mark: int | None = None  # this worker's exchange count at the last request
    ready: dict[int, int] = field(default_factory=dict)  # keys of staged batches, by position
    rows: dict[int, int] = field(default_factory=dict)  # of batches that may still be announced, by position
    waiting: deque[tuple[int, bool]] = field(default_factory=deque)  # requests: position, whether in lockstep
    decisions: dict[int, _Decision] = field(default_factory=dict)

    def exists(self, position: int, rows: int, digest: int = batch_digests.NOTHING) -> None:
        """Notes that a batch exists at `position`, with `rows` on this rank, and the digest of what all ranks make."""
        with self.agreement.changes(self):
            self.known = position + 1
            self.rows[position] = rows
            if digest != batch_digests.NOTHING:
                self.digests[position] = digest

    def allow(self, batches: int) -> None:
        """Notes that so many more may be read; only these can be announced ahead."""
        with self.agreement.changes(self):
            self.allowed = (self.begin if self.allowed is None else self.allowed) + batches

    def staged(self, position: int, key: int) -> None:
        """Notes that the batch at `position` is ready."""
        with self.agreement.changes(self):
            self.ready[position] = key

    def ended(self, error: str) -> None:
        """Notes that there are no more batches: because of `error`, or ("") at the end of the data."""
        with self.agreement.changes(self):
            self.end, self.error = self.known, error

    def leave(self) -> None:
        """Stops answering requests."""
        with self.agreement.changes(self):
            self.closed = True
            self.answer = lambda key, error, rows, ranks: None

    def close(self) -> None:
        """Tells waiting requests that the strategy is closed, and sends announcements other ranks may wait for."""
        with self.agreement.changes(self):
            self.closed = True
            while self.waiting:
                self.waiting.popleft()
                self.answer(None, CLOSED, UNKNOWN, ())

    def code(self, position: int) -> int | None:
        """Returns what to announce for `position`, None if not known yet."""
        if position < self.known:
            return _UNKNOWN if self.batches is None else max(self.batches - position, 1)
        if self.end is not None:
            return _FAILED if self.error and position == self.end else _NONE
        if self.closed:  # not requested here any more; a counting loop may leave before it sees the end
            return _NONE if self.batches is not None and position >= self.batches else _UNKNOWN
        return None


class BatchAgreement:
    """Coordinates all iterators of one runtime's strategies across several workers."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._rank = runtime.exchange.rank
        # Guards everything below and every IteratorProgress. Reentrant: a failing push calls `fail`.
        self._lock = threading.RLock()
        self._iterators: weakref.WeakValueDictionary[int, IteratorProgress] = weakref.WeakValueDictionary()
        self._owed: deque[tuple[IteratorProgress, int]] = deque()  # in request order, the same on all ranks
        self.places = 0  # of iterators in lockstep so far
        self.admits = False  # whether the program stops between two batches for those who want to join
        self.evaluates = False  # whether it does not just now, as the program evaluates
        self.joiners: frozenset[int] = frozenset()  # who joins, until the first batch that they take is agreed on
        self._pause: tuple[IteratorProgress, int] | None = None  # the last batch that it takes before it does
        self._failure = ""
        self._warned = False
        self.cut_short = False  # whether the data that ended last did so because another rank had no more
        self._announced = threading.Condition(self._lock)  # notified when `_owed` may be empty
        self._stopped: threading.Event | None = None  # set when the program waits for a batch that is not announced
        # By optimizer that accumulates gradients: what counts its batches, and of how many each update is.
        self.accumulating: weakref.WeakKeyDictionary[object, tuple[Value, int]] = weakref.WeakKeyDictionary()
        with tf.init_scope(), tf.device(graph_ops.HOST):
            self.order = tf.queue.FIFOQueue(1, [tf.bool], [[]], name="tfps_order")  # a resource that orders requests
        self.said = AllGather(runtime, BATCHES)
        self.said.later()
        self._eager = Request(self, None)
        runtime.before_close.append(self.close)
        runtime.exchange.add_failure_listener(self.fail)

    def follow(
        self,
        number: int,
        batches: int | None,
        answer: Answer,
        *,
        meets: bool = False,
        knows_end: bool = True,
        is_global: bool = False,
        begin: int = 0,
    ) -> IteratorProgress:
        """Follows the iterator with this unique `number`, negative for a loop inside a function."""
        with self._lock:
            progress = self._iterators[number] = IteratorProgress(
                self, batches, answer, meets, knows_end, is_global, begin
            )
            progress.asked = progress.known = progress.owed = begin
            progress.joined = begin or None
        return progress

    @contextlib.contextmanager
    def changes(self, progress: IteratorProgress) -> Iterator[None]:
        """In the block `progress` may be changed; then requests are answered that now can be."""
        with self._lock:
            try:
                yield
            finally:
                self._advance(progress)

    def request_eagerly(self, number: int) -> None:
        """Requests the next batch of iterator `number`.

        Raises:
            ClosedError: the strategy was closed.
            TfpsError: another rank did not reach its first batch.
        """
        with self._lock:
            progress = self._iterators.get(number)
            meets = progress is not None and progress.meets and progress.asked == progress.begin
        if meets:
            self.said.declare()
        try:
            self._eager.send(tf.constant(number, tf.int64))
        except tf.errors.CancelledError:
            raise ClosedError("the strategy is closed, a batch was asked for") from None

    def request(self, number: int, trains: bool, eager: bool) -> None:
        """Handles a request for the next batch of iterator `number`. Called by the pump thread.

        Ranks run in lockstep if the requesting graph exchanges something, or if anything was exchanged since the last
        request (a training loop that takes batches outside of the graph). Evaluation and prediction exchange nothing
        between batches and use all of them. At an eager loop's first batch its purpose is unknown; ranks run in
        lockstep there too, because a rank without a batch could not follow the others into training.
        """
        with self._lock:
            progress = self._iterators.get(number)
            if progress is None or progress.closed:
                return
            position, progress.asked = progress.asked, progress.asked + 1
            exchanges = self.runtime.exchanges
            # Who joins comes in the middle of others' training: they know what they do with this iterator.
            trains = trains or progress.mark not in (None, exchanges) or 0 < position == progress.begin
            progress.mark = exchanges
            meets = eager and progress.meets and position == progress.begin
            together = trains or meets or position < progress.owed
            if (trains or meets) and not progress.over:
                if progress.place is None:
                    progress.place, self.places = self.places, self.places + 1
                    progress.agreed = position
                if position > progress.owed:  # those between followed steps that exchanged nothing
                    progress.agreed = position
                start = max(progress.owed, position)
                knows_end = progress.knows_end and (progress.allowed is None or position + 1 < progress.allowed)
                progress.owed = position + 1 + (trains and knows_end)
                self._owed.extend((progress, each) for each in range(start, progress.owed))
                if progress.owed > position + 1 and self.runtime.exchange.joining.least:
                    progress.held.add(position + 1)
                    self.runtime.unanswered.then(functools.partial(self._release, progress, position + 1))
            progress.waiting.append((position, together))
            self._advance(progress)
            self._say_if_stopped()

    def _release(self, progress: IteratorProgress, position: int) -> None:
        """All pushes before the request for the batch before `position` have been answered."""
        with self.changes(progress):
            progress.held.discard(position)

    @property
    def taken(self) -> int | None:
        """How many batches have been taken before the program must stop, if it must now."""
        with self._lock:
            if self._pause is None or self._pause[0].asked <= self._pause[1]:
                return None
            return self._pause[1] + 1

    def compare_next(self) -> None:
        """While the program has stopped: the next batch is the first of one who joins, so the ranks compare it."""
        with self._lock:
            if self._pause is not None:
                self._pause[0].joined = self._pause[1] + 1

    def resume(self) -> None:
        """Announces batches again."""
        with self._lock:
            self._pause = None
            for progress in list(self._iterators.values()):
                self._advance(progress)

    def stop_after_update(self) -> threading.Event:
        """Announces no more batches than the update under way takes: one, but where gradients are accumulated.

        The event is set when the program has ended this update, and waits for the next batch.
        """
        with self._lock:
            self._stopped = self._stopped or threading.Event()
            self._say_if_stopped()
            return self._stopped

    def _say_if_stopped(self) -> None:
        if self._stopped is not None and self._waits() and not self._updates():
            self._stopped.set()

    def _waits(self) -> bool:
        """Whether the program waits for a batch that is not announced."""
        return any(position < progress.asked for progress, position in self._owed)

    def _updates(self) -> bool:
        """Whether the program waits for a batch of an update under way, whose gradients are accumulated."""
        counts = list(self.accumulating.values())
        return self._waits() and any(int(counter.numpy()) % every for counter, every in counts)

    def close(self) -> None:
        """Announces what other ranks may wait for, and fails local requests."""
        with self._lock:
            for progress in list(self._iterators.values()):
                progress.closed = True
            self._push_owed()
            self.fail(CLOSED)

    def settle(self, timeout_s: float) -> bool:
        """At the end of an iterator: waits until all that is due is announced; False on timeout. All ranks call it."""
        with self._announced:
            if self._pause is not None:  # on all ranks, so that none of them announces it
                self._owed.clear()
            return self._announced.wait_for(lambda: bool(self._failure) or not self._owed, timeout_s)

    def _decide(self, progress: IteratorProgress, position: int, reply: Reply) -> None:
        """Handles what the ranks announce for `position`: code, place, rows, digest, if others want to join, `HASH`."""
        if reply.error is not None:
            self.fail(reply.error)
            return
        parts = reply.parts or {}
        ranks: Sequence[int] = list(parts)
        table = np.array([np.frombuffer(part, np.int64) for part in parts.values()])
        try:
            ranks, table = self._agreed(progress, position, ranks, table)
        except (JoinError, MismatchError) as error:
            self.runtime.exchange.fail(error)
            return
        codes, _, rows, _, joins, _ = table.T
        own = ranks.index(self._rank)
        with self._lock:
            decision = progress.decisions[position] = self._decision(progress, position, codes, ranks)
            decision.rows = UNKNOWN if (rows < 0).any() else int(rows[own] if progress.is_global else rows.sum())
            decision.ranks = ranks
            progress.agreed, progress.stops = position + decision.all_have, not decision.all_have
            joining = self.runtime.exchange.joining
            few = len(ranks) < joining.least and not joining.pending
            if (joins.any() or few) and decision.all_have and self.admits and not self.evaluates:
                self._pause = progress, position
            self._advance(progress)
        if few and not self.admits:
            self.runtime.exchange.fail(
                WorkerLostError(
                    f"{len(ranks)} workers are left, fewer than min_workers={joining.least}, and others may join in "
                    "model.fit only, with steps_per_execution=1"
                )
            )

    def _agreed(
        self, progress: IteratorProgress, position: int, ranks: Sequence[int], table: Array
    ) -> tuple[Sequence[int], Array]:
        """Returns who takes the batch, and what they announce: those who join only if they announce what others do.

        Raises:
            MismatchError: others than those who join differ.
            JoinError: this worker joins, and differs.
        """
        joiners, self.joiners = self.joiners.intersection(ranks), frozenset()
        if joiners.issuperset(ranks):  # all others have been lost
            joiners = frozenset()
        taking = [place for place, rank in enumerate(ranks) if rank not in joiners]
        self._check(progress, position, [ranks[place] for place in taking], table[taking])
        for place in (place for place, rank in enumerate(ranks) if rank in joiners):
            try:
                self._check(progress, position, [ranks[each] for each in (*taking, place)], table[[*taking, place]])
                taking.append(place)
            except MismatchError as error:
                if ranks[place] == self._rank:
                    raise JoinError.because(str(error)) from None
                logger.warning("tfps: rank %d cannot join, and the job goes on without it: %s", ranks[place], error)
        taking.sort()
        return [ranks[place] for place in taking], table[taking]

    def _check(self, progress: IteratorProgress, position: int, ranks: Sequence[int], table: Array) -> None:
        """Raises MismatchError if `ranks` do not announce the same batch; see `_decide`."""
        _, places, rows, digests, _, hashes = table.T
        others = np.flatnonzero(places != places[0])
        if others.size:
            shown = " and ".join(
                f"rank {ranks[at]} at batch {places[at] & 0xFFFFFFFF} of its iterator number {places[at] >> 32}"
                for at in (0, int(others[0]))
            )
            raise MismatchError(
                f"the workers must take batches in the same order, got {shown}; every worker must run "
                "the same program (and after Ctrl-C at different steps a new strategy)"
            )
        batch_digests.check(digests, ranks, position, joins=position == progress.joined, hashes=hashes)
        if progress.is_global and (rows != rows[0]).any():
            each = ", ".join(f"{count} on rank {rank}" for rank, count in zip(ranks, rows, strict=True))
            raise MismatchError(
                f"all workers must have the same batches with min_workers, as each computes a part of them: batch "
                f"{position} has {each} rows"
            )

    def _decision(self, progress: IteratorProgress, position: int, codes: Array, ranks: Sequence[int]) -> _Decision:
        failed, ended = ([rank for rank, said in zip(ranks, codes, strict=True) if said == c] for c in (_FAILED, _NONE))
        if failed:
            theirs = f"tfps: the input pipeline of rank {failed[0]} failed at batch {position}; see its log"
            return _Decision(False, progress.error if self._rank in failed else theirs)
        if not ended:
            return _Decision(True)
        if len(ended) == len(ranks):
            return _Decision(False)
        dropped = ", ".join(
            f"rank {rank} {'at least 1' if said == _UNKNOWN else said}"
            for rank, said in zip(ranks, codes, strict=True)
            if said != _NONE
        )
        return _Decision(
            False,
            warning=f"tfps: the data of rank {', '.join(map(str, ended))} ended after {position} batches, so the epoch "
            f"ends there on all workers; batches dropped: {dropped}. This is logged once. To use all data, give every "
            "worker as many batches, or use dataset.repeat() with steps_per_epoch",
        )

    def _advance(self, progress: IteratorProgress) -> None:
        self._push_owed()
        self._announced.notify_all()
        while progress.waiting:
            position, together = progress.waiting[0]
            decision = progress.decisions.get(position)
            if progress.over:
                answer: tuple[int | None, str] = None, ""
            elif together and self._failure:
                answer = None, self._failure
            elif together and decision is None:
                return
            elif decision is not None and not decision.all_have:
                answer, progress.over = (None, decision.error), True
                self.cut_short = bool(decision.warning)
                if decision.warning and not self._warned:
                    self._warned = True
                    logger.warning("%s", decision.warning)
            elif position in progress.ready:
                answer = progress.ready.pop(position), ""
            elif progress.end is not None:
                answer, progress.over = (None, progress.error), True
            else:
                return
            progress.waiting.popleft()
            progress.decisions.pop(position, None)
            progress.rows.pop(position, None)
            progress.digests.pop(position, None)
            progress.answer(*answer, *((UNKNOWN, ()) if decision is None else (decision.rows, decision.ranks)))

    def _push_owed(self) -> None:
        """Sends due announcements whose result is known, in request order.

        A position is announced once all ranks have the previous one: a rank that counts its batches never requests
        one past its last, so other ranks must not announce that one just because they requested it. While training
        pauses, only those of an evaluation are sent.
        """
        while (self._pause is None or self.evaluates) and (self._stopped is None or self._updates()):
            due = next((each for each in self._owed if self._pause is None or each[0] is not self._pause[0]), None)
            if due is None:
                return
            progress, position = due
            if progress.stops and position > progress.agreed:
                self._owed.remove(due)
                continue
            code = progress.code(position)
            if code is None or position > progress.agreed or progress.place is None or position in progress.held:
                return
            digest = progress.digests.get(position, batch_digests.NOTHING)
            if position == progress.joined and progress.digest_of is not None and code not in (_NONE, _FAILED):
                if (key := progress.ready.get(position)) is not None:
                    digest = progress.digest_of(key)
                elif not progress.closed:  # it will be staged soon
                    return
            self._owed.remove(due)
            place, rows = (progress.place << 32) + position, progress.rows.get(position, UNKNOWN)
            joins = self.admits and not self.evaluates and self.runtime.exchange.joining.notified
            own = np.array([code, place, rows, digest, joins, batch_digests.HASH], np.int64)
            # This rank has traced an exchange or synchronized, so the bucket is already declared: no wait.
            self.said.push(own, functools.partial(self._decide, progress, position))

    def fail(self, error: TfpsError | str) -> None:
        """Answers requests in lockstep with `error`, or with the one that came first."""
        with self._lock:
            self._failure = self._failure or (error if isinstance(error, str) else to_text(error))
            for progress in list(self._iterators.values()):
                self._advance(progress)
            self._announced.notify_all()


class Request(Transfer):
    """Batch requests from `graph` (None: from eager code); for a graph run they give the iterator's number."""

    exchanges = False

    def __init__(self, agreement: BatchAgreement, graph: tf.Graph | None) -> None:
        super().__init__(-1, agreement.said.spec)
        self.agreement = agreement
        self._root = None if graph is None else weakref.ref(outer_graphs(graph)[-1])
        self._trains: bool | None = None if graph is not None else False
        agreement.runtime.adopt(self, graph)

    def send(self, graph_run: tf.Tensor) -> tf.Operation:
        """Returns the op that sends a message; messages of one graph stay in order."""
        agreement = self.agreement
        # In a graph of several steps, TensorFlow orders what reads a variable after what has written it before.
        counts = [] if self._root is None else list(agreement.accumulating.values())
        with tf.control_dependencies([counter.read_value() for counter, _ in counts]):
            return graph_ops.request(agreement.runtime.queue, agreement.order.queue_ref, self.id, graph_run)

    def collect(self, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor, times: tf.Tensor) -> None:
        self.agreement.request(int(graph_run), self.trains(), self._root is None)

    def trains(self) -> bool:
        """Returns whether the graph, which must be complete, exchanges anything."""
        if self._trains is None:
            root = self._root and self._root()
            self._trains = root is not None and any(has_function(root, name) for name in graph_ops.exchange_functions())
        return self._trains

    def fail(self, error: TfpsError) -> None:
        self.agreement.fail(error)
