"""Distributed datasets and iterators with staged batches, used like those of tf.distribute.

TensorFlow's distributed dataset still shards and rebatches; only its iterator is replaced.

Tested in tests/input/test_staging.py and tests/integration/test_input.py.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfps.errors import UnsupportedError, from_text
from tfps.graph.ops import HOST
from tfps.graph.tf_private import (
    CompositeTensor,
    DistributedDataset,
    DistributedDatasetsFromFunction,
    distribute_utils,
    of_any_size,
    values,
)
from tfps.input import generators
from tfps.input.first_batches import FirstBatches, is_same_on_all
from tfps.input.handing_out import Group, Groups, Stream
from tfps.input.loops import Loop, LoopIterator
from tfps.input.staging import END, GO, TOKEN, Feed, Staging
from tfps.keras_hooks.random_numbers import of_its_own
from tfps.types import Argument, Batches, Function, Structure

PER_REPLICA = tf.distribute.InputReplicationMode.PER_REPLICA


class StagedIteratorSpec(tf.TypeSpec):
    """Spec of a `StagedIterator`: equal for all iterators over one dataset, so a new epoch needs no retracing.

    Args:
        number: of the staging.
        element_spec: of one replica's batch.
        on_devices: True if batches are staged on the replicas' devices, False for the host.
        hands_out: whether batches are handed out.
    """

    __slots__ = ("_element_spec", "_number", "_on_devices", "hands_out")
    value_type = property(lambda self: StagedIterator)

    def __init__(self, number: int, element_spec: Structure, on_devices: bool, hands_out: bool = False) -> None:
        self._number, self._element_spec, self._on_devices = number, element_spec, on_devices
        self.hands_out = hands_out

    @property
    def staging(self) -> Staging:
        return Staging.of(self._number)

    @property
    def element_spec(self) -> Structure:
        """Spec of what `get_next` returns."""
        replicas = len(self.staging.devices)
        if replicas == 1:
            return self._element_spec
        return tf.nest.map_structure(lambda spec: values.PerReplicaSpec(*[spec] * replicas), self._element_spec)

    def take(self, key: tf.Tensor) -> Structure:
        """Returns the batch of `key`, a PerReplica if there are several replicas."""
        stage = self.staging.stage(self._element_spec, on_devices=self._on_devices)
        return distribute_utils.regroup(stage.take(key), always_wrap=stage.replicas > 1)

    def _serialize(self) -> tuple[object, ...]:
        return self._number, self._element_spec, self._on_devices, self.hands_out

    @property
    def _component_specs(self) -> list[tf.TensorSpec]:
        return [tf.TensorSpec([], tf.resource), tf.TensorSpec([], tf.int64)]

    def _to_components(self, value: StagedIterator) -> list[tf.Tensor]:
        return value.components()

    def _from_components(self, components: list[tf.Tensor]) -> StagedIterator:
        return StagedIterator(self, *components)


class StagedIterator(CompositeTensor, tf.distribute.DistributedIterator):
    """Yields the batches that a `Feed` stages. Can be passed to a `tf.function` as an argument.

    Args:
        tokens: resource handle of the key queue.
        number: of the feed, int64 scalar.
        feed: None inside a graph.
    """

    def __init__(
        self, spec: StagedIteratorSpec, tokens: tf.Tensor, number: tf.Tensor, feed: Feed | None = None
    ) -> None:
        self._spec, self._tokens, self._number, self._feed = spec, tokens, number, feed
        if feed is not None:
            weakref.finalize(self, feed.stop).atexit = False

    @property
    def _type_spec(self) -> StagedIteratorSpec:
        return self._spec

    def allow(self, batches: int) -> None:
        """See `Feed.allow`."""
        if self._feed is not None:
            self._feed.allow(batches)

    def components(self) -> list[tf.Tensor]:
        """Returns the tensors that represent this iterator in a graph."""
        if self._feed is not None:
            self._feed.start()
        return [self._tokens, self._number]

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
        if tf.executing_eagerly():
            if int(key) == END:
                raise tf.errors.OutOfRangeError(None, None, "End of sequence")
            return self._spec.take(key)
        key = tf.cond(tf.equal(key, END), self._spec.staging.no_batch, lambda: tf.identity(key))
        key.set_shape([])
        return self._spec.take(key)

    def get_next_as_optional(self) -> tf.experimental.Optional:
        """Returns the next batch, or an empty optional at the end of the data.

        Raises:
            tf.errors.InvalidArgumentError: as `get_next`.
        """
        key = self._token()

        def batch() -> tf.experimental.Optional:
            return tf.experimental.Optional.from_value(self._spec.take(key))

        def nothing() -> tf.experimental.Optional:
            return tf.experimental.Optional.empty(self.element_spec)

        if tf.executing_eagerly():
            return nothing() if int(key) == END else batch()
        return tf.cond(tf.equal(key, END), nothing, batch)

    def _token(self) -> tf.Tensor:
        """Returns the next key or END; raises if the feed reports an error."""
        if tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None:
            raise ValueError(
                "next(iterator) must be called outside of the replica function: "
                "strategy.run(replica_fn, args=(next(iterator),))"
            )
        lockstep = self._spec.staging.lockstep
        with tf.device(HOST):
            if tf.executing_eagerly():
                if self._feed is None:
                    raise UnsupportedError("an iterator that a tf.function returns cannot be used outside of it")
                self._feed.start()
                spans = self._spec.staging.spans
                begin = spans.now()
                if lockstep is not None:
                    lockstep.request_eagerly(self._feed.number)
                key, text, _ = self._dequeued()
                if spans.recorder.enabled:
                    spans.input(begin)
                if text.numpy():
                    words = text.numpy().decode()
                    raise from_text(words) or tf.errors.InvalidArgumentError(None, None, words)
                return key
            asked = [] if lockstep is None else [lockstep.request_in_graph(self._number)]
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


class _Staged:
    """Base of both kinds of distributed datasets: `iter` returns a `StagedIterator`."""

    staging: Staging
    on_devices = True
    first: FirstBatches | None = None
    sources: list[tf.data.Dataset]
    whole: Callable[[], list[tf.data.Dataset]] | None = None  # all workers' data, if it may be handed out
    steps: int | None = None  # in which all workers use up an epoch of what is handed out; None: all data is an epoch
    _stream: Stream | None = None  # of such epochs

    def __iter__(self: Batches) -> Batches:
        if self.staging.closed or not tf.executing_eagerly():
            iterator = super().__iter__()  # type: ignore[misc]
            lockstep = None if self.staging.closed else self.staging.lockstep
            return iterator if lockstep is None else LoopIterator(iterator, self.staging, Loop(lockstep))
        extended = self._strategy.extended
        whole = self.whole if extended.hands_out else None
        sources = self.sources if whole is None else whole()
        pads = self._enable_get_next_as_optional
        element_spec = sources[0].element_spec
        if pads and len(self.staging.devices) > 1:  # some replicas may get an empty batch at the end
            element_spec = of_any_size(element_spec)
        spec = StagedIteratorSpec(self.staging.number, element_spec, self.on_devices, whole is not None)
        stage = self.staging.stage(element_spec, on_devices=self.on_devices)
        groups = functools.partial(Groups, sources, stage.replicas, element_spec, pads)
        known = [int(source.cardinality()) for source in sources]
        batches = None
        if min(known) >= 0:
            each = known if len(known) == stage.replicas else [known[0] / stage.replicas]
            batches = math.ceil(max(each)) if pads else math.floor(min(each))
        meets = extended.shards  # else this worker iterates alone
        chosen = groups() if whole is None else self._next_epoch(groups)
        feed = Feed(self.staging, stage, chosen, batches, meets, whole is not None, self.first)
        with tf.device(HOST):
            return StagedIterator(spec, feed.tokens.queue_ref, tf.constant(feed.number, tf.int64), feed)

    def _next_epoch(self, open_groups: Callable[[], Iterator[Group]]) -> Iterator[Group]:
        """Returns the batches of the next epoch that this worker draws."""
        if self.steps is None or self._stream is None:
            self._stream = Stream(open_groups, self.staging.fetch_add)
        return self._stream.epoch(f"batches/{self.staging.next_epoch()}", self.steps)

    def begin_anew(self) -> None:
        """Makes the next epoch begin with the first batch."""
        self._stream = None


class StagedDataset(_Staged, DistributedDataset):
    """A distributed dataset that stages this worker's part."""

    @property
    def sources(self) -> list[tf.data.Dataset]:  # type: ignore[override]
        return list(self._cloned_datasets)


