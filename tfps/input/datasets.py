"""Distributed datasets with staged batches, used like those of tf.distribute, and which batches a worker gets of them.

Tested in tests/input/test_staging.py, test_generators.py and test_handing_out.py there, and in
tests/integration/test_input.py.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.graph.ops import HOST
from tfps.graph.patches import replaced
from tfps.graph.rows import rows_of
from tfps.graph.tf_private import (
    DistributedDataset,
    DistributedDatasetsFromFunction,
    dummy_batch,
    in_order,
    is_unordered,
    made_by_generator,
    of_any_size,
)
from tfps.input.batch_digests import BatchDigests
from tfps.input.caches import reads_whole
from tfps.input.global_batches import filtered, has_one_size
from tfps.input.iterators import LoopDatasetSpec, StagedIterator, StagedIteratorSpec, looped
from tfps.input.same_data import DIVIDED, AutoShardPolicy, is_same_on_all, sames, shard_policy
from tfps.input.staging import Feed, Group, Stage, Staging
from tfps.keras_hooks.generators import Reading
from tfps.keras_hooks.random_numbers import of_its_own
from tfps.types import Argument, Batches, Function, Structure, Value

logger = logging.getLogger("tfps")
PER_REPLICA = tf.distribute.InputReplicationMode.PER_REPLICA
_MISSING = object()
AllData = Callable[[], list[tf.data.Dataset]]  # all workers' data, if it may be handed out


class _Staged:
    """Base of both kinds of distributed datasets: `iter` returns a `StagedIterator`."""

    staging: Staging
    on_devices = True
    digests: BatchDigests | None = None
    sources: list[tf.data.Dataset]
    all_data: AllData | None = None
    opened = 0  # how often it has been iterated over
    skipping = 0  # batches of the next iterator that others have taken
    reads_skipped = True  # whether the next iterator begins with these: they are read and thrown away
    open_elsewhere = False  # whether the others have the next iterator already
    cuts: bool = False  # sources have global batches, of which each worker cuts its part when it takes one
    reading: Reading | None = None  # of a Python generator that others may read after it
    goes_on = False  # whether the next iterator goes on where they have stopped the last one
    sizes: Callable[[int], int] | None = None  # rows of a global batch that is divided, by position, if known
    steps: int | None = None  # in which all workers use up an epoch of what is handed out; None: all data is an epoch
    _stream: Stream | None = None  # of such epochs

    @property
    def _type_spec(self: Batches) -> tf.TypeSpec:
        return LoopDatasetSpec(self.staging.number, super()._type_spec, self.cuts)  # type: ignore[misc]

    def __iter__(self: Batches) -> Batches:
        if not tf.executing_eagerly():
            return looped(super().__iter__(), self.staging, cuts=self.cuts)  # type: ignore[misc]
        if self.staging.closed:
            return super().__iter__()  # type: ignore[misc]
        extended, replicas = self._strategy.extended, len(self.staging.devices)
        all_data = self.all_data if extended.hands_out else None
        sources = self.sources if all_data is None else all_data()
        pads = self._enable_get_next_as_optional
        cuts = self.cuts and all_data is None
        element_spec = sources[0].element_spec
        if cuts:
            element_spec = of_any_size(element_spec)
        if pads and replicas > 1:  # some replicas may get an empty batch at the end
            element_spec = of_any_size(element_spec)
        spec = StagedIteratorSpec(self.staging.number, element_spec, self.on_devices, all_data is not None)
        known, batches = [int(source.cardinality()) for source in sources], None
        if min(known) >= 0:
            each = known if len(known) == replicas or cuts else [known[0] / replicas]
            batches = math.ceil(max(each)) if pads else math.floor(min(each))
        self.opened += not self.goes_on
        groups = functools.partial(read_groups, sources, 1 if cuts else replicas, element_spec, pads)
        if all_data is None:
            chosen = groups()
        else:
            if self.steps is None or self._stream is None:
                self._stream = Stream(groups, extended.exchange.peers.fetch_add)
            chosen = self._stream.epoch(f"batches/{next(self.staging.epochs)}", self.steps)
        stage = Stage(self.staging, element_spec, on_devices=self.on_devices)
        # If the data is not divided, this worker iterates alone.
        skipped, self.skipping = self.skipping, 0
        chosen = itertools.islice(chosen, skipped, None) if skipped and self.reads_skipped else chosen
        is_open, self.open_elsewhere = self.open_elsewhere, False
        cut, ranks = (extended.own_part, extended.agreed_ranks(known=is_open)) if cuts else (None, ())
        feed = Feed(
            self.staging,
            stage,
            chosen,
            batches,
            extended.shards,
            all_data is not None,
            self.digests,
            cut,
            ranks,
            skipped,
        )
        feed.uncounted = 0 if self.reads_skipped else skipped
        if self.reading is not None and all_data is None:  # batches that are handed out are not taken one by one
            feed.begins = functools.partial(self.reading.begin, feed.supersede, goes_on=self.goes_on)
        feed.sizes = self.sizes
        with tf.device(HOST):
            return StagedIterator(spec, feed.tokens.queue_ref, tf.constant(feed.number, tf.int64), feed)

    def open_until(self, count: int, skipping: int, *, reads_skipped: bool, open_elsewhere: bool) -> None:
        """Iterates until it has been done `count` times: each time its data may have another order.

        The next time it begins after the first `skipping` batches; without `reads_skipped` its data does by itself.
        `open_elsewhere`: that is an iterator which the others have already.
        """
        self.skipping, self.reads_skipped, self.open_elsewhere = skipping, reads_skipped, open_elsewhere
        for _ in range(count - self.opened):
            with tf.device(HOST):
                for source in self.sources:
                    iter(source)
        self.opened = max(self.opened, count)

    def begin_anew(self) -> None:
        """Makes the next epoch begin with the first batch."""
        self._stream = None


class StagedDataset(_Staged, DistributedDataset):
    """A distributed dataset that stages this worker's part."""

    sources = property(lambda self: list(self._cloned_datasets))


