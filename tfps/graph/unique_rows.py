"""Sparse gradients of lookups that take each id of a batch once: slices of one id are summed over the replicas.

So do `tf.unique`, `tf.nn.embedding_lookup_sparse`, and Dense on a sparse input. In one process an id of the global
batch is one slice, and Adam squares slice by slice. The graph shows which lookups these are. Until they are summed,
indices of the n-th of them travel as index + n * 2^48.

Tested in tests/graph/test_common_rows.py and, in jobs, in tests/integration/test_rows.py.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfps.graph.ops import HOST, outside, wire_dtype
from tfps.graph.tf_private import function_of

_SHIFT = 48
# Outputs that have each id once.
_UNIQUE = {
    *(("Unique", 0), ("UniqueV2", 0), ("UniqueWithCounts", 0), ("UniqueWithCountsV2", 0)),
    *((f"SparseSegment{each}GradV2", 1) for each in ("Sum", "Mean", "SqrtN")),
}
_KEEPS = {"Identity", "Reshape", "ExpandDims", "Squeeze", "StridedSlice", "Slice", "Pad", "PadV2"}  # what its input has
_TAKES = {"TopKV2", "Range", "Where"}  # positions, each once
_MIXES = {"AddV2", "Add", "Sub", "Mul", "FloorMod", "Mod", "FloorDiv", "SelectV2", "Minimum", "Maximum", "ConcatV2"}


def made_unique(indices: tf.Tensor) -> bool | None:
    """Whether `indices`, int [slices] of a graph, have each id once by the way they are made; None: nobody can tell."""
    return _found(indices, ())


def _found(tensor: tf.Tensor, calls: tuple[tf.Operation, ...]) -> bool | None:
    """`calls`: of functions in whose graphs `tensor` is, outermost first."""
    while tf.is_symbolic_tensor(tensor):
        op, kind = tensor.op, tensor.op.type
        if (kind, tensor.value_index) in _UNIQUE:
            return bool(tensor.shape.rank == 1)
        if kind == "Where":
            return bool(op.inputs[0].shape.rank == 1)
        if kind == "Placeholder":
            graph = function_of(calls[-1]) if calls else None
            inputs = () if graph is None else graph.inputs
            place = next((place for place, each in enumerate(inputs) if each is tensor), None)
            around = outside(tensor) if place is None else calls[-1].inputs[place]
            calls = calls if place is None else calls[:-1]
            if around is tensor:
                return False
            tensor = around
        elif kind in ("PartitionedCall", "StatefulPartitionedCall"):
            if (graph := function_of(op)) is None:
                return None
            tensor, calls = graph.outputs[tensor.value_index], (*calls, op)
        elif kind in _KEEPS or (kind == "Cast" and op.inputs[0].dtype.is_integer):
            tensor = op.inputs[0]
        elif kind == "IdentityN":
            tensor = op.inputs[tensor.value_index]
        elif kind == "GatherV2":
            if not _takes_each_once(op.inputs[1]):
                return False
            tensor = op.inputs[0]
        elif kind == "DynamicPartition":  # by the remainder, so that what is left after the division is unique
            tensor = op.inputs[0]
            tensor = tensor.op.inputs[0] if tensor.op.type == "FloorDiv" else tensor
        elif kind in ("AddV2", "Add", "Sub") and (changed := _shifted(op)) is not None:
            tensor = changed
        else:
            inputs = op.inputs if kind in _MIXES else ()
            return None if any(_found(each, calls) is not False for each in inputs) else False
    return False


def _takes_each_once(positions: tf.Tensor) -> bool:
    while positions.op.type in _KEEPS:
        positions = positions.op.inputs[0]
    return positions.op.type in _TAKES


def _shifted(op: tf.Operation) -> tf.Tensor | None:
    """Returns what `op` adds one constant to, if it does."""
    changed = [each for each in op.inputs if tf.get_static_value(each) is None]
    other = [each for each in op.inputs if tf.get_static_value(each) is not None]
    return changed[0] if len(changed) == 1 and not other[0].shape.rank else None


def marked(indices: tf.Tensor, number: int) -> tf.Tensor:
    """Returns `indices`, made unique, as those of the lookup with this `number` from 1, int64."""
    return tf.cast(indices, tf.int64) + (number << _SHIFT)


def merge(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the gathered `gradient` with one slice for each id of each marked lookup: the sum over replicas.

    They are in the order in which their ids occur first. On the host, where sums have one order: workers must agree.
    """
    with tf.device(HOST):
        chosen = gradient.indices >= 1 << _SHIFT
        indices, where = tf.unique(tf.boolean_mask(gradient.indices, chosen))
        values = tf.cast(tf.boolean_mask(gradient.values, chosen), wire_dtype(gradient.values.dtype))
        values = tf.cast(tf.math.unsorted_segment_sum(values, where, tf.size(indices)), gradient.values.dtype)
        return tf.IndexedSlices(
            tf.concat([tf.boolean_mask(gradient.values, ~chosen), values], 0),
            tf.concat([tf.boolean_mask(gradient.indices, ~chosen), indices % (1 << _SHIFT)], 0),
            gradient.dense_shape,
        )


def seem_unique(own: tf.Tensor, gathered: tf.Tensor) -> bool:
    """Whether a replica's `own` ids of an eager step are all different, and others have some of them."""
    mine = own.numpy()
    return len(mine) > 1 and len(np.unique(mine)) == len(mine) < np.isin(gathered.numpy(), mine).sum()