class StagedDatasetFromFunction(_Staged, DistributedDatasetsFromFunction):
    """Like `StagedDataset`, for datasets that a function returns."""

    @property
    def sources(self) -> list[tf.data.Dataset]:  # type: ignore[override]
        return list(self._datasets)


def distribute_dataset(
    extended: tf.distribute.StrategyExtended,
    staging: Staging | None,
    dataset: Batches,
    context: tf.distribute.InputContext,
    options: tf.distribute.InputOptions | None,
) -> Batches:
    """Returns what `experimental_distribute_dataset` does; `staging` None: no staging.

    Raises:
        UnsupportedError: `options` ask for one dataset per replica, which requires a dataset function.
    """
    if options and options.experimental_replication_mode == PER_REPLICA:
        raise UnsupportedError(
            "InputReplicationMode.PER_REPLICA works with distribute_datasets_from_function only, as in TensorFlow"
        )
    if options is None and len(extended._devices) == 1 and "CPU" in extended._devices[0]:
        # With one device "per replica" is equivalent and avoids TensorFlow's multi-device iterator, which takes 0.1 s
        # to create at each epoch and may crash the process when deleted early (a race in its background thread,
        # seen in TensorFlow 2.21 as a core dump in MultiDeviceBuffer::BackgroundThread).
        options = tf.distribute.InputOptions(
            experimental_fetch_to_device=False, experimental_replication_mode=PER_REPLICA
        )
    first, dataset = _watched(extended, staging, dataset)
    arguments = {
        "input_workers": _input_workers(extended, options),
        "strategy": extended._container_strategy(),
        "dataset": dataset,
        "num_replicas_in_sync": context.num_replicas_in_sync,
        "input_context": context,
        "options": options,
    }
    made = _made(staging, DistributedDataset, StagedDataset, arguments, options)
    if isinstance(made, _Staged):
        made.first = first
    if isinstance(made, _Staged) and extended.hands_out and _may_be_handed_out(dataset):
        # As for one worker with all replicas of the job.
        everything = tf.distribute.InputContext(num_replicas_in_sync=context.num_replicas_in_sync)
        made.whole = functools.cache(
            lambda: list(DistributedDataset(**{**arguments, "input_context": everything})._cloned_datasets)
        )
    return made


