"""The double buffer: a thread copies batches to the devices ahead of the steps that use them.

One staging buffer (MapStage) per device holds batches by key; a small queue per iterator holds the keys in order.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfps.errors import TfpsError, in_graph_error, to_text
from tfps.graph.ops import HOST
from tfps.graph.rows import UNKNOWN, rows_of
from tfps.graph.shares import LastBatch
from tfps.graph.tf_private import eagerly
from tfps.input.batch_agreement import BatchAgreement, IteratorProgress
from tfps.input.batch_digests import NOTHING, BatchDigests, of_own
from tfps.input.caches import advice
from tfps.keras_hooks.generators import View
from tfps.runtime.runtime import Runtime
from tfps.types import Argument, Function, Structure, Value

logger = logging.getLogger("tfps")
# A batch key and "", or END and the reason ("" at the end of the data); then the rows of the batch: summed over all
# workers, and per local replica (UNKNOWN if not known), and if that changes the number of all replicas.
TOKEN = [tf.int64, tf.string, tf.int64]
END = -1
GO = -2  # precedes each token of an iterator whose batches are handed out: it leaves the queue with that token
_HOST_ONLY = (tf.string, tf.variant, tf.resource)  # no device but the CPU can hold them
_JOIN_S = 2.0  # for a thread that may be inside the user's generator, which cannot be interrupted

Group = list[Structure]  # one batch per local replica
Cut = Callable[[Structure, Sequence[int]], Group]  # this worker's part of a batch, given the ranks that take it


class Stage:
    """Stores batches of one structure, one per local replica, as flat tensors in buffers."""

    def __init__(self, staging: Staging, element_spec: Structure, *, on_devices: bool = True) -> None:
        self._spec, self._flat = element_spec, tf.nest.flatten(element_spec, expand_composites=True)
        self._buffers: list[list[tuple[Function, list[int]]]] = [[] for _ in staging.devices]
        # With a GPU TensorFlow keeps what functions take and return as int32 on the host.
        only_cpus = all(tf.DeviceSpec.from_string(device).device_type == "CPU" for device in staging.devices)
        held = _HOST_ONLY if only_cpus else (*_HOST_ONLY, tf.int32)
        for on_host in (False, True):
            indices = [index for index, spec in enumerate(self._flat) if (spec.dtype in held) == on_host]
            dtypes = tuple(self._flat[index].dtype for index in indices)
            for replica, device in enumerate(staging.devices if indices else ()):
                buffer = staging.buffer(replica, dtypes, device if on_devices and not on_host else HOST)
                self._buffers[replica].append((buffer, indices))

    def put(self, key: int, batches: Sequence[Structure]) -> None:
        """Stages `batches`, one per replica, eagerly."""
        with tf.device(HOST):
            number = tf.constant(key, tf.int64)
        for batch, buffers in zip(batches, self._buffers, strict=True):
            flat = [each for each in tf.nest.flatten(batch, expand_composites=True) if each is not None]
            for buffer, indices in buffers:
                own = [flat[index] for index in indices]
                # An array: a list has TensorFlow take the slow path through Python.
                buffer(tf.raw_ops.MapStage, key=number, indices=np.arange(len(own), dtype=np.int32), values=own)

    def take(self, key: tf.Tensor) -> list[Structure]:
        """Returns the batches of `key`, one per replica. Works eagerly and in graphs."""
        batches = []
        for buffers in self._buffers:
            flat: list[tf.Tensor] = [None] * len(self._flat)
            for buffer, indices in buffers:
                taken = buffer(tf.raw_ops.MapUnstage, key=key, indices=list(range(len(indices))))
                for index, tensor in zip(indices, taken, strict=True):
                    tensor.set_shape(self._flat[index].shape)
                    flat[index] = tensor
            batches.append(tf.nest.pack_sequence_as(self._spec, flat, expand_composites=True))
        return batches


class Staging:
    """Owns one strategy's staged batches and staging threads."""

    def __init__(
        self,
        runtime: Runtime,
        devices: Sequence[str],
        depth: int,  # batches staged ahead per iterator and device
        last_batch: LastBatch | None,  # notes the rows of batches that graphs take; None if the job has one replica
        *,
        together: bool = True,  # the workers take batches together; else the others' rows are estimated by this one's
        check_every: int = 0,  # the ranks compare the first batch of each iterator, and one of so many; 0: none
    ) -> None:
        self.devices, self.depth, self.last_batch = tuple(devices), depth, last_batch
        self.spans, self.workers = runtime.spans, runtime.exchange.view.workers
        self.changes = last_batch is not None and last_batch.changes  # whether the number of workers may change
        self.closed, self.check_every = False, check_every
        self.prefetch: Callable[[Sequence[Structure]], object] = lambda batches: None  # called with each group staged
        # Strategies of one runtime share it: they announce batches in one order.
        self.agreement: BatchAgreement | None = None
        if self.workers > 1 and together:
            self.agreement = runtime.shared(BatchAgreement, lambda: BatchAgreement(runtime))
        self.epochs = _epochs.setdefault(runtime, itertools.count())  # that are handed out: the same on all ranks
        self.keys = itertools.count()
        self.read: deque[int] = deque()  # digests of batches that steps took without an announcement, since last asked
        self.number = next(_numbers)
        stagings[self.number] = self
        self._buffers: dict[tuple[int, tuple[tf.DType, ...], str], Function] = {}
        self._lock = threading.RLock()  # guards both; reentrant: the garbage collector may call close anywhere
        self._running: Counter[Feed] = Counter()  # how many, the thread and calls of `stop`, may remove its batches
        with tf.init_scope(), tf.device(HOST):
            # Dequeuing from it raises OutOfRangeError, like the end of data.
            self.ended = tf.queue.FIFOQueue(1, [tf.int64], [[]], name="tfps_ended")
            self.ended.close()

    def buffer(self, replica: int, dtypes: tuple[tf.DType, ...], device: str) -> Function:
        """Returns what runs one of MapStage's ops, eagerly or in a graph, on lists of tensors in `device`'s memory."""
        with self._lock:
            name = f"tfps_stage_{self.number}_{len(self._buffers)}"

            def run(op: Function, **inputs: Argument) -> Value:
                with tf.device(device):
                    return op(**inputs, dtypes=list(dtypes), shared_name=name)

            return self._buffers.setdefault((replica, dtypes, device), run)

    def staged(self) -> int:
        """Returns the number of tensor lists in all buffers."""
        with self._lock, tf.init_scope():
            return sum(int(buffer(tf.raw_ops.MapSize)) for buffer in self._buffers.values())

    def no_batch(self) -> tf.Tensor:
        """Returns the result (int64 scalar) of an op that fails like the end of data."""
        with tf.device(HOST):
            return tf.raw_ops.QueueDequeueV2(handle=self.ended.queue_ref, component_types=[tf.int64])[0]

    def take_read(self) -> list[int]:
        """Returns the digests noted since the last call."""
        return [self.read.popleft() for _ in range(len(self.read))]

    def started(self, feed: Feed) -> bool:
        """Notes that one more may remove batches of `feed`; returns False if staging is closed."""
        with self._lock:
            if not self.closed:
                self._running[feed] += 1
            return not self.closed

    def finished(self, feed: Feed) -> None:
        """Notes that one has removed its batches of `feed`; the last one clears what failed steps left behind.

        Not on close: a step still running would wait forever for the batch of its token.
        """
        with self._lock, tf.init_scope():
            self._running -= Counter([feed])
            if not self._running and not self.closed:
                for buffer in self._buffers.values():
                    buffer(tf.raw_ops.MapClear)

    def close(self) -> None:
        """Ends all threads; one inside the user's code ends when that returns. The runtime may go on."""
        with self._lock:
            self.closed = True
            running = list(self._running)
        for feed in running:
            feed.close()
        for feed in running:
            feed.join(_JOIN_S)


