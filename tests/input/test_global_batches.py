"""Batches that are cut have one first dimension, or end with an error that names what has another."""

from __future__ import annotations

import contextlib
import os
import re

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pytest
import tensorflow as tf

import tfps
from tfps.errors import UnsupportedError, in_graph_error
from tfps.input.global_batches import filtered, has_one_size
from tfps.types import Batches, Structure

NODES, EDGES = np.ones((3, 2), "float32"), np.zeros((5, 2), "int64")
DEVICES = ["CPU:0", "CPU:1"]
RAGGED = tf.RaggedTensor.from_row_lengths(np.ones((5, 4), "float32"), [2, 0, 3])
SPARSE = tf.sparse.from_dense(np.eye(3))


def of(batch: Structure, *, sizes: int | None = None) -> tf.data.Dataset:
    """A dataset of `batch`, of which TensorFlow does not know how many rows it has."""

    def unknown(value: tf.Tensor) -> tf.TensorSpec:
        spec = tf.type_spec_from_value(tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else value)
        return spec._unbatch()._batch(sizes) if spec.shape.rank else spec

    def generate() -> Batches:
        yield batch

    return tf.data.Dataset.from_generator(generate, output_signature=tf.nest.map_structure(unknown, batch))


@pytest.mark.parametrize(
    ("batch", "shown"),
    [
        (
            ({"nodes": NODES, "edges": EDGES}, NODES[:, 0]),
            r"5 in batch\[0\]\['edges'\], 3 in batch\[0\]\['nodes'\], 3 in batch\[1\]",
        ),
        ((np.ones((7, 3, 2)), NODES), r"7 in batch\[0\], 3 in batch\[1\]"),
        ((RAGGED, EDGES), r"3 in batch\[0\], 5 in batch\[1\]"),
        ((SPARSE, EDGES), r"3 in batch\[0\], 5 in batch\[1\]"),
        ((NODES, tf.constant(2), NODES[:1]), r"3 in batch\[0\], 1 in batch\[2\]"),
        ((NODES, NODES[:0]), r"3 in batch\[0\], 0 in batch\[1\]"),
    ],
)
def test_other_first_dimensions_end_with_an_error_that_names_them_and_what_to_do(batch: Structure, shown: str) -> None:
    data = of(batch)
    look = has_one_size(data.element_spec)
    assert look is not None
    with pytest.raises(tf.errors.InvalidArgumentError) as failed:
        list(filtered(data, look))
    error = in_graph_error(failed.value.message)
    assert isinstance(error, UnsupportedError)
    assert re.search(f"got {shown}.*from_function", str(error))


def test_batches_of_one_size_pass_as_they_are() -> None:
    batch = {
        "x": NODES,
        "scalar": tf.constant(2),
        "ragged": RAGGED,
        "sparse": SPARSE,
        "text": np.array(["a", "b", "c"]),
    }
    data = of(batch).apply(tf.data.experimental.assert_cardinality(1))
    watched = filtered(data, has_one_size(data.element_spec))  # type: ignore[arg-type]
    assert watched.element_spec == data.element_spec
    assert int(watched.cardinality()) == 1
    (found,) = watched
    np.testing.assert_array_equal(found["x"], NODES)


def test_where_shapes_tell_nothing_is_added_or_the_data_is_refused_at_once() -> None:
    slices = tf.data.Dataset.from_tensor_slices((np.ones((8, 2)), np.ones(8)))
    assert has_one_size(slices.batch(4, drop_remainder=True).element_spec) is None
    assert has_one_size(tf.data.Dataset.from_tensor_slices(np.ones(8)).batch(4).element_spec) is None
    assert has_one_size((tf.TensorSpec([None, 2]), tf.TensorSpec([]))) is None
    with pytest.raises(UnsupportedError, match=r"got 3 in batch\['a'\], 5 in batch\['b'\]"):
        has_one_size({"a": tf.TensorSpec([3, 2]), "b": tf.TensorSpec([5]), "c": tf.TensorSpec([None])})


def test_devices_of_one_worker_refuse_them_too_and_one_device_and_data_of_each_worker_do_not() -> None:
    graph = of((NODES, EDGES))

    @tf.function
    def loop(batches: Batches) -> tf.Tensor:
        total = tf.constant(0)
        for _ in batches:
            total += 1
        return total

    with contextlib.closing(tfps.Strategy(devices=DEVICES)) as strategy:
        for read in (list, loop):
            with pytest.raises(UnsupportedError, match=r"3 in batch\[0\], 5 in batch\[1\]"):
                read(strategy.experimental_distribute_dataset(graph))
        assert len(list(strategy.distribute_datasets_from_function(lambda _: graph.repeat(2)))) == 1
    with contextlib.closing(tfps.Strategy(devices=DEVICES[:1])) as strategy:
        assert len(list(strategy.experimental_distribute_dataset(graph))) == 1


@pytest.mark.parametrize("deep", [False, True])
def test_a_ragged_part_without_rows_keeps_its_dense_inner_axes(deep: bool) -> None:
    ragged = RAGGED if not deep else tf.RaggedTensor.from_row_lengths(RAGGED, [1, 0, 2])
    shapes: list[tf.TensorShape] = []

    @tf.function
    def loop(batches: Batches) -> tf.Tensor:
        last = tf.zeros([2, 2], tf.int32)
        for batch in batches:
            last = tf.stack([tf.shape(each.flat_values) for each in batch.values])
        return last

    with contextlib.closing(tfps.Strategy(devices=DEVICES)) as strategy:
        data = tf.data.Dataset.from_tensor_slices(ragged).batch(2)  # of the last batch the second device has no row
        for batch in strategy.experimental_distribute_dataset(data):
            shapes = [each.flat_values.shape for each in strategy.experimental_local_results(batch)]
        assert [shape[1:] for shape in shapes] == [[4], [4]]
        assert loop(strategy.experimental_distribute_dataset(data)).numpy().tolist() == [list(each) for each in shapes]
