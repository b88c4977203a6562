"""Which pending updates share a bucket."""

from __future__ import annotations

import tensorflow as tf

from tfps.types import Value, Variable
from tfps.updates.pending import PendingUpdate, Reduced, Reduction, fuse

FLOAT_BYTES = 4


class Named:
    """What `fuse` looks at of a variable."""

    def __init__(self, name: str, items: int, group: int) -> None:
        self._unique_id, self.shape, self.group = name, (items,), group


def update(name: str, items: int, dtype: tf.DType = tf.float32, sparse: bool = False, group: int = 0) -> PendingUpdate:
    gradient: Value = tf.zeros([items], dtype)
    if sparse:
        gradient = tf.IndexedSlices(gradient, tf.range(items))
    variable: Variable = Named(name, items, group)
    return PendingUpdate(variable, lambda: None, (), Reduced(gradient, gradient, Reduction(1)))


def names(buckets: list[list[PendingUpdate]]) -> list[list[str]]:
    return [[item.variable._unique_id for item in bucket] for bucket in buckets]


def test_variables_fuse_in_forward_order_up_to_one_slice() -> None:
    order = {name: index for index, name in enumerate("abcde")}
    updates = [update(name, 10) for name in "edcba"]
    assert names(fuse(updates, order, 20 * FLOAT_BYTES, 20 * FLOAT_BYTES)) == [["a", "b"], ["c", "d"], ["e"]]


def test_a_variable_larger_than_a_slice_is_a_bucket_of_its_own_and_does_not_part_small_ones() -> None:
    order = {name: index for index, name in enumerate("abcde")}
    updates = [update("a", 10), update("b", 1000), update("c", 10), update("d", 1000), update("e", 10)]
    assert names(fuse(updates, order, 20 * FLOAT_BYTES, 20 * FLOAT_BYTES)) == [["a", "c"], ["b"], ["d"], ["e"]]


def test_of_two_buckets_the_one_with_more_room_stays_open() -> None:
    order = {name: index for index, name in enumerate("abcd")}
    updates = [update("a", 15), update("b", 12), update("c", 6), update("d", 5)]
    assert names(fuse(updates, order, 20 * FLOAT_BYTES, 20 * FLOAT_BYTES)) == [["a"], ["b", "c"], ["d"]]


def test_dtypes_do_not_mix_and_sparse_gradients_stay_alone() -> None:
    order = {name: index for index, name in enumerate("abcd")}
    updates = [update("a", 1), update("b", 1, tf.float64), update("c", 1, sparse=True), update("d", 1)]
    assert names(fuse(updates, order, 1000, 1000)) == [["a", "d"], ["b"], ["c"]]


def test_variables_that_forward_did_not_use_come_last() -> None:
    assert names(fuse([update("x", 10), update("a", 10)], {"a": 0}, 4, 4)) == [["a"], ["x"]]


def test_the_first_buckets_stay_small_and_each_is_at_most_as_large_as_all_before_it() -> None:
    order = {f"v{index:03}": index for index in range(200)}
    buckets = fuse([update(name, 10) for name in order], order, 500 * FLOAT_BYTES, 20 * FLOAT_BYTES)
    assert [10 * len(bucket) for bucket in buckets] == [20, 20, 40, 80, 160, 320, 500, 500, 360]


def test_variables_that_may_share_a_gate_stay_together_wherever_forward_uses_them() -> None:
    order = {name: index for index, name in enumerate("abcde")}
    updates = [
        update("a", 10, group=1),
        update("b", 10, group=2),
        update("c", 10, group=1),
        update("d", 10, group=2),
    ]
    updates += [update("e", 10, sparse=True, group=2)]
    assert names(fuse(updates, order, 20 * FLOAT_BYTES, 20 * FLOAT_BYTES)) == [["a", "c"], ["b", "d"], ["e"]]
