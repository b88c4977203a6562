"""Data that Python makes batch by batch: where a `PyDataset` or a generator goes on for a worker that joins.

A `PyDataset` gives batches by their number, so it begins at the position of the others; what it does between epochs is
made up for. A generator has to begin anew, and what the others have taken is thrown away.

Tested in tests/elastic/test_joined.py.
"""

from __future__ import annotations

import collections
import copy
import inspect
import itertools
import random
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence

import keras

from tfps.errors import JoinError
from tfps.graph.patches import replaced
from tfps.keras_hooks import random_numbers
from tfps.keras_hooks.hooks import replaces
from tfps.keras_hooks.keras_private import (
    OrderedEnqueuer,
    PyDatasetAdapter,
    distributed_dataset,
    generator_adapter,
    of_tf_data,
    py_dataset_adapter,
)
from tfps.types import Argument, Batches, Function, Json, Model, Structure

_TEST = "tests/elastic/test_joined.py"
# What may have another state in the next training, by id: not all can be hashed.
_passed: weakref.WeakValueDictionary[int, Batches] = weakref.WeakValueDictionary()


class _Rest(keras.utils.PyDataset):
    """What is left of a `PyDataset` after `begin` batches.

    `state` is that of Python's generator before it was shuffled; None: it is not.
    """

    def __init__(self, whole: Batches, begin: int, state: Json) -> None:
        super().__init__()
        self._whole, self._begin, self._order = whole, begin, None
        if state is not None:
            order = list(range(whole.num_batches))
            generator = random.Random()
            generator.setstate(state)
            generator.shuffle(order)  # as Keras does
            self._order = order

    @property
    def num_batches(self) -> int | None:
        number: int | None = self._whole.num_batches
        return None if number is None else number - self._begin

    def __getitem__(self, index: int) -> Structure:
        index += self._begin
        return self._whole[index if self._order is None else self._order[index]]


@replaces(PyDatasetAdapter, "_get_iterator", _TEST)
def _get_iterator(original: Function, adapter: Batches) -> Iterator[Structure]:
    """Notes in which order a `PyDataset` is shuffled, and begins where others are."""
    begin, adapter.tfps_begin = getattr(adapter, "tfps_begin", None), None

    def batches() -> Iterator[Structure]:
        if begin is None and adapter.enqueuer is None:
            _note_order(adapter, random.getstate())
        if begin is None:
            yield from original(adapter)
            return
        _note_order(adapter, begin[1])
        rest = copy.copy(adapter)  # Keras reads it in another thread than it ends epochs
        rest.py_dataset, rest.shuffle = _Rest(adapter.py_dataset, *begin), False
        yield from original(rest)

    return batches()


@replaces(OrderedEnqueuer, "_run", _TEST)
def _run(original: Function, enqueuer: Batches) -> None:
    """As `PyDatasetAdapter._get_iterator`, where a `PyDataset` has workers."""
    begin, enqueuer.tfps_begin = getattr(enqueuer, "tfps_begin", None), None
    if begin is None:
        _note_order(enqueuer, random.getstate())
        original(enqueuer)
        return
    _note_order(enqueuer, begin[1])
    rest = _Rest(enqueuer.py_dataset, *begin)
    with replaced(enqueuer, "py_dataset", rest), replaced(enqueuer, "shuffle", False):
        original(enqueuer)


def _note_order(shuffler: Batches, state: Json) -> None:
    if shuffler.shuffle:
        shuffler.tfps_order = state


def check(epochs: Batches) -> None:
    """Refuses what a worker that joins could not read as the others do.

    Raises:
        JoinError: says what to do instead.
    """
    if epochs is None:
        raise JoinError("a worker can join a job under way in model.fit only")
    adapter = py_dataset_adapter(epochs)
    in_python = adapter is not None or generator_adapter(epochs) is not None
    if not (in_python or of_tf_data(epochs)) or not hasattr(distributed_dataset(epochs), "opened"):
        raise JoinError(
            "a worker can join a job under way where it can make the batches of the others: give fit arrays, a "
            "tf.data.Dataset, a PyDataset or a generator"
        )
    if adapter is not None and adapter.enqueuer is None:
        return
    if in_python and distributed_dataset(epochs).opened:
        raise JoinError(
            "a worker can join a job under way if Keras reads no batches of a generator, or of a PyDataset with "
            "workers, before training, but it does if other sizes than the first are unknown, and for ragged and "
            "sparse batches; use a PyDataset with workers=1 or a tf.data.Dataset"
        )
    length = None if adapter is None else adapter.num_batches
    if length is not None and (epochs.steps_per_epoch or length) < length:
        raise JoinError(
            f"a worker cannot join where a PyDataset with workers has more batches ({length}) than steps_per_epoch="
            f"{epochs.steps_per_epoch}: Keras' order in the next epoch depends on how far its workers were; use "
            "workers=1, or leave out steps_per_epoch"
        )