def _watched(
    extended: tf.distribute.StrategyExtended, staging: Staging | None, dataset: Batches
) -> tuple[FirstBatches | None, Batches]:
    """Returns what knows the first batches of the second if all ranks make the same; else None and `dataset`."""
    compares = staging is not None and staging.compares and extended.shards and tf.executing_eagerly()
    if not compares or not is_same_on_all(dataset):
        return None, dataset
    first = FirstBatches()
    return first, first.watch(dataset)


def _may_be_handed_out(dataset: Batches) -> bool:
    """Whether each worker may read all of `dataset`, rather than what its program or its files give it."""
    if not isinstance(dataset, tf.data.Dataset):
        return False
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return bool(policy in (tf.data.experimental.AutoShardPolicy.AUTO, tf.data.experimental.AutoShardPolicy.DATA))


def distribute_rows(
    extended: tf.distribute.StrategyExtended,
    staging: Staging | None,
    dataset: tf.data.Dataset,
    context: tf.distribute.InputContext,
    options: tf.distribute.InputOptions | None,
) -> Batches:
    """Returns what `distribute_dataset` does, for batches that are cut by rows; see generators.py.

    Raises:
        UnsupportedError: `dataset` is to be sharded by its files.
    """
    replicas, own = context.num_replicas_in_sync, len(extended._devices)
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == tf.data.experimental.AutoShardPolicy.FILE:
        raise UnsupportedError(
            "AutoShardPolicy.FILE does not work with batches that have a scalar beside their rows, which TensorFlow "
            "cannot cut; use AutoShardPolicy.DATA, or repeat the scalar for each row"
        )
    first, dataset = _watched(extended, staging, dataset)
    if policy == tf.data.experimental.AutoShardPolicy.OFF:  # each worker has data of its own
        split = generators.own_rows(dataset, replicas, 0, replicas)
    else:
        split = generators.own_rows(dataset, replicas, own * context.input_pipeline_id, own)
    made = distribute_datasets_from_function(extended, staging, lambda _: split, context, options)
    if isinstance(made, _Staged):
        made.first = first
    if isinstance(made, _Staged) and extended.hands_out:
        made.whole = functools.cache(lambda: [generators.own_rows(dataset, replicas, 0, replicas)])
    return made


def distribute_datasets_from_function(
    extended: tf.distribute.StrategyExtended,
    staging: Staging | None,
    dataset_fn: Function,
    context: tf.distribute.InputContext,
    options: tf.distribute.InputOptions | None,
) -> Batches:
    """Returns the result of `distribute_datasets_from_function`."""

    def own_data(context: tf.distribute.InputContext) -> tf.data.Dataset:
        with of_its_own():
            return dataset_fn(context)

    workers = _input_workers(extended, options)
    arguments = {
        "input_workers": workers,
        "strategy": extended._container_strategy(),
        "input_contexts": [context] * workers.num_workers,
        "dataset_fn": own_data,
        "options": options,
    }
    return _made(staging, DistributedDatasetsFromFunction, StagedDatasetFromFunction, arguments, options)


def _input_workers(extended: tf.distribute.StrategyExtended, options: tf.distribute.InputOptions | None) -> Structure:
    before = extended._input_workers_devices
    try:
        return extended._input_workers_with_options(options)
    finally:
        extended._input_workers_devices = before  # TensorFlow would change it for all later datasets


def _made(
    staging: Staging | None,
    plain: type,
    staged: type,
    arguments: dict[str, Argument],
    options: tf.distribute.InputOptions | None,
) -> Batches:
    on_devices_already = bool(options and options.experimental_place_dataset_on_device)
    if staging is None or staging.closed or on_devices_already or not tf.executing_eagerly():
        return plain(**arguments)
    made = staged(**arguments)
    made.staging = staging
    # Batches for CPU devices are always on the host.
    made.on_devices = options is None or options.experimental_fetch_to_device
    return made
