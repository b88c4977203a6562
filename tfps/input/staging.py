"""The double buffer: a thread copies batches to the devices ahead of the steps that use them.

One area (MapStage) per device holds batches by key; a small queue per iterator holds the keys in order. A step takes a
key, then its batch, which is always there: waiting for a key uses an asynchronous kernel, which blocks no thread of
TensorFlow's pools; waiting for a missing batch would block one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfps.errors import TfpsError, to_text
from tfps.graph.ops import HOST
from tfps.graph.rows import UNKNOWN, rows_of
from tfps.graph.shares import LastBatch
from tfps.graph.tf_private import eagerly
from tfps.input.first_batches import NOTHING, FirstBatches, of_own
from tfps.input.lockstep import IteratorProgress, Lockstep
from tfps.runtime.runtime import Runtime
from tfps.types import Argument, Function, Structure, Value

logger = logging.getLogger("tfps")
# A batch key and "", or END and the reason ("" at the end of the data); then the rows of the batch: summed over all
# workers, and per local replica (UNKNOWN if not known).
TOKEN = [tf.int64, tf.string, tf.int64]
END = -1
GO = -2  # precedes each token of an iterator whose batches are handed out: it leaves the queue with that token
_HOST_ONLY = (tf.string, tf.variant, tf.resource)  # no device but the CPU can hold them
_JOIN_S = 2.0  # for a thread that may be inside the user's generator, which cannot be interrupted

Group = list[Structure]  # one batch per local replica


@dataclass(frozen=True)
class Area:
    """Lists of tensors of fixed dtypes by key, in the memory of one device."""

    device: str
    attributes: dict[str, Argument]  # of the ops: the dtypes, and a name

    def run(self, op: Function, **inputs: Argument) -> Value:
        """Runs `op`, one of MapStage's, eagerly or in a graph."""
        with tf.device(self.device):
            return op(**inputs, **self.attributes)


class Stage:
    """Stores batches of one structure, one per local replica, as flat tensors in areas."""

    def __init__(
        self, element_spec: Structure, replicas: int, areas: Callable[[int, tuple[tf.DType, ...], bool], Area]
    ) -> None:
        self._spec = element_spec
        self._leaves = tf.nest.flatten(element_spec)
        self._parts = [tf.nest.flatten(leaf, expand_composites=True) for leaf in self._leaves]
        flat = [spec for parts in self._parts for spec in parts]
        self._shapes = [spec.shape for spec in flat]
        self._areas: list[list[tuple[Area, list[int]]]] = [[] for _ in range(replicas)]
        for on_host in (False, True):
            indices = [index for index, spec in enumerate(flat) if (spec.dtype in _HOST_ONLY) == on_host]
            for replica in range(replicas if indices else 0):
                area = areas(replica, tuple(flat[index].dtype for index in indices), on_host)
                self._areas[replica].append((area, indices))

    @property
    def replicas(self) -> int:
        return len(self._areas)

    def put(self, key: int, batches: Sequence[Structure]) -> None:
        """Stages `batches`, one per replica, eagerly."""
        with tf.device(HOST):
            number = tf.constant(key, tf.int64)
        for batch, areas in zip(batches, self._areas, strict=True):
            flat: list[tf.Tensor] = []
            for value, parts in zip(tf.nest.flatten(batch), self._parts, strict=True):
                flat += tf.nest.flatten(value, expand_composites=True) if parts else []  # no parts: None
            for area, indices in areas:
                own = [flat[index] for index in indices]
                area.run(tf.raw_ops.MapStage, key=number, indices=list(range(len(own))), values=own)

    def take(self, key: tf.Tensor) -> list[tf.Tensor]:
        """Returns the batches of `key`, one per replica. Works eagerly and in graphs."""
        batches = []
        for areas in self._areas:
            flat: list[tf.Tensor] = [None] * len(self._shapes)
            for area, indices in areas:
                taken = area.run(tf.raw_ops.MapUnstage, key=key, indices=list(range(len(indices))))
                for index, tensor in zip(indices, taken, strict=True):
                    tensor.set_shape(self._shapes[index])
                    flat[index] = tensor
            values, parts = [], iter(flat)
            for spec, of in zip(self._leaves, self._parts, strict=True):
                own = [next(parts) for _ in of]
                packs = own and not isinstance(spec, tf.TensorSpec)
                packed = tf.nest.pack_sequence_as(spec, own, expand_composites=True) if packs else next(iter(own), None)
                values.append(packed)
            batches.append(tf.nest.pack_sequence_as(self._spec, values))
        return batches


