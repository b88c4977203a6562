"""What global batches must be that are cut into parts for replicas: all of a batch has one first dimension, its rows.

Tested in tests/input/test_global_batches.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfps.errors import UnsupportedError, to_text
from tfps.graph.rows import UNKNOWN, rows_of
from tfps.graph.tf_private import as_long_as, paths_of
from tfps.types import Structure

_WITH_ROWS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)
_SHOWN = 8  # components that a message names
Predicate = Callable[..., tf.Tensor]  # of a batch, in the graph of a dataset


def has_one_size(element_spec: Structure) -> Predicate | None:
    """Returns what ends with an error a batch that is to be cut, unless all of it that has rows has as many.

    Scalars have no rows. None: shapes prove it.

    Raises:
        UnsupportedError: shapes prove that there are different numbers of rows.
    """
    specs = tf.nest.flatten(element_spec)
    with_rows = [index for index, spec in enumerate(specs) if isinstance(spec, _WITH_ROWS) and spec.shape.rank != 0]
    names = [f"batch{''.join(f'[{key!r}]' for key in path)}" for path in paths_of(element_spec)]
    shown = [names[index] for index in with_rows]
    sizes = [specs[index].shape[0] if specs[index].shape.rank else None for index in with_rows]
    if len({size for size in sizes if size is not None}) > 1:
        raise UnsupportedError(_refused(["?" if size is None else str(size) for size in sizes], shown))
    if len(with_rows) < 2 or None not in sizes:
        return None

    def look(*batch: Structure) -> tf.Tensor:
        flat = tf.nest.flatten(batch)
        rows = tf.stack([rows_of([flat[index]]) for index in with_rows])
        same = tf.reduce_all(tf.equal(rows, UNKNOWN) | tf.equal(rows, tf.reduce_max(rows)))

        def refuse() -> tf.Tensor:
            text = _refused([f"\0{index}\0" for index in range(len(shown))], shown)
            parts = to_text(UnsupportedError(text)).split("\0")  # text and numbers of components in turn
            said = tf.strings.join([tf.as_string(rows[int(part)]) if at % 2 else part for at, part in enumerate(parts)])
            with tf.control_dependencies([tf.debugging.Assert(False, [said])]):
                return tf.constant(False)

        return tf.cond(same, lambda: tf.constant(True), refuse)

    return look


def filtered(dataset: tf.data.Dataset, *predicates: Predicate) -> tf.data.Dataset:
    """Returns `dataset` and what `predicates`, which are always true, do with each batch, one after the other.

    A filter, because TensorFlow sees the batch size through it.
    """
    if not predicates:
        return dataset

    def look(*batch: Structure) -> tf.Tensor:
        first, *others = predicates
        found = first(*batch)
        for each in others:
            with tf.control_dependencies([found]):
                found = tf.logical_and(found, each(*batch))
        return found

    return as_long_as(dataset, dataset.filter(look))


def _refused(sizes: Sequence[str], names: Sequence[str]) -> str:
    each = ", ".join(f"{size} in {name}" for size, name in zip(sizes[:_SHOWN], names, strict=False))
    each += f" and {len(sizes) - _SHOWN} more" if len(sizes) > _SHOWN else ""
    return (
        "a batch is cut into a part for each replica, so all components of it must have one first dimension, its rows "
        f"(scalars may have none), got {each}. Pad them to one size, make batches in which each row is an example of "
        "its own (a graph, padded or ragged; batch before time), or give each worker whole batches of its own by "
        "strategy.distribute_datasets_from_function"
    )
