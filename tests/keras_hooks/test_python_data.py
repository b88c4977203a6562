"""Where a `PyDataset` begins for a worker that joins, what it tries out a step with, and what is refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from tfps.errors import JoinError, UnsupportedError
from tfps.keras_hooks import joining, python_data
from tfps.strategy.patches import install_all
from tfps.types import Argument, Array, Batches, Structure

COUNT = 7


@pytest.fixture(autouse=True)
def _patched() -> None:
    install_all()


class Numbers(keras.utils.PyDataset):
    """Batches of which each has its number; notes which were asked for, and what happened between epochs."""

    def __init__(self, count: int | None = COUNT, **options: Argument) -> None:
        super().__init__(**options)
        self.count, self.asked = count, list[int]()
        self.hooks = list[str]()

    @property
    def num_batches(self) -> int | None:
        return self.count

    def __getitem__(self, index: int) -> tuple[Array, Array]:
        self.asked.append(index)
        return np.full([3, 1], index, np.float32), np.full([3], index)

    def on_epoch_begin(self) -> None:
        self.hooks.append("begin")

    def on_epoch_end(self) -> None:
        self.hooks.append(f"end {random.random()}")


class Plain(keras.utils.PyDataset):
    """Without methods that are called between epochs."""

    num_batches = 2

    def __getitem__(self, index: int) -> tuple[Array, Array]:
        return np.zeros([3, 1], np.float32), np.full([3], index)


def epoch(adapter: Batches, dataset: tf.data.Dataset, count: int = COUNT) -> list[int]:
    """The numbers of the next `count` batches, within an epoch as Keras has them."""
    adapter.on_epoch_begin()
    numbers = [int(y[0]) for _, y in itertools.islice(dataset, count)]
    adapter.on_epoch_end()
    return numbers


def epochs_of(adapter: Batches, **options: Argument) -> Batches:
    """What stands for Keras' iterator."""
    dataset = SimpleNamespace(opened=0)
    return SimpleNamespace(
        **{"data_adapter": adapter, "_distributed_dataset": dataset, "steps_per_epoch": None, **options}
    )


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_py_dataset_goes_on_at_the_position_of_another_one(shuffle: bool, workers: int) -> None:
    random.seed(3)
    first, second = (PyDatasetAdapter(Numbers(workers=workers), shuffle=shuffle) for _ in range(2))
    datasets = [each.get_tf_dataset() for each in (first, second)]
    first.on_epoch_end()
    epoch(first, datasets[0])
    whole = epoch(first, datasets[0])
    assert sorted(whole) == list(range(COUNT))
    assert (whole != list(range(COUNT))) == shuffle
    said = python_data.position(epochs_of(first), 1, goes_on=True)
    after = epoch(first, datasets[0])

    random.seed(99)  # another state
    second.py_dataset.asked.clear()
    assert python_data.go_on(epochs_of(second), said, opened=0, skipping=4)
    assert second.py_dataset.hooks[0] == "begin"
    assert len(second.py_dataset.hooks) == 2
    again = python_data.position(epochs_of(second), 1, goes_on=False)
    assert again["python"] == said["python"]
    assert epoch(second, datasets[1]) == whole[4:]
    assert sorted(second.py_dataset.asked) == sorted(whole[4:])  # no other was computed
    assert python_data.position(epochs_of(second), 2, goes_on=True)["order"] == said["order"]  # for the next one
    random.setstate(again["python"])
    assert epoch(second, datasets[1]) == after


@pytest.mark.parametrize("workers", [1, 2])
def test_a_py_dataset_without_end_goes_on_too(workers: int) -> None:
    adapter = PyDatasetAdapter(Numbers(None, workers=workers))
    dataset = adapter.get_tf_dataset()
    adapter.py_dataset.asked.clear()
    said = python_data.position(epochs_of(adapter), 0, goes_on=True)
    assert python_data.go_on(epochs_of(adapter), said, opened=0, skipping=100)
    assert epoch(adapter, dataset, 5) == [100, 101, 102, 103, 104]
    assert min(adapter.py_dataset.asked) == 100


def generator(count: int = COUNT) -> Iterator[tuple[Array, Array]]:
    for index in range(count):
        yield Numbers()[index]


def test_a_generator_that_others_have_read_has_ended() -> None:
    adapter = GeneratorDataAdapter(generator())
    assert not python_data.go_on(epochs_of(adapter), None, opened=1, skipping=0)
    assert [int(y[0]) for _, y in adapter.get_tf_dataset()] == [0, 1]  # which Keras has looked at


