"""Datasets whose elements come in an order by chance: found wherever a program asks for it, and put in order."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from collections.abc import Callable

import pytest
import tensorflow as tf

from tfps.graph.tf_private import in_order, is_unordered
from tfps.strategy.patches import install_all
from tfps.types import Value

Dataset = tf.data.Dataset
ANY = tf.data.Options()
ANY.deterministic = False
ORDERED: dict[str, Callable[[], Value]] = {
    "plain": lambda: Dataset.range(12),
    "map": lambda: Dataset.range(12).map(lambda x: x, num_parallel_calls=4),
    "interleave": lambda: Dataset.range(3).interleave(lambda _: Dataset.range(4), num_parallel_calls=2),
    "an option that is on": lambda: Dataset.range(12).with_options(tf.data.Options()),
}
UNORDERED: dict[str, Callable[[], Value]] = {
    "map": lambda: Dataset.range(12).map(lambda x: x, num_parallel_calls=4, deterministic=False).batch(3),
    "batch": lambda: Dataset.range(12).batch(3, num_parallel_calls=2, deterministic=False),
    "interleave": lambda: Dataset.range(3).interleave(
        lambda _: Dataset.range(4), cycle_length=2, num_parallel_calls=2, deterministic=False
    ),
    "interleave, by position": lambda: Dataset.range(3).interleave(lambda _: Dataset.range(4), 2, 1, 2, False),
    "within another one": lambda: Dataset.range(3).flat_map(
        lambda _: Dataset.range(4).map(lambda x: x, num_parallel_calls=4, deterministic=False)
    ),
    "options": lambda: Dataset.range(12).map(lambda x: x, num_parallel_calls=4).with_options(ANY).prefetch(1),
}


@pytest.fixture(autouse=True)
def _patched() -> None:
    install_all()


@pytest.mark.parametrize("make", ORDERED.values(), ids=ORDERED)
def test_what_has_one_order_is_left_alone(make: Callable[[], Value]) -> None:
    assert not is_unordered(make())


@pytest.mark.parametrize("make", UNORDERED.values(), ids=UNORDERED)
def test_an_order_by_chance_is_found_wherever_it_is_asked_for(make: Callable[[], Value]) -> None:
    dataset = make()
    assert is_unordered(dataset)
    ordered = in_order(dataset)
    assert ordered.element_spec == dataset.element_spec
    assert ordered.cardinality() == dataset.cardinality()


def test_elements_come_in_their_order_however_long_each_takes() -> None:
    def late(x: Value) -> Value:  # the first one takes long
        return x + tf.cast(0 * tf.reduce_sum(tf.sort(tf.range(tf.where(x == 0, 3_000_000, 1)))), tf.int64)

    dataset = Dataset.range(8).map(late, num_parallel_calls=4, deterministic=False)
    assert [int(each) for each in in_order(dataset)] == list(range(8))