class StagedDatasetFromFunction(_Staged, DistributedDatasetsFromFunction):
    """Like `StagedDataset`, for datasets that a function returns."""

    sources = property(lambda self: list(self._datasets))


def distribute_dataset(
    extended: tf.distribute.StrategyExtended, dataset: Batches, options: tf.distribute.InputOptions | None
) -> Batches:
    context = extended._make_input_context()
    if context.num_input_pipelines > 1 and shard_policy(dataset) in (*DIVIDED, AutoShardPolicy.FILE):
        dataset = _as_one_process(dataset)
    if extended.changes and extended.shards and shard_policy(dataset) != AutoShardPolicy.OFF:
        return _distribute_global_batches(extended, dataset, options)
    _check_constant(extended)
    in_python = context.num_input_pipelines > 1 and of_all_workers(dataset)
    if in_python or (context.num_replicas_in_sync > 1 and (has_scalars(dataset) or has_sparse(dataset))):
        return _distribute_rows(extended, dataset, options)
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
    digests, dataset = _watched(extended, dataset)
    arguments = {
        "input_workers": _input_workers(extended, options),
        "strategy": extended._container_strategy(),
        "dataset": dataset,
        "num_replicas_in_sync": context.num_replicas_in_sync,
        "input_context": context,
        "options": options,
    }

    def all_data() -> list[tf.data.Dataset]:
        # Each worker reads all of it, as one with all replicas of the job.
        everything = tf.distribute.InputContext(num_replicas_in_sync=context.num_replicas_in_sync)
        return list(DistributedDataset(**{**arguments, "input_context": everything})._cloned_datasets)

    divides = shard_policy(dataset) in DIVIDED
    return _made(DistributedDataset, StagedDataset, arguments, digests, all_data if divides else None)


def _check_constant(extended: tf.distribute.StrategyExtended) -> None:
    """Refuses data that each worker makes for itself, a fixed part of each batch, where their number may grow."""
    if extended.grows and extended.shards:
        raise UnsupportedError(
            "data that each worker makes for itself (AutoShardPolicy.OFF, distribute_datasets_from_function) does not "
            "work with max_workers: parts of each batch would be those of workers that have not come; give all workers "
            "the same tf.data.Dataset, of which each takes its rows"
        )


