"""Sparse gradients of lookups that all replicas make alike, as those of positions: summed, not gathered.

In one process each is one slice, and Adam squares slice by slice. Until then their indices travel as -1 - index.
"""

from __future__ import annotations

import tensorflow as tf

from tfps.graph.shares import Share, say_once


def mark(gradient: tf.IndexedSlices, share: Share | None) -> tf.IndexedSlices | None:
    """Returns `gradient` with the slices marked that do not come from the rows of `share`; None if there are none."""
    if share is None:  # a loop without `strategy.run` applies gradients: all may be common
        return tf.IndexedSlices(gradient.values, -1 - gradient.indices, gradient.dense_shape)
    parts = _parts(gradient.indices)
    marked = [part if share.depends_on_rows(part) else _marked(part, share.fixed_rows) for part in parts]
    if all(after is before for after, before in zip(marked, parts, strict=True)):
        return None
    return tf.IndexedSlices(gradient.values, tf.concat(marked, 0), gradient.dense_shape)


def merge(gradient: tf.IndexedSlices, replicas: int) -> tf.IndexedSlices:
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


def say_if_common(gradient: tf.IndexedSlices, replicas: int) -> None:
    """Logs once if all replicas have looked up the same in an eager step, where nobody knows what comes from rows."""
    if replicas > 1 and len(gradient.indices) and _repeat(gradient.indices, replicas):
        say_once(
            "in an eager step all replicas looked up the same rows of an embedding: if they do not come from the batch "
            "(positions, a constant id), an optimizer that squares gradients (Adam) gives another result than in one "
            "process; trace the step (run_eagerly=False)"
        )


def _parts(indices: tf.Tensor) -> list[tf.Tensor]:
    """Returns the tensors that `indices` was concatenated from: a table with several uses has several."""
    if not tf.is_symbolic_tensor(indices):
        return [indices]
    while indices.op.type == "Identity":
        indices = indices.op.inputs[0]
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
