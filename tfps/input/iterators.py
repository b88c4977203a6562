"""Iterators over distributed datasets: those whose batches are staged, and loops inside a `tf.function`.

Tested in tests/input/test_staging.py and tests/integration/test_input.py.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import tensorflow as tf

from tfps.errors import UnsupportedError, from_text
from tfps.graph.ops import HOST
from tfps.graph.rows import UNKNOWN, rows_of
from tfps.graph.tf_private import CompositeTensor, DistributedDataset, distribute_utils, ops, values
from tfps.input.batch_agreement import CLOSED, BatchAgreement, IteratorProgress, Request
from tfps.input.staging import END, GO, TOKEN, Feed, Stage, Staging, stagings
from tfps.threads import finalize
from tfps.types import Batches, Structure

_BEGINS, _NONE = -3, -2  # sent in place of the number of rows of the next batch
_numbers = itertools.count(-1, -1)  # distinct from those of feeds


class StagedIteratorSpec(tf.TypeSpec):
    """Spec of a `StagedIterator`: equal for all iterators over one dataset, so a new epoch needs no retracing.

    `number` is that of the staging, `element_spec` of one replica's batch.
    """

    __slots__ = ("_element_spec", "_number", "_on_devices", "hands_out")
    value_type = property(lambda self: StagedIterator)

    def __init__(self, number: int, element_spec: Structure, on_devices: bool, hands_out: bool = False) -> None:
        self._number, self._element_spec, self._on_devices = number, element_spec, on_devices
        self.hands_out = hands_out

    @property
    def staging(self) -> Staging:
        return stagings[self._number]

    @property
    def element_spec(self) -> Structure:
        """Spec of what `get_next` returns."""
        replicas = len(self.staging.devices)
        if replicas == 1:
            return self._element_spec
        return tf.nest.map_structure(lambda spec: values.PerReplicaSpec(*[spec] * replicas), self._element_spec)

    def take(self, key: tf.Tensor) -> Structure:
        """Returns the batch of `key`, a PerReplica if there are several replicas."""
        batches = Stage(self.staging, self._element_spec, on_devices=self._on_devices).take(key)
        return distribute_utils.regroup(batches, always_wrap=len(batches) > 1)

    def _serialize(self) -> tuple[object, ...]:
        return self._number, self._element_spec, self._on_devices, self.hands_out

    @property
    def _component_specs(self) -> list[tf.TensorSpec]:
        return [tf.TensorSpec([], tf.resource), tf.TensorSpec([], tf.int64)]

    def _to_components(self, value: StagedIterator) -> list[tf.Tensor]:
        if value._feed is not None:
            value._feed.start()
        return [value._tokens, value._number]

    def _from_components(self, components: list[tf.Tensor]) -> StagedIterator:
        return StagedIterator(self, *components)


class StagedIterator(CompositeTensor, tf.distribute.DistributedIterator):
    """Yields the batches that a `Feed` stages; inside a graph there is none, but its key queue and number.

    Can be passed to a `tf.function` as an argument.
    """

    def __init__(
        self, spec: StagedIteratorSpec, tokens: tf.Tensor, number: tf.Tensor, feed: Feed | None = None
    ) -> None:
        self._spec, self._tokens, self._number, self._feed = spec, tokens, number, feed
        if feed is not None:
            weakref.finalize(self, finalize, feed.stop).atexit = False

    _type_spec = property(lambda self: self._spec)

    @property
    def superseded(self) -> bool:
        """Whether another loop over the same generator has stopped it."""
        return self._feed is not None and self._feed.superseded

    def allow(self, batches: int) -> None:
        """See `Feed.allow`."""
        if self._feed is not None:
            self._feed.allow(batches)

    @property
    def element_spec(self) -> Structure:
        """Spec of what `get_next` returns."""
        return self._spec.element_spec

    def __iter__(self) -> StagedIterator:
        return self

    def __next__(self) -> Structure:
        try:
            return self.get_next()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None

    def get_next(self) -> Structure:
        """Returns the next batch, for all local replicas.

        Raises:
            tf.errors.OutOfRangeError: the data has ended, here or on another worker.
            tf.errors.InvalidArgumentError: the input pipeline failed at this batch.
        """
        key = self._token()
        if not tf.executing_eagerly():
            key = tf.cond(tf.equal(key, END), self._spec.staging.no_batch, lambda: tf.identity(key))
            key.set_shape([])
        elif int(key) == END:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        return self._spec.take(key)

    def get_next_as_optional(self) -> tf.experimental.Optional:
        """Returns the next batch, or an empty optional at the end of the data; raises as `get_next`."""
        key = self._token()
        return tf.cond(
            tf.equal(key, END),
            lambda: tf.experimental.Optional.empty(self.element_spec),
            lambda: tf.experimental.Optional.from_value(self._spec.take(key)),
        )

    def _token(self) -> tf.Tensor:
        """Returns the next key or END; raises if the feed reports an error."""
        if tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None:
            raise ValueError(
                "next(iterator) must be called outside of the replica function: "
                "strategy.run(replica_fn, args=(next(iterator),))"
            )
        agreement = self._spec.staging.agreement
        with tf.device(HOST):
            if tf.executing_eagerly():
                if self._feed is None:
                    raise UnsupportedError("an iterator that a tf.function returns cannot be used outside of it")
                self._feed.start()
                spans = self._spec.staging.spans
                begin = spans.now()
                if agreement is not None:
                    agreement.request_eagerly(self._feed.number)
                key, text, _ = self._dequeued()
                if spans.recorder.enabled:
                    spans.input(begin)
                if text.numpy():
                    words = text.numpy().decode()
                    raise from_text(words) or tf.errors.InvalidArgumentError(None, None, words)
                return key
            asked = [] if agreement is None else [Request(agreement, ops.get_default_graph()).send(self._number)]
            with tf.control_dependencies(asked):
                key, text, rows = self._dequeued()
            key.set_shape([])
            if (last_batch := self._spec.staging.last_batch) is not None:
                last_batch.note(self, rows)
            with tf.control_dependencies([tf.debugging.Assert(tf.equal(text, ""), [text])]):
                return tf.identity(key)

    def _dequeued(self) -> list[tf.Tensor]:
        """Returns the next token: its key, text and rows."""
        if not self._spec.hands_out:
            token: list[tf.Tensor] = tf.raw_ops.QueueDequeueV2(handle=self._tokens, component_types=TOKEN)
            return token
        both = tf.raw_ops.QueueDequeueManyV2(handle=self._tokens, n=2, component_types=TOKEN)
        second = tf.cast(tf.equal(both[0][0], GO), tf.int32)  # GO comes first, unless a step that failed has taken it
        return [each[second] for each in both]


class Loop(Request):
    """A dataset loop inside a function: TensorFlow's iterator reads, the ranks decide whether to use a batch.

    Each run of the function has an iterator of its own, which no staging thread could follow. Its batches are not known
    ahead, so the ranks agree on each one when it is read: a round trip per training batch.
    """

    def __init__(self, agreement: BatchAgreement) -> None:
        super().__init__(agreement, ops.get_default_graph())
        self._progress: IteratorProgress | None = None  # of this run; pump thread only
        with tf.init_scope(), tf.device(HOST):
            # Whether to use the batch, an error, the rows of the batch summed over all workers.
            self._answers = tf.queue.FIFOQueue(1000, [tf.bool, tf.string, tf.int64], [[], [], []], name="tfps_loop")

    def may_use(self, has_batch: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Announces this rank's batch; returns whether all ranks have one, and its rows summed over them."""
        asked = self.send(tf.where(has_batch, rows, tf.constant(_NONE, tf.int64)))
        with tf.control_dependencies([asked]), tf.device(HOST):
            used, error, total = tf.raw_ops.QueueDequeueV2(
                handle=self._answers.queue_ref, component_types=self._answers.dtypes
            )
            with tf.control_dependencies([tf.debugging.Assert(tf.equal(error, ""), [error])]):
                return tf.ensure_shape(used, []), tf.ensure_shape(total, [])

    def collect(self, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor, times: tf.Tensor) -> None:
        said, progress = int(graph_run), self._progress
        if said == _BEGINS or progress is None:
            self._begin()
        elif progress.closed:
            self._answer(None, CLOSED, UNKNOWN, ())
        else:
            if said != _NONE:
                progress.exists(progress.asked, said)
                progress.staged(progress.asked, progress.asked)
            else:
                progress.ended("")
            self.agreement.request(self._number, self.trains(), eager=False)

    def _begin(self) -> None:
        if self._progress is not None:
            self._progress.leave()
        with tf.device(HOST):
            while int(self._answers.size()):  # left from a stopped run
                self._answers.dequeue()
        self._number = next(_numbers)
        self._progress = self.agreement.follow(self._number, None, self._answer, knows_end=False)

    def _answer(self, key: int | None, error: str, rows: int, ranks: Sequence[int]) -> None:
        with tf.init_scope(), tf.device(HOST):
            self._answers.enqueue([key is not None, error, tf.constant(rows, tf.int64)])