def _as_one_process(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `dataset`, divided by rows if it reads what one process has cached: it would not be divided by files."""
    if not reads_whole(dataset):
        return dataset
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    return dataset.with_options(options)


def _ordered(extended: tf.distribute.StrategyExtended, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `dataset`, in one order if ranks make global batches of it: else rows would be missing, others twice."""
    several = extended.shards and extended._make_input_context().num_input_pipelines > 1
    if not several or not is_same_on_all(dataset) or not is_unordered(dataset):
        return dataset
    _say_ordered()
    return in_order(dataset)


@functools.cache
def _say_ordered() -> None:
    logger.info(
        "tfps: a dataset is read in a fixed order, though a map, batch, interleave or its options say "
        "deterministic=False: each rank makes the global batches and takes its rows of them. For an order by chance "
        "give each rank its own data (AutoShardPolicy.FILE or OFF)"
    )


def _watched(extended: tf.distribute.StrategyExtended, dataset: Batches) -> tuple[BatchDigests | None, Batches]:
    """Returns `dataset`, whose batches can be cut or end with an error, and what knows digests of its batches.

    That is None unless all ranks make the same.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return None, dataset
    dataset = _ordered(extended, dataset)
    cuts = (extended.changes and extended.shards) or extended._make_input_context().num_replicas_in_sync > 1
    looks = [has_one_size(dataset.element_spec)] if cuts else []
    every, digests = (extended.staging.check_every if extended.staging and extended.shards else 0), None
    if every and tf.executing_eagerly() and is_same_on_all(dataset):
        digests = BatchDigests(sames(dataset), every)
        looks.append(digests.look())
    return digests, filtered(dataset, *filter(None, looks))


def _distribute_rows(
    extended: tf.distribute.StrategyExtended, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None
) -> Batches:
    context, own, policy = extended._make_input_context(), len(extended._devices), shard_policy(dataset)
    replicas = context.num_replicas_in_sync
    if policy == AutoShardPolicy.FILE:
        raise UnsupportedError(
            "AutoShardPolicy.FILE does not work with batches that have a scalar beside their rows, which TensorFlow "
            "cannot cut; use AutoShardPolicy.DATA, or repeat the scalar for each row"
        )
    digests, dataset = _watched(extended, dataset)
    has_own = policy == AutoShardPolicy.OFF  # data of each worker
    split = own_rows(dataset, replicas, *((0, replicas) if has_own else (own * context.input_pipeline_id, own)))
    return distribute_datasets_from_function(
        extended, lambda _: split, options, digests, lambda: [own_rows(dataset, replicas, 0, replicas)]
    )


def _distribute_global_batches(
    extended: tf.distribute.StrategyExtended, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None
) -> Batches:
    """Each worker makes all batches, and cuts its part of each when it is known who else takes it."""
    if shard_policy(dataset) == AutoShardPolicy.FILE:
        raise UnsupportedError(
            "AutoShardPolicy.FILE does not work with min_workers: nobody else would read a lost worker's files; use "
            "AutoShardPolicy.DATA"
        )
    digests, dataset = _watched(extended, dataset)
    replicas = extended._num_replicas_in_sync
    made = distribute_datasets_from_function(
        extended, lambda _: dataset, options, digests, lambda: [own_rows(dataset, replicas, 0, replicas)]
    )
    if not isinstance(made, StagedDatasetFromFunction):
        raise UnsupportedError(
            "with min_workers a dataset must be distributed outside of a tf.function and not be placed on a device; "
            "leave out experimental_place_dataset_on_device"
        )
    made.cuts = True
    return made


def distribute_datasets_from_function(
    extended: tf.distribute.StrategyExtended,
    dataset_fn: Function,
    options: tf.distribute.InputOptions | None,
    digests: BatchDigests | None = None,
    all_data: AllData | None = None,
) -> Batches:
    if all_data is None:
        _check_constant(extended)

    def own_data(context: tf.distribute.InputContext) -> tf.data.Dataset:
        with of_its_own():
            return dataset_fn(context)

    workers = _input_workers(extended, options)
    arguments = {
        "input_workers": workers,
        "strategy": extended._container_strategy(),
        "input_contexts": [extended._make_input_context()] * workers.num_workers,
        "dataset_fn": own_data,
        "options": options,
    }
    return _made(DistributedDatasetsFromFunction, StagedDatasetFromFunction, arguments, digests, all_data)


def _input_workers(extended: tf.distribute.StrategyExtended, options: tf.distribute.InputOptions | None) -> Structure:
    # TensorFlow would change it for all later datasets.
    with replaced(extended, "_input_workers_devices", extended._input_workers_devices):
        return extended._input_workers_with_options(options)


def _made(
    plain: type, staged: type, arguments: dict[str, Argument], digests: BatchDigests | None, all_data: AllData | None
) -> Batches:
    extended, options = arguments["strategy"].extended, arguments["options"]
    staging, placed = extended.staging, options is not None and options.experimental_place_dataset_on_device
    if staging is None or staging.closed or placed or not tf.executing_eagerly():
        return plain(**arguments)
    made = staged(**arguments)
    made.staging, made.digests = staging, digests
    made.all_data = functools.cache(all_data) if all_data is not None and extended.hands_out else None
    # Batches for CPU devices are always on the host.
    made.on_devices = options is None or options.experimental_fetch_to_device
    return made


def of_all_workers(dataset: Batches) -> bool:
    """Returns whether `dataset` yields batches made in Python, whose size TensorFlow does not know."""
    return shard_policy(dataset) == AutoShardPolicy.AUTO and made_by_generator(dataset)


def has_scalars(dataset: Batches) -> bool:
    """Returns whether batches of `dataset` have scalars beside what has rows."""
    if not isinstance(dataset, tf.data.Dataset):
        return False
    ranks = {getattr(getattr(spec, "shape", None), "rank", None) for spec in tf.nest.flatten(dataset.element_spec)}
    return 0 in ranks and len(ranks) > 1


def has_sparse(dataset: Batches) -> bool:
    """Returns whether to cut batches with sparse tensors here: TensorFlow's empty parts of these cannot be read.

    Not where workers read different files, which TensorFlow alone knows.
    """
    if not isinstance(dataset, tf.data.Dataset) or shard_policy(dataset) == AutoShardPolicy.FILE:
        return False
    return any(isinstance(spec, tf.SparseTensorSpec) for spec in tf.nest.flatten(dataset.element_spec))


def own_rows(dataset: tf.data.Dataset, replicas: int, first: int, count: int) -> tf.data.Dataset:
    """Returns the rows of replicas `first` to `first + count - 1` of `replicas`, one element each.

    Parts of a batch differ by at most one row; if it has fewer rows than replicas, some are empty. Nothing is read
    ahead of those that Keras reads without, as it may be too early there (keras_hooks/loops.py).
    """

    def parts(*batch: object) -> tf.data.Dataset:
        of_all = batch if len(batch) > 1 else batch[0]
        elements = [part_of(replica, replicas, of_all) for replica in range(first, first + count)]
        datasets = [tf.data.Dataset.from_tensors(element) for element in elements]
        return functools.reduce(tf.data.Dataset.concatenate, datasets)

    split = dataset.flat_map(parts)
    if (batches := int(dataset.cardinality())) >= 0:
        split = split.apply(tf.data.experimental.assert_cardinality(batches * count))
    return split if dataset.options().autotune.enabled is False else split.prefetch(count)


def part_of(replica: int, replicas: int, batch: Structure) -> Structure:
    """Returns the rows of `batch` that are for one of its `replicas`."""

    def cut(value: Value) -> Value:
        rows = rows_of([value])
        if rows is None:
            return value
        start, end = (-(-rows * part // replicas) for part in (replica, replica + 1))  # the first parts may be larger
        if isinstance(value, tf.SparseTensor):
            within = value.dense_shape[1:]
            begin, size = tf.concat([[start], tf.zeros_like(within)], 0), tf.concat([[end - start], within], 0)
            return tf.sparse.slice(value, begin, size)
        return value[start:end]

    return tf.nest.map_structure(cut, batch)


def read_groups(
    datasets: Sequence[tf.data.Dataset], replicas: int, element_spec: Structure, pads: bool
) -> Iterator[Group]:
    """Returns groups of batches, one per local replica, in order; begins to read at once.

    All replicas read one dataset in turn, or each has its own. If the last group is partial, it is dropped or, with
    `pads`, gets empty batches.
    """
    with tf.device(HOST):  # now, as without staging: even an unused iterator advances reshuffling
        sources = [iter(dataset) for dataset in datasets]

    def read() -> Group | None:
        group = [next(sources[replica % len(sources)], _MISSING) for replica in range(replicas)]
        missing = sum(batch is _MISSING for batch in group)
        if missing == replicas or (missing and not pads):
            return None
        with tf.device(HOST):
            return [dummy_batch(element_spec) if each is _MISSING else each for each in group]

    return iter(read, None)


class Stream:
    """A dataset from which groups are handed out, epoch by epoch; `draw` draws a number from a counter."""

    def __init__(self, open_groups: Callable[[], Iterator[Group]], draw: Callable[[str], int]) -> None:
        self._open, self._draw = open_groups, draw
        self._groups = open_groups()
        self._position = 0  # of the group that is read next
        self._begin = self._steps = 0  # of the epoch: its first position, and how many groups it has if that is limited

    def epoch(self, counter: str, steps: int | None) -> Iterator[Group]:
        """The groups of the next epoch that this worker uses; the last epoch's must have ended.

        `counter` is the same on all ranks, another one for each epoch, which has `steps` for all workers together
        (None: all that are left).
        """
        self._begin += self._steps
        self._steps = steps or 0
        last = -1

        def choose() -> Group | None:
            nonlocal last
            number = self._draw(counter)
            if number <= last:
                raise UnsupportedError(
                    "a loop over a distributed dataset with mode='async' must draw a batch at least once while 1024 "
                    f"others begin; the pserver has forgotten this one: got batch {number} after batch {last}"
                )
            last = number
            return self._at(number) if steps is None or number < steps else None

        return iter(choose, None)

    def _at(self, number: int) -> Group | None:
        """Group `number` of the epoch; None if the data ends before."""
        while True:
            group: Group | None = []
            while group is not None and self._position <= self._begin + number:
                group = next(self._groups, None)
                self._position += group is not None
            if group is not None or not 0 < self._position <= self._begin:
                return group
            # It has ended with the last epoch, on all ranks: this one reads it anew.
            self._begin = self._position = 0
            self._groups = self._open()