def check_generators(fit: Function, model: Model, args: Sequence[Argument], options: Mapping[str, Argument]) -> None:
    """Refuses arguments of `fit` of which a worker that joins has another state than the others.

    Raises:
        JoinError: says what to do instead.
    """
    given = inspect.signature(fit).bind(model, *args, **options).arguments
    data, validation = given.get("x"), given.get("validation_data")
    if isinstance(data, types.GeneratorType) or (isinstance(data, keras.utils.PyDataset) and _hooks_of(data)):
        if id(data) in _passed:
            raise JoinError(
                "a worker cannot join a training whose generator, or PyDataset with on_epoch_end, was used in a "
                "training before, as it does not know how far the others are with it; make one for each call of fit"
            )
        _passed[id(data)] = data
    if isinstance(validation, (tuple, list)) and validation:
        validation = validation[0]
    if isinstance(validation, types.GeneratorType):
        raise JoinError(
            "a worker cannot join a training whose validation_data is a generator: it would evaluate other batches "
            "than the others; give arrays, a tf.data.Dataset or a PyDataset"
        )
    if isinstance(validation, keras.utils.PyDataset):
        _check_validation(validation, given.get("validation_steps"))


def _hooks_of(data: Batches) -> list[str]:
    """Methods with which a `PyDataset` of its own kind may change itself between epochs."""
    names = ("on_epoch_begin", "on_epoch_end")
    return [each for each in names if getattr(type(data), each, None) is not getattr(keras.utils.PyDataset, each, None)]


def _check_validation(validation: Batches, steps: int | None) -> None:
    if hooks := _hooks_of(validation):
        raise JoinError(
            f"a worker cannot join a training whose validation_data is a PyDataset with {hooks[0]}, which it has "
            "missed: it would evaluate other batches than the others; give one that is the same in each epoch"
        )
    length, workers = validation.num_batches, validation.workers
    parallel = workers > 1 or (workers > 0 and validation.use_multiprocessing)
    if parallel and (length is None or (steps is not None and steps < length)):
        raise JoinError(
            "a worker cannot join a training whose validation_data is a PyDataset with workers that validation_steps "
            "does not read to its end: it would evaluate other batches than the others; use workers=1"
        )


def position(epochs: Batches, missed: int, *, goes_on: bool) -> Json:
    """What a worker that joins needs to read as this one, if `missed` epochs are over and its iterator `goes_on`."""
    adapter = py_dataset_adapter(epochs)
    if adapter is None:
        return None
    order = getattr(adapter.enqueuer or adapter, "tfps_order", None) if goes_on else None
    return {"missed": missed, "order": order, **random_numbers.states()}


def go_on(epochs: Batches, said: Json, *, opened: int, skipping: int) -> bool:
    """Makes the data go on as on another rank, whose `position` was `said`, after `opened` iterators before.

    Returns whether its next iterator has begun after the batches to be skipped: else they must be read.
    """
    if (generator := generator_adapter(epochs)) is not None and opened:  # the others have read it to its end
        collections.deque(generator.generator(), maxlen=0)
    if (adapter := py_dataset_adapter(epochs)) is None:
        return False
    for _ in range(said["missed"]):
        if hasattr(keras.utils.PyDataset, "on_epoch_begin"):
            adapter.py_dataset.on_epoch_begin()
        adapter.py_dataset.on_epoch_end()
    random_numbers.set_states(said)  # only now: these may draw numbers
    if skipping:
        begin = skipping, None if said["order"] is None else random_numbers.python_state(said["order"])
        if adapter.enqueuer is None:
            adapter.tfps_begin = begin
        elif adapter.num_batches is None:
            adapter.enqueuer.indices = itertools.count(skipping)
        else:
            adapter.tfps_begin = adapter.enqueuer.tfps_begin = begin
    return True
