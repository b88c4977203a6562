"""What a step computes from its batch alone, as a function of the batch: the ids of rows, before the step runs.

Tested in tests/graph/test_prefetch.py.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import tensorflow as tf

from tfps.graph.ops import HOST
from tfps.graph.patches import replaced
from tfps.types import Function, Structure, Value


class _Given(threading.local):
    inputs: Sequence[tf.Tensor] = ()  # tensors of the batch of the replica function that this thread traces


_given = _Given()


def noting_inputs(function: Function) -> Function:
    """Wraps a replica function, so that `given_inputs` knows its arguments while it is traced."""

    @functools.wraps(function)
    def noted(*args: object, **kwargs: object) -> Structure:
        flat = tensors_of((args, kwargs))
        with replaced(_given, "inputs", [each for each in flat if tf.is_symbolic_tensor(each)]):
            return function(*args, **kwargs)

    return noted


def given_inputs() -> Sequence[tf.Tensor]:
    return _given.inputs


def tensors_of(structure: Structure) -> list[Value]:
    """The tensors of a batch, flat, with those of ragged and sparse ones."""
    return [each for each in tf.nest.flatten(structure, expand_composites=True) if tf.is_tensor(each)]


def batch_function(inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor]) -> Function | None:
    """A function of tensors like `inputs` that returns what a graph makes of them for `outputs`, of the same graph.

    None if that needs anything else: variables, random numbers, tables of strings, other functions.
    """
    stops = {each.name for each in inputs}
    operations: dict[str, tf.Operation] = {}
    waiting = [each for each in outputs if each.name not in stops]
    while waiting:
        op = waiting.pop().op
        if op.name in operations:
            continue
        calls = any(attribute.HasField("func") for attribute in op.node_def.attr.values())
        if op.type == "Placeholder" or op.op_def.is_stateful or calls:
            return None
        operations[op.name] = op
        waiting += [each for each in op.inputs if each.name not in stops]
    definition = tf.compat.v1.GraphDef(versions=outputs[0].graph.graph_def_versions)
    for op in operations.values():
        node = definition.node.add()
        node.CopyFrom(op.node_def)
        node.device = ""
        del node.input[:]
        node.input.extend(each.name for each in op.inputs)  # no checks, which the step itself makes
    signature = [
        tf.TensorSpec(None if each.shape.rank is None else [None] * each.shape.rank, each.dtype) for each in inputs
    ]

    def of_batch(*batch: tf.Tensor) -> list[tf.Tensor]:
        given = dict(zip((each.name for each in inputs), batch, strict=True))
        used = {each.name for op in operations.values() for each in op.inputs}
        computed = [each.name for each in outputs if each.name not in stops]
        with tf.device(HOST):
            found = tf.graph_util.import_graph_def(
                definition,
                input_map={name: value for name, value in given.items() if name in used},
                return_elements=computed,
                name="",
            )
        by_name = {**given, **dict(zip(computed, found or (), strict=True))}
        return [tf.identity(by_name[each.name]) for each in outputs]

    return tf.function(of_batch, autograph=False, input_signature=signature)
