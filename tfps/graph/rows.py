"""The rows of a replica's batch: how many there are, and one that counts for nothing where there are none.

Models fail on batches of no rows: such a replica gets the first row of its last batch that had any, or zeros.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import tensorflow as tf

from tfps.graph.tf_private import ResourceVariable
from tfps.types import Structure, Value

UNKNOWN = -1  # in place of a number of rows


def rows_of(structure: Structure) -> Value:
    """The first dimension (int64) of the first value that may have one, UNKNOWN if it turns out a scalar; else None."""
    for value in tf.nest.flatten(structure):
        value = tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else value
        if not isinstance(value, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)) or value.shape.rank == 0:
            continue
        if value.shape.rank and value.shape[0] is not None:
            return tf.constant(value.shape[0], tf.int64)
        if isinstance(value, tf.RaggedTensor):
            return tf.cast(value.nrows(), tf.int64)
        if isinstance(value, tf.SparseTensor):
            return value.dense_shape[0]
        sizes = tf.shape(value, tf.int64)
        return sizes[0] if value.shape.rank is not None else tf.concat([sizes, [UNKNOWN]], 0)[0]
    return None


class Fillers:
    """Remembers, for each local replica and kind of batch, the first row of the last batch that had rows."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, list[Value]] = {}  # eagerly
        # In graphs: the row's components, and whether there is one.
        self._variables: dict[Hashable, list[ResourceVariable]] = {}

    def fill(self, replica: int, rows: tf.Tensor, structure: Structure) -> Structure:
        """Returns `structure`, of `rows` (int64 scalar), with one row in all that has none if they are 0."""
        flat = tf.nest.flatten(structure)
        where = [index for index, value in enumerate(flat) if _has_rows(value)]
        if not where:
            return structure
        values = [flat[index] for index in where]
        if tf.executing_eagerly():
            # Sizes differ from batch to batch: only the kinds of the values count.
            key = (replica, *((type(value), value.dtype, value.shape.rank) for value in values))
            if int(rows):
                self._rows[key] = [_first_row(value) for value in values]
                return structure
            stored = self._rows.get(key) or [_blank(value) for value in values]
            filled = [_one_row(value, row) for value, row in zip(values, stored, strict=True)]
        else:
            filled = self._in_graph((replica, *(str(tf.type_spec_from_value(value)) for value in values)), rows, values)
        for index, value in zip(where, filled, strict=True):
            flat[index] = value
        return tf.nest.pack_sequence_as(structure, flat)

    def _in_graph(self, key: Hashable, rows: tf.Tensor, values: list[Value]) -> list[Value]:
        if key not in self._variables:
            any_shape = tf.TensorShape(None)
            with tf.init_scope():
                parts = tf.nest.flatten(values, expand_composites=True)
                none = [tf.zeros([0] * (each.shape.rank or 0), each.dtype) for each in parts]
                made = [ResourceVariable(each, shape=any_shape, trainable=False, name="tfps_row") for each in none]
                self._variables[key] = [*made, ResourceVariable(False, trainable=False, name="tfps_has_row")]
        *variables, stored = self._variables[key]

        def keep() -> list[Value]:
            parts = tf.nest.flatten([_first_row(each) for each in values], expand_composites=True)
            for variable, part in zip(variables, parts, strict=True):
                variable.assign(part, read_value=False)
            stored.assign(True, read_value=False)
            return values

        def fill() -> list[Value]:
            def of_variables() -> list[Value]:
                return _packed(values, [variable.read_value() for variable in variables])

            row = tf.cond(stored.read_value(), of_variables, lambda: [_blank(each) for each in values])
            return [_one_row(value, each) for value, each in zip(values, row, strict=True)]

        filled: list[Value] = tf.cond(tf.equal(rows, 0), fill, keep)
        return filled


def cut(rows: tf.Tensor, result: Structure) -> Structure:
    """Returns what a replica function of `rows` returned, without what belongs to the row that counts for nothing."""

    def own(value: Value) -> Value:
        if not _has_rows(value) or isinstance(value, tf.SparseTensor):
            return value
        traced = tf.is_symbolic_tensor(value.flat_values if isinstance(value, tf.RaggedTensor) else value)
        if traced and value.shape[0] is not None:
            return value
        size = rows_of(value)
        return value[: tf.where(tf.equal(rows, 0) & tf.equal(size, 1), tf.zeros_like(size), size)]

    return tf.nest.map_structure(own, result)


def _has_rows(value: Value) -> bool:
    return isinstance(value, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)) and bool(value.shape.rank)


def _packed(like: list[Value], components: list[tf.Tensor]) -> list[Value]:
    """Returns rows of the kinds of `like`."""
    parts = [(value, part) for value in like for part in tf.nest.flatten(value, expand_composites=True)]
    for component, (value, part) in zip(components, parts, strict=True):
        component.set_shape([1, *part.shape[1:]] if part is value else [None] * part.shape.rank)
    rows: list[Value] = tf.nest.pack_sequence_as(like, components, expand_composites=True)
    return rows


def _first_row(value: Value) -> Value:
    if not isinstance(value, tf.SparseTensor):
        return value[:1]
    shape = value.dense_shape
    one = tf.minimum(shape[:1], 1)
    return tf.sparse.slice(value, tf.zeros_like(shape), tf.concat([one, shape[1:]], 0))


def _blank(value: Value) -> Value:
    """Returns one row of zeros (a ragged or sparse one without values) as `value` has."""
    if isinstance(value, tf.SparseTensor):
        shape = tf.concat([tf.ones_like(value.dense_shape[:1]), value.dense_shape[1:]], 0)
        return tf.SparseTensor(value.indices[:0], value.values[:0], shape)
    if isinstance(value, tf.RaggedTensor):
        splits = tf.zeros([2], value.row_splits.dtype)
        return tf.RaggedTensor.from_row_splits(value.values[:0], splits, validate=False)
    return tf.zeros(tf.concat([[1], tf.shape(value)[1:]], 0), value.dtype)


def _one_row(value: Value, row: Value) -> Value:
    """Returns `row` if `value` has no rows, else `value`."""
    return tf.cond(tf.equal(rows_of(value), 0), lambda: row, lambda: value)