class LoopIterator:
    """Wraps TensorFlow's iterator inside a function; several workers agree on each batch."""

    def __init__(self, iterator: Batches, staging: Staging, agreement: BatchAgreement) -> None:
        self._iterator, self._staging, self._loop = iterator, staging, Loop(agreement)
        self._loop.send(tf.constant(_BEGINS, tf.int64))

    def __iter__(self) -> LoopIterator:
        return self

    def get_next_as_optional(self) -> tf.experimental.Optional:
        """Returns the next batch; empty at the end of the data, here or (if the function trains) on another worker."""
        batch = self._iterator.get_next_as_optional()
        replicas, unknown = len(self._staging.devices), tf.constant(UNKNOWN, tf.int64)

        def rows_of_replicas() -> tf.Tensor:
            value = batch.get_value()
            found = [rows_of(distribute_utils.select_replica(replica, value)) for replica in range(replicas)]
            return tf.stack([unknown if rows is None else rows for rows in found])

        rows = tf.cond(batch.has_value(), rows_of_replicas, lambda: tf.fill([replicas], unknown))
        total = tf.where(tf.reduce_any(rows < 0), unknown, tf.reduce_sum(rows))
        used, total = self._loop.may_use(batch.has_value(), total)
        if (last_batch := self._staging.last_batch) is not None:
            known = [tf.constant([UNKNOWN], tf.int64)] if last_batch.changes else []
            last_batch.note(self, tf.concat([[total], rows, *known], 0))
        return tf.cond(used, lambda: batch, lambda: tf.experimental.Optional.empty(batch.element_spec))

    def get_next(self) -> Structure:
        """Returns the next batch; raises OutOfRangeError at the end of the data."""
        batch = self.get_next_as_optional()
        go_on = tf.cond(batch.has_value(), lambda: tf.constant(0, tf.int64), self._staging.no_batch)
        with tf.control_dependencies([go_on]):
            return batch.get_value()

    __next__ = get_next


