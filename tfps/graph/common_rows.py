"""Sparse gradients of lookups that all replicas make alike, as those of positions: summed, not gathered.

In one process each is one slice, and Adam squares slice by slice. Until then their indices travel as -1 - index. So it
is with lookups that take each id of the batch once; see unique_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfps.graph import unique_rows
from tfps.graph.ops import outside
from tfps.graph.shares import Share, say_once
from tfps.graph.unique_rows import made_unique


@dataclass(frozen=True)
class Marks:
    """Which slices of a gradient are marked."""

    common: bool  # some are those of all replicas: each has as many
    unique: bool  # some are of lookups that take each id once
    dtype: tf.DType  # of the indices


def mark(gradient: tf.IndexedSlices, share: Share | None) -> tuple[tf.IndexedSlices, Marks] | None:
    """Returns `gradient` with marked slices: of unique ids, or not from the rows of `share`; None if there are none."""
    parts = [gradient.indices] if tf.executing_eagerly() else _parts(gradient.indices)
    marked, common, unique = [], False, 0
    for part in parts:
        is_unique = not tf.executing_eagerly() and made_unique(part)
        if is_unique is None:
            say_once(
                "the ids of a lookup are computed from unique ones (tf.unique), so that tfps cannot tell whether they "
                "are unique: an optimizer that squares gradients (Adam) may give another result than in one process"
            )
        if is_unique:
            unique += 1
            marked.append(unique_rows.marked(part, unique))
        elif share is None:  # a loop without `strategy.run` applies gradients: all may be common
            marked.append(-1 - part)
            common = True
        elif share.depends_on_rows(part):
            marked.append(part)
        else:
            marked.append(_marked(part, share.fixed_rows))
            common = True
    if not common and not unique:
        return None
    marked = [tf.cast(each, tf.int64) for each in marked] if unique else marked
    indices = marked[0] if len(marked) == 1 else tf.concat(marked, 0)
    marks = Marks(common, bool(unique), gradient.indices.dtype)
    return tf.IndexedSlices(gradient.values, indices, gradient.dense_shape), marks


def merge(gradient: tf.IndexedSlices, replicas: int, marks: Marks) -> tf.IndexedSlices:
    """Returns the gathered `gradient` with sums of the slices that are marked."""
    if marks.common:
        gradient = merge_common(gradient, replicas)
    if marks.unique:
        gradient = unique_rows.merge(gradient)
    indices = tf.cast(gradient.indices, marks.dtype)
    return tf.IndexedSlices(gradient.values, indices, gradient.dense_shape)


def merge_common(gradient: tf.IndexedSlices, replicas: int) -> tf.IndexedSlices:
    """Returns the gathered `gradient` with sums of the slices that all `replicas` marked, unless these differ."""
    marked = gradient.indices < 0
    indices = -1 - tf.boolean_mask(gradient.indices, marked)
    values = tf.boolean_mask(gradient.values, marked)
    parts = tf.where(_repeat(indices, replicas), replicas, 1)
    size = tf.size(indices) // parts
    values = tf.reduce_sum(tf.reshape(values, tf.concat([[parts, size], tf.shape(values)[1:]], 0)), 0)
    indices = indices[:size]
    return tf.IndexedSlices(
        tf.concat([tf.boolean_mask(gradient.values, ~marked), values], 0),
        tf.concat([tf.boolean_mask(gradient.indices, ~marked), indices], 0),
        gradient.dense_shape,
    )


def say_if_common(own: tf.IndexedSlices, gradient: tf.IndexedSlices, replicas: int) -> None:
    """Logs once if slices of an eager step might have been marked, had there been a graph that tells.

    All replicas have looked up the same, or each has made the ids unique that it looked up. `own`: of this replica.
    """
    if replicas < 2 or not len(gradient.indices):
        return
    if unique_rows.seem_unique(own.indices, gradient.indices):
        say_once(
            "in an eager step each replica has each id of a sparse gradient once, and others have some of these: if "
            "the program makes ids unique (tf.unique, tf.nn.embedding_lookup_sparse, Dense on a sparse input), an "
            "optimizer that squares gradients (Adam) gives another result than in one process; trace the step "
            "(run_eagerly=False)"
        )
    if _repeat(gradient.indices, replicas):
        say_once(
            "in an eager step all replicas looked up the same rows of an embedding: if they do not come from the batch "
            "(positions, a constant id), an optimizer that squares gradients (Adam) gives another result than in one "
            "process; trace the step (run_eagerly=False)"
        )


def _parts(indices: tf.Tensor) -> list[tf.Tensor]:
    """Returns the tensors that `indices` was concatenated from: a table with several uses has several."""
    if not tf.is_symbolic_tensor(indices):
        return [indices]
    while indices.op.type == "Identity" or outside(indices) is not indices:
        indices = indices.op.inputs[0] if indices.op.type == "Identity" else outside(indices)
        if not tf.is_symbolic_tensor(indices):
            return [indices]
    if indices.op.type != "ConcatV2":
        return [indices]
    return [part for each in list(indices.op.inputs)[:-1] for part in _parts(each)]


def _marked(indices: tf.Tensor, rows: int | None) -> tf.Tensor:
    """Marks `indices`, unless they repeat for each of the graph's fixed `rows`: of those one process has more, too."""
    marked = -1 - indices
    return marked if rows is None or rows < 2 else tf.where(_repeat(indices, rows), indices, marked)


def _repeat(indices: tf.Tensor, times: int) -> tf.Tensor:
    """Whether `indices` are the same ones so many times, a bool scalar."""
    over = tf.size(indices) % times
    blocks = tf.reshape(indices[: tf.size(indices) - over], [times, -1])
    return tf.equal(over, 0) & tf.reduce_all(tf.equal(blocks, blocks[:1]))