def with_workers(count: int | None = COUNT) -> PyDatasetAdapter:
    return PyDatasetAdapter(Numbers(count, workers=2))


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (lambda: PyDatasetAdapter(Numbers()), {"steps_per_epoch": 3}, ""),
        (lambda: GeneratorDataAdapter(generator()), {"steps_per_epoch": 3}, ""),
        (with_workers, {}, ""),
        (with_workers, {"steps_per_epoch": COUNT}, ""),
        (lambda: with_workers(None), {"steps_per_epoch": 3}, ""),
        (with_workers, {"steps_per_epoch": 3}, r"has more batches \(7\) than steps_per_epoch=3"),
        (with_workers, {"_distributed_dataset": SimpleNamespace(opened=1)}, "if Keras reads no batches"),
        (
            lambda: GeneratorDataAdapter(generator()),
            {"_distributed_dataset": SimpleNamespace(opened=1)},
            "if Keras reads no batches",
        ),
        (lambda: None, {}, "give fit arrays, a tf.data.Dataset, a PyDataset or a generator"),
    ],
)
def test_what_cannot_be_read_as_by_others_is_refused(make: Argument, options: dict[str, Argument], said: str) -> None:
    epochs = epochs_of(make(), **options)
    if not said:
        python_data.check(epochs)
        return
    with pytest.raises(JoinError, match=said):
        python_data.check(epochs)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"validation_data": Plain()}, ""),
        ({"validation_data": Plain(workers=2)}, ""),
        ({"validation_data": (np.zeros(3), np.zeros(3))}, ""),
        ({"validation_data": generator(), "validation_steps": 2}, "whose validation_data is a generator"),
        ({"validation_data": Numbers()}, "a PyDataset with on_epoch_begin, which it has missed"),
        (
            {"validation_data": Plain(workers=2), "validation_steps": 1},
            "that validation_steps does not read to its end",
        ),
    ],
)
def test_validation_that_would_have_other_batches_is_refused(options: dict[str, Argument], said: str) -> None:
    arguments = keras.Model.fit, keras.Model(), (np.zeros(3),), options
    if not said:
        python_data.check_generators(*arguments)
        return
    with pytest.raises(JoinError, match=said):
        python_data.check_generators(*arguments)


@pytest.mark.parametrize("make", [generator, Numbers])
def test_what_was_used_in_an_earlier_training_is_refused(make: Argument) -> None:
    data, model = make(), keras.Model()
    python_data.check_generators(keras.Model.fit, model, (data,), {})
    python_data.check_generators(keras.Model.fit, model, (make(),), {})
    with pytest.raises(JoinError, match="make one for each call of fit"):
        python_data.check_generators(keras.Model.fit, model, (), {"x": data})


@pytest.mark.parametrize(
    "spec",
    [
        (tf.TensorSpec([None, 2], tf.float32), tf.TensorSpec([None], tf.string)),
        {"a": tf.TensorSpec([None, None], tf.int64), "b": (tf.TensorSpec([], tf.bool),)},
        tf.RaggedTensorSpec([None, None], tf.int32, 1, tf.int64),
        tf.RaggedTensorSpec([None, None, None, 2], tf.float32, 2, tf.int32),
        (tf.SparseTensorSpec([None, 5], tf.float32), tf.TensorSpec([None, 1], tf.float32)),
    ],
)
def test_the_batch_of_zeros_is_as_those_of_the_data(spec: Structure) -> None:
    source = SimpleNamespace(element_spec=spec)
    dataset = joining._one_batch(SimpleNamespace(sources=[source]))
    assert dataset.element_spec == spec
    (batch,) = dataset
    assert not any(
        np.any(each.numpy() != np.zeros([], each.numpy().dtype)) for each in values(batch) if each.dtype != tf.string
    )


def values(batch: Structure) -> Iterator[tf.Tensor]:
    for each in tf.nest.flatten(batch):
        if isinstance(each, tf.RaggedTensor):
            yield each.flat_values
        else:
            yield each.values if isinstance(each, tf.SparseTensor) else each


def test_a_batch_of_unknown_rank_is_refused() -> None:
    source = SimpleNamespace(element_spec=tf.TensorSpec(None, tf.float32))
    with pytest.raises(UnsupportedError, match="dense, ragged or sparse tensors of known rank"):
        joining._one_batch(SimpleNamespace(sources=[source]))