def looped(iterator: Batches, staging: Staging, *, cuts: bool) -> Batches:
    """Returns what a loop in a function over a distributed dataset takes its batches from; `iterator` is TensorFlow's.

    Raises UnsupportedError if the dataset has global batches (`cuts`): nothing cuts them there.
    """
    if cuts and not staging.closed:
        raise UnsupportedError(
            "a loop over a distributed dataset within a tf.function cannot go on without a lost worker: with "
            "min_workers take batches outside, or in model.fit"
        )
    agreement = None if staging.closed else staging.agreement
    return iterator if agreement is None else LoopIterator(iterator, staging, agreement)


class LoopDatasetSpec(tf.TypeSpec):
    """Spec of a distributed dataset that is passed to a `tf.function`: `plain` is TensorFlow's, `number` the staging's.

    By TensorFlow's alone the function would get a dataset of which each rank takes batches without asking others.
    """

    __slots__ = ("_cuts", "_number", "_plain")
    value_type = property(lambda self: LoopDataset)

    def __init__(self, number: int, plain: tf.TypeSpec, cuts: bool) -> None:
        self._number, self._plain, self._cuts = number, plain, cuts

    def iterator(self, dataset: Batches) -> Batches:
        """Returns an iterator over TensorFlow's `dataset`."""
        return looped(iter(dataset), stagings[self._number], cuts=self._cuts)

    def _serialize(self) -> tuple[object, ...]:
        return self._number, self._plain, self._cuts

    @property
    def _component_specs(self) -> Structure:
        return self._plain._component_specs

    def _to_components(self, value: Batches) -> Structure:
        return self._plain._to_components(value.plain if isinstance(value, LoopDataset) else value)

    def _from_components(self, components: Structure) -> LoopDataset:
        return LoopDataset(self, self._plain._from_components(components))


class LoopDataset(CompositeTensor, tf.distribute.DistributedDataset):
    """A distributed dataset inside a `tf.function` that received it."""

    def __init__(self, spec: LoopDatasetSpec, plain: Batches) -> None:
        self._spec, self.plain = spec, plain

    _type_spec = property(lambda self: self._spec)
    element_spec = property(lambda self: self.plain.element_spec)
    cardinality = property(lambda self: self.plain.cardinality)
    reduce = DistributedDataset.reduce  # of which AutoGraph makes a loop

    def __iter__(self) -> Batches:
        if tf.executing_eagerly():
            raise UnsupportedError("a distributed dataset that a tf.function returns cannot be used outside of it")
        return self._spec.iterator(self.plain)