class Staging:
    """Owns one strategy's staged batches and staging threads.

    Args:
        depth: batches staged ahead per iterator and device.
        last_batch: where graphs note the rows of the batches they take; None if the job has one replica.
        compares: the ranks compare the first batch of each iterator.
        together: the workers take batches together; else the others' rows are estimated by this one's.
    """

    def __init__(
        self,
        runtime: Runtime,
        devices: Sequence[str],
        depth: int,
        last_batch: LastBatch | None,
        *,
        together: bool = True,
        compares: bool = False,
    ) -> None:
        self.devices, self.depth, self.last_batch = tuple(devices), depth, last_batch
        self.spans, self._runtime = runtime.spans, runtime
        self.closed, self.compares = False, compares
        self.lockstep = Lockstep.of(runtime) if runtime.exchange.view.workers > 1 and together else None
        self.workers = runtime.exchange.view.workers
        self.fetch_add = runtime.exchange.peers.fetch_add
        self.keys = itertools.count()
        self.number = next(_numbers)
        stagings[self.number] = self
        self._areas: dict[tuple[int, tuple[tf.DType, ...], bool], Area] = {}
        self._lock = threading.RLock()  # guards the next two; reentrant: the garbage collector may call close anywhere
        self._running: set[Feed] = set()
        self._firsts: list[int] = []  # digests of first batches, by feed, since they were taken
        with tf.init_scope(), tf.device(HOST):
            # Dequeuing from it raises OutOfRangeError, like the end of data.
            self.ended = tf.queue.FIFOQueue(1, [tf.int64], [[]], name="tfps_ended")
            self.ended.close()

    def stage(self, element_spec: Structure, *, on_devices: bool = True) -> Stage:
        def area(replica: int, dtypes: tuple[tf.DType, ...], on_host: bool) -> Area:
            on_host = on_host or not on_devices
            with self._lock:
                if (replica, dtypes, on_host) not in self._areas:
                    device = HOST if on_host else self.devices[replica]
                    about = {"dtypes": list(dtypes), "shared_name": f"tfps_stage_{self.number}_{len(self._areas)}"}
                    self._areas[replica, dtypes, on_host] = Area(device, about)
                return self._areas[replica, dtypes, on_host]

        return Stage(element_spec, len(self.devices), area)

    def staged(self) -> int:
        """Returns the number of tensor lists in all areas."""
        with self._lock, tf.init_scope():
            return sum(int(area.run(tf.raw_ops.MapSize)) for area in self._areas.values())

    def no_batch(self) -> tf.Tensor:
        """Returns the result (int64 scalar) of an op that fails like the end of data."""
        with tf.device(HOST):
            return tf.raw_ops.QueueDequeueV2(handle=self.ended.queue_ref, component_types=[tf.int64])[0]

    def next_epoch(self) -> int:
        """Returns the number of the next epoch that is handed out, which is the same on all ranks."""
        return next(_epochs.setdefault(self._runtime, itertools.count()))

    def note_first(self, digest: int) -> None:
        with self._lock:
            self._firsts.append(digest)

    def take_firsts(self) -> list[int]:
        """Returns the digests noted since the last call."""
        with self._lock:
            firsts, self._firsts = self._firsts, []
            return firsts

    def started(self, feed: Feed) -> bool:
        """Registers `feed` as running; returns False if staging is closed."""
        with self._lock:
            if not self.closed:
                self._running.add(feed)
            return not self.closed

    def finished(self, feed: Feed) -> None:
        """Notes that `feed` has ended and removed its batches; the last one clears what failed steps left behind.

        Not on close: a step still running would wait forever for the batch of its token.
        """
        with self._lock, tf.init_scope():
            self._running.discard(feed)
            if not self._running and not self.closed:
                for area in self._areas.values():
                    area.run(tf.raw_ops.MapClear)

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

    Args:
        batches: number of steps in the data; None if unknown or infinite.
        meets: several workers synchronize at the first batch that eager code takes.
        hands_out: a batch that this worker gets is no other's, so the next one is asked for only once a step has taken
            the one before.
        first: knows the digests of first batches; None: this rank makes its own.
    """

    def __init__(
        self,
        staging: Staging,
        stage: Stage,
        groups: Iterator[Group],
        batches: int | None,
        meets: bool,
        hands_out: bool = False,
        first: FirstBatches | None = None,
    ) -> None:
        self._first, self._compares = first, meets and staging.compares  # else this worker iterates alone
        self._staging, self._stage, self._hands_out = staging, stage, hands_out
        self._groups: Iterator[Group] | None = groups
        self._rows: dict[int, list[int]] = {}  # of each local replica, by key of the staged batch
        self._unknown = [UNKNOWN] * (1 + stage.replicas)
        self._putting = False  # whether a token is being put, which may wait for room unless it is `_room` that does
        self._removers: set[object] = {"thread"}  # and calls of `stop`: nobody clears what they are about to remove
        self._lock = threading.Lock()  # guards _thread
        self._thread: threading.Thread | None = None
        self.number = next(_feed_numbers)
        self.stopped = False
        with tf.init_scope(), tf.device(HOST):
            # With several workers tokens are enqueued only on request, and `room` limits how much is staged.
            together = staging.lockstep is not None
            room = 1000 if together else 1 if hands_out else staging.depth - 1
            self.tokens = tf.queue.FIFOQueue(room, TOKEN, [[], [], [1 + stage.replicas]], name="tfps_batches")
        # Simple queues: `stop` may run in a finalizer, on any thread.
        self._room: queue.SimpleQueue[None] | None = queue.SimpleQueue() if together else None
        self._allowed: queue.SimpleQueue[int] | None = None
        self._left = 0  # of the batches allowed; used by the thread
        self._progress = None
        if staging.lockstep is not None:
            progress = IteratorProgress(staging.lockstep, batches, self._answer, meets=meets)
            self._progress = staging.lockstep.follow(self.number, progress)
            for _ in range(staging.depth):
                self._make_room()

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
            if self._staging.started(self):
                self._thread = threading.Thread(target=self._run, name=f"tfps-stage-{self.number}", daemon=True)
                self._thread.start()
            else:
                self.stop()

    def stop(self) -> None:
        """Ends the thread, which removes what it has staged. Any thread or finalizer may call it.

        So it takes no lock but, briefly, that of `Staging`, which is reentrant. The thread gets the room that it waits
        for: TensorFlow logs a warning for whatever is cancelled.
        """
        self.stopped = True
        if self._progress is not None:
            self._progress.gone = True
        if self._allowed is not None:
            self._allowed.put(1)
        self._make_room()
        with eagerly(), tf.device(HOST):
            if self._room is None and threading.current_thread() is not self._thread:
                this = object()
                self._removers.add(this)  # before it looks: a thread that still puts has not ended
                try:
                    if self._putting:
                        self._remove(int(self.tokens.dequeue()[0]))
                except tf.errors.OutOfRangeError:  # steps have taken all, and the thread has ended
                    pass
                finally:
                    self._has_removed(this)
            self.tokens.close(cancel_pending_enqueues=True)

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
        key = END
        try:
            try:
                for position, batches in enumerate(self._read()):
                    rows = _rows(batches) if self._staging.last_batch else self._unknown[1:]
                    if self._progress is not None:
                        self._progress.exists(position, _sum(rows))
                    self._wait_for_room()
                    staged = next(self._staging.keys)
                    self._rows[staged] = rows
                    begin = self._staging.spans.now()
                    self._stage.put(staged, batches)
                    if self._staging.spans.recorder.enabled:
                        self._staging.spans.staged(begin, batches)
                    key = staged  # only now: a partly staged batch cannot be taken out
                    self._offer(position, key)
                    key = END
                    del batches
                text = ""
            except _StoppedError:
                return
            except Exception as error:  # any error of the user's input pipeline: its step raises it
                if self.stopped and isinstance(error, tf.errors.CancelledError | tf.errors.OutOfRangeError):
                    return
                text = _text(error)
            self._end(text)
        except (_StoppedError, tf.errors.CancelledError):
            pass
        finally:
            self.tokens.close(cancel_pending_enqueues=True)  # `stop` may wait for a token
            self._take_out(key)
            self._has_removed("thread")

    def _read(self) -> Iterator[Group]:
        """Yields groups of batches, one per replica."""
        groups, self._groups, begun = self._groups, None, not self._compares
        while not self.stopped and groups is not None:
            self._go()
            if self._allowed is not None:
                while not self._left:
                    self._left = self._allowed.get()
                if self.stopped:
                    raise _StoppedError
                self._left -= 1
            group = next(groups, None) if begun else self._read_first(groups)
            begun = True
            if group is None:
                return
            yield group
            del group

    def _read_first(self, groups: Iterator[Group]) -> Group | None:
        """Returns the first group, whose digest the ranks compare."""
        if self._first is not None:
            self._first.begin()
        try:
            group = next(groups, None)
        finally:
            digest = NOTHING if self._first is None else self._first.end()
        if self._first is None and group is not None:
            with tf.device(HOST):
                digest = of_own(group)
        if self._progress is not None:
            self._progress.first = digest
        self._staging.note_first(digest)
        return group

    def _go(self) -> None:
        """If batches are handed out, waits until the last one has been taken."""
        if self._hands_out:
            self._put_token(GO, "", self._unknown)

    def _wait_for_room(self) -> None:
        if self._room is not None:
            self._room.get()
            if self.stopped:
                raise _StoppedError

    def _make_room(self) -> None:
        if self._room is not None:
            self._room.put(None)

    def _offer(self, position: int, key: int) -> None:
        if self._progress is not None:
            self._progress.staged(position, key)
        else:
            rows = self._rows.pop(key)
            of_all = _sum(rows)
            self._put_token(key, "", [of_all if of_all < 0 else of_all * self._staging.workers, *rows])

    def _end(self, text: str) -> None:
        """Answers every further request with the end of data, until the iterator is dropped."""
        if self._progress is not None:
            self._progress.ended(text)
            while True:
                self._wait_for_room()
        self._put_token(END, text, self._unknown)
        while True:
            self._go()
            self._put_token(END, "", self._unknown)

    def _put_token(self, key: int, text: str, rows: list[int]) -> None:
        with tf.init_scope(), tf.device(HOST):
            token = [tf.constant(key, tf.int64), text, tf.constant(rows, tf.int64)]
            self._putting = True
            try:
                if self.stopped:
                    raise _StoppedError
                self.tokens.enqueue(token)
            finally:
                self._putting = False

    def _answer(self, key: int | None, text: str, rows: int) -> None:
        """Answers one request; `key` None: there is no batch. Called by `lockstep`, on any thread."""
        with contextlib.suppress(_StoppedError, tf.errors.CancelledError):  # nothing waits any more
            if key is None:
                self._put_token(END, text, self._unknown)
            else:
                self._put_token(key, text, [rows, *self._rows.pop(key)])
                self._make_room()

    def _take_out(self, key: int) -> None:
        """Removes staged batches that nothing has taken."""
        with tf.device(HOST):
            left = [] if key == END else [key]
            with contextlib.suppress(tf.errors.OutOfRangeError):  # `stop` has taken the last one
                while int(self.tokens.size()):
                    left.append(int(self.tokens.dequeue()[0]))
            if self._progress is not None:
                left += self._progress.leave()
            self._rows.clear()
            for each in left:
                self._remove(each)

    def _has_removed(self, remover: object) -> None:
        """Notes that `remover` removes nothing more; the last one says that this has ended, possibly twice."""
        self._removers.discard(remover)
        if not self._removers:
            self._staging.finished(self)

    def _remove(self, key: int) -> None:
        """Removes the staged batch of a token that nothing else has."""
        if key not in (END, GO):
            self._stage.take(tf.constant(key, tf.int64))


class _StoppedError(Exception):
    """The feed has been stopped while its thread was about to give or wait for something."""


_feed_numbers = itertools.count()


def _rows(batches: Sequence[Structure]) -> list[int]:
    """Returns the rows of each replica's batch, UNKNOWN if it has no dimension."""
    with tf.device(HOST):
        found = [rows_of(batch) for batch in batches]
    return [UNKNOWN if rows is None else int(rows) for rows in found]


def _sum(rows: list[int]) -> int:
    return UNKNOWN if UNKNOWN in rows else sum(rows)


def _text(error: Exception) -> str:
    if isinstance(error, TfpsError):  # no error of the pipeline
        return to_text(error)
    return f"the input pipeline failed: {type(error).__name__}: {getattr(error, 'message', None) or error}"