_numbers = itertools.count()
_epochs: weakref.WeakKeyDictionary[Runtime, Iterator[int]] = weakref.WeakKeyDictionary()
stagings: weakref.WeakValueDictionary[int, Staging] = weakref.WeakValueDictionary()  # by number


class Feed:
    """Host side of one iterator: its key queue and the thread that fills it, started on first use.

    If batches are handed out, one that this worker gets is no other's, so it asks for the next one only once a step has
    taken the one before.
    """

    def __init__(
        self,
        staging: Staging,
        stage: Stage,
        groups: Iterator[Group],
        batches: int | None,  # number of steps in the data; None if unknown or infinite
        meets: bool,  # several workers synchronize at the first batch that eager code takes
        hands_out: bool = False,
        digests: BatchDigests | None = None,  # of batches; None: this rank makes its own
        cut: Cut | None = None,  # then groups are global batches, which are cut again if their ranks turn out to differ
        ranks: Sequence[int] = (),  # for which they are cut at first
        skipped: int = 0,  # batches that others have taken before
    ) -> None:
        self._skipped = skipped
        # Without `meets` this worker iterates alone.
        self._digests, self._compares = digests, meets and staging.check_every > 0
        self._iterator = 0  # number of the iterator that is read, for `_digests`
        self.uncounted = 0  # batches that are skipped, but not read
        self._digest_of: dict[int, int] = {}  # by key, of batches whose token is not put
        self._staging, self._stage, self._hands_out = staging, stage, hands_out
        self._groups: Iterator[Group] | None = groups
        self.sizes: Callable[[int], int] | None = None  # rows of a global batch of all ranks by position, if known
        self._unknown = [UNKNOWN] * (1 + len(staging.devices) + staging.changes)
        self._cut, self._ranks = cut, ranks  # `_ranks`: those of the last batch that was taken
        # By key: the global batch, the ranks it is cut for; the lock keeps a batch from being cut by two threads.
        self._global_batches: dict[int, tuple[Structure, Sequence[int]]] = {}
        self._rows: dict[int, list[int]] = {}  # in all and by local replica, of staged batches whose token is not put
        self._putting = False  # whether a token is being put, which may wait for room unless it is `_room` that does
        self._lock = threading.Lock()  # guards _thread
        self._thread: threading.Thread | None = None
        self.number = next(_feed_numbers)
        self.stopped = self.superseded = False
        # For a generator that others may read after it: called by the thread, returns what is to know which are used.
        self.begins: Callable[[], View] | None = None
        self._view: View | None = None
        self._staged = self._unused = 0  # batches that have been staged, and those of them that no step has taken
        # Guards _unused; reentrant as that of Staging. The thread takes it only once no token can be waited for.
        self._taking = threading.RLock()
        with tf.init_scope(), tf.device(HOST):
            room = 1000 if staging.agreement is not None else 1 if hands_out else staging.depth - 1
            self.tokens = tf.queue.FIFOQueue(room, TOKEN, [[], [], [len(self._unknown)]], name="tfps_batches")
        # Simple queues: `stop` may run in a finalizer, in the middle of anything.
        self._room: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._allowed: queue.SimpleQueue[int] | None = None
        self._progress: IteratorProgress | None = None
        if staging.agreement is not None:  # tokens are put on request only, and `_room` limits how much is staged
            self._progress = staging.agreement.follow(
                self.number, batches, self._answer, meets=meets, is_global=cut is not None, begin=skipped
            )
            if self._compares and cut is not None and digests is not None:
                self._progress.digest_of = lambda key: digests.of_global_batch(self._global_batches[key][0])
            for _ in range(staging.depth):
                self._room.put(1)

    def allow(self, batches: int) -> None:
        """Lets the thread read so many `batches` more. Without a call before the first use it always reads ahead."""
        if self._allowed is None:
            self._allowed = queue.SimpleQueue()
        self._allowed.put(batches)
        if self._progress is not None:
            self._progress.allow(batches)

    def start(self) -> None:
        """Starts the thread on the iterator's first use; later calls do nothing."""
        with self._lock:
            if self._thread is not None or self.stopped:
                return
            if not self._staging.started(self):
                self.stop()
                return
            self._thread = threading.Thread(target=self._run, name=f"tfps-stage-{self.number}", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread, which removes what it has staged. Any thread may call it; a finalizer, on the main thread.

        So it takes no lock but, briefly, that of `Staging`, which is reentrant. The thread gets the room that it waits
        for: TensorFlow logs a warning for whatever is cancelled.
        """
        self.stopped = True
        if self._progress is not None:
            self._progress.closed = True
        if self._allowed is not None:
            self._allowed.put(1)
        self._room.put(1)
        with eagerly(), tf.device(HOST):
            if self._progress is None and self._thread not in (None, threading.current_thread()):
                self._staging.started(self)  # before it looks: a thread that still puts has not ended
                try:
                    with self._taking:
                        if self._putting:
                            self._discard(int(self.tokens.dequeue()[0]))
                except tf.errors.OutOfRangeError:  # steps have taken all, and the thread has ended
                    pass
                finally:
                    self._staging.finished(self)
            self.tokens.close(cancel_pending_enqueues=True)

    def supersede(self) -> None:
        """Stops it, as another one is to read the same data."""
        self.superseded = True
        self.stop()

    def close(self) -> None:
        """Like `stop`, and tells waiting requests that the strategy is closed."""
        if self._progress is not None:
            self._progress.close()
        self.stop()

    def join(self, timeout_s: float) -> None:
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _run(self) -> None:
        staging, progress, text = self._staging, self._progress, ""
        try:
            with contextlib.suppress(*_STOPS):
                try:
                    for position, batches in enumerate(self._read(), self._skipped):
                        digest = self._digest(position, batches)
                        if progress is not None:
                            progress.exists(position, self._rows_of(batches)[0], digest)
                            self._get(self._room)
                        key, begin = next(staging.keys), staging.spans.now()
                        if self._cut is not None:
                            self._global_batches[key] = batches[0], self._ranks
                            batches = self._cut(*self._global_batches[key])
                        rows = self._rows_of(batches)
                        if self.sizes is not None:
                            rows[0] = self.sizes(position)
                        self._stage.put(key, batches)
                        staging.prefetch(batches)
                        if staging.spans.recorder.enabled:
                            staging.spans.staged(begin, batches)
                        self._digest_of[key] = digest
                        self._rows[key] = rows  # only now: a partly staged batch cannot be taken out
                        self._staged += 1
                        if progress is not None:
                            progress.staged(position, key)
                        else:
                            total = rows[0] * (staging.workers if self.sizes is None else 1)
                            self._put_token(key, "", [max(UNKNOWN, total), *rows[1:]])
                            del self._rows[key], self._digest_of[key]
                            self._global_batches.pop(key, None)
                        if self._view is not None:
                            with tf.device(HOST):
                                # In this order: a batch whose token is put meanwhile counts twice.
                                waiting = len(self._rows) + int(self.tokens.size())
                            if not self.stopped:  # else `stop` may have taken one that is not used
                                self._view.used(self._skipped + self._staged - waiting)
                        del batches
                except Exception as error:  # any error of the user's input pipeline: its step raises it
                    if self.stopped and isinstance(error, _STOPS):
                        raise
                    said = getattr(error, "message", None) or str(error)
                    text = f"the input pipeline failed: {type(error).__name__}: {said}{advice(said)}"
                    better = in_graph_error(text) if isinstance(error, tf.errors.InvalidArgumentError) else error
                    if isinstance(better, TfpsError):  # no error of the pipeline
                        text = to_text(better)
                self._end(text)
        finally:
            self.tokens.close(cancel_pending_enqueues=True)  # `stop` may wait for a token
            if progress is not None:
                progress.leave()
            try:
                with tf.device(HOST), self._taking:
                    with contextlib.suppress(tf.errors.OutOfRangeError):  # `stop` has taken the last one
                        while int(self.tokens.size()):
                            self._discard(int(self.tokens.dequeue()[0]))
                    for each in self._rows:
                        self._discard(each)
            finally:
                staging.finished(self)
                if self._digests is not None:
                    self._digests.forget(self._iterator)
                if self._view is not None:
                    self._view.close(self._skipped + self._staged - self._unused)

    def _read(self) -> Iterator[Group]:
        """Yields groups of batches, one per replica."""
        groups, self._groups, begun, left = self._groups, None, False, 0
        if self.begins is not None:
            self._view = self.begins()
        while not self.stopped and groups is not None:
            if self._hands_out:  # waits until the last one has been taken
                self._put_token(GO)
            if self._allowed is not None:
                while not left:
                    left = self._get(self._allowed)
                left -= 1
            group = next(groups, None) if begun or self._digests is None else self._read_first(groups, self._digests)
            begun = True
            if group is None:
                return
            yield group
            del group

    def _read_first(self, groups: Iterator[Group], digests: BatchDigests) -> Group | None:
        """Returns the first group, and notes whose digests are this iterator's."""
        digests.begin()
        try:
            return next(groups, None)
        finally:
            self._iterator = digests.end()

    def _digest(self, position: int, group: Group) -> int:
        """Returns the digest of the batch at `position`, of which this rank has read `group`; NOTHING if not known."""
        if not self._compares:
            return NOTHING
        if self._digests is not None:
            return self._digests.take(self._iterator, position - self.uncounted)
        if position > self._skipped:
            return NOTHING
        with tf.device(HOST):
            return of_own(group)

    def _get(self, numbers: queue.SimpleQueue[int]) -> int:
        number = numbers.get()
        if self.stopped:
            raise _StoppedError
        return number

    def _end(self, text: str) -> None:
        """Answers every further request with the end of data, until the iterator is dropped."""
        if self._progress is not None:
            self._progress.ended(text)
            while True:
                self._get(self._room)
        self._put_token(END, text)
        while True:
            if self._hands_out:
                self._put_token(GO)
            self._put_token(END)

    def _put_token(self, key: int, text: str = "", rows: list[int] | None = None) -> None:
        with tf.init_scope(), tf.device(HOST):
            token = [tf.constant(key, tf.int64), tf.constant(text), tf.constant(rows or self._unknown, tf.int64)]
            self._putting = True
            try:
                if self.stopped:
                    raise _StoppedError
                tf.raw_ops.QueueEnqueueV2(handle=self.tokens.queue_ref, components=token)
            finally:
                self._putting = False

    def _rows_of(self, batches: Group) -> list[int]:
        """What a token says of them."""
        if self._staging.last_batch is None:
            return self._unknown
        return [*_rows(batches), *[UNKNOWN] * self._staging.changes]

    def _cut_again(self, key: int, ranks: Sequence[int]) -> int:
        """Stages the batch of `key` for other ranks; returns its new key."""
        global_batch, _ = self._global_batches.pop(key)
        self._remove(key)
        self._ranks, new = ranks, next(self._staging.keys)
        with tf.init_scope():
            batches = self._cut(global_batch, ranks) if self._cut is not None else []
            self._stage.put(new, batches)
        del self._rows[key]
        self._rows[new], self._digest_of[new] = self._rows_of(batches), self._digest_of.pop(key)
        return new

    def _answer(self, key: int | None, text: str, rows: int, ranks: Sequence[int]) -> None:
        """Answers one request; `key` None: there is no batch. Called by `agreement`, on any thread."""
        if key is not None and ranks and self._cut is not None and ranks != self._global_batches[key][1]:
            key = self._cut_again(key, ranks)
        replicas = len(ranks) * len(self._staging.devices) if ranks else UNKNOWN
        with contextlib.suppress(_StoppedError, tf.errors.CancelledError):  # nothing waits any more
            if key is None:
                self._put_token(END, text)
            else:
                known, *own = self._rows[key][: 1 + len(self._staging.devices)]
                if rows == UNKNOWN and self.sizes is not None:  # the ranks have announced nothing, as in evaluation
                    rows = known
                if (digest := self._digest_of.pop(key)) != NOTHING and not ranks:  # no announcement has carried it
                    self._staging.read.append(digest)
                self._put_token(key, text, [rows, *own, *[replicas] * self._staging.changes])
                del self._rows[key]
                self._global_batches.pop(key, None)
                self._room.put(1)

    def _discard(self, key: int) -> None:
        """Removes it, and counts it as not used."""
        self._unused += key not in (END, GO)
        self._remove(key)

    def _remove(self, key: int) -> None:
        """Removes the staged batch of a token that nothing else has."""
        if key not in (END, GO):
            self._stage.take(tf.constant(key, tf.int64))


class _StoppedError(Exception):
    """The feed has been stopped while its thread was about to give or wait for something."""


_STOPS = (_StoppedError, tf.errors.CancelledError, tf.errors.OutOfRangeError)  # what may end the thread then
_feed_numbers = itertools.count()


def _rows(batches: Sequence[Structure]) -> list[int]:
    """Returns the rows of all replicas' batches together, then of each; UNKNOWN if it has no dimension."""
    with tf.device(HOST):
        each = [UNKNOWN if (rows := rows_of(batch)) is None else int(rows) for batch in batches]
    return [UNKNOWN if UNKNOWN in each else sum(each), *each]
