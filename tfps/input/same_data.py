"""Which data ranks must have alike: where each makes global batches and trains on its rows of them.

What random ops of the pipeline have changed (augmentation) may differ between ranks. So what they reach is followed
through the functions of a dataset, component by component; all else must be the same.

Tested in tests/input/test_same_data.py.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import tensorflow as tf

from tfps.graph.tf_private import functions_of, inputs_of, is_stateful, keeps_elements, reads_files
from tfps.keras_hooks.random_numbers import of_arrays
from tfps.types import Batches, Value

AutoShardPolicy = tf.data.experimental.AutoShardPolicy
DIVIDED = (AutoShardPolicy.AUTO, AutoShardPolicy.DATA)  # by the strategy; else by the program or by files

# Parts of names of stateful ops that give each process the same; an unknown one counts as random, so that no right
# program is refused. RandomShuffle is among them: an order by chance is no augmentation.
_ALIKE = ("Assert", "Dataset", "HashTable", "InitializeTable", "LookupTable", "Print", "RandomShuffle")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall", "If", "Case", "While")  # what they do, their functions do


class Same(enum.IntEnum):
    """What ranks must have alike of a component of a batch."""

    TARGET = 0  # targets and sample weights: equal
    INPUT = 1  # equal
    MADE = 2  # by Python code, which may have drawn random numbers: equal unless others prove the order of rows
    RANDOM = 3  # random ops have changed it: may differ


def shard_policy(dataset: Batches) -> tf.data.experimental.AutoShardPolicy | None:
    """Returns how `dataset` is divided between workers; None if it is none of TensorFlow."""
    return dataset.options().experimental_distribute.auto_shard_policy if isinstance(dataset, tf.data.Dataset) else None


def is_same_on_all(dataset: Batches) -> bool:
    """Whether each rank makes the global batches of `dataset` and takes its rows."""
    policy = shard_policy(dataset)
    return policy in DIVIDED and (policy == AutoShardPolicy.DATA or not reads_files(dataset))


def sames(dataset: tf.data.Dataset) -> list[Same]:
    """Returns what must be alike of each tensor with bytes in an element of `dataset`, composite ones expanded.

    Of what Python code makes, only floats and bytes that are no targets may differ: pixels and the like.
    """
    spec = dataset.element_spec
    parts = spec if isinstance(spec, tuple) and len(spec) in (2, 3) else (spec,)
    found = []
    components = [(index > 0, each) for index, part in enumerate(parts) for each in tf.nest.flatten(part)]
    for (is_target, component), reached in zip(components, _reached(dataset), strict=True):
        same = Same.TARGET if is_target else Same.INPUT
        dtype = getattr(component, "dtype", tf.variant)
        if reached == Same.RANDOM:
            same = Same.RANDOM
        elif reached == Same.MADE and not is_target and (dtype.is_floating or dtype.is_complex or dtype == tf.uint8):
            same = Same.MADE
        tensors = tf.nest.flatten(component, expand_composites=True)
        found += [same for each in tensors if each.dtype not in (tf.resource, tf.variant)]
    return found


def _reached(dataset: tf.data.Dataset) -> list[Same]:
    """Returns by what each component of an element may have been changed: INPUT stands for nothing random."""
    count = len(tf.nest.flatten(dataset.element_spec))
    if dataset in of_arrays:
        return [Same.INPUT] * count
    before = [_reached(each) for each in inputs_of(dataset)]
    graphs = [each.function.graph for each in functions_of(dataset)]
    # One that chooses elements by chance changes no element, but their order, which must be the same.
    if len(before) == 1 and len(before[0]) == count and (keeps_elements(dataset) or not graphs):
        return before[0]
    if not graphs and len(before) > 1:
        if sum(map(len, before)) == count:  # zipped
            return [each for part in before for each in part]
        if all(len(part) == count for part in before):  # one after the other, or in turns
            return list(map(max, zip(*before, strict=True)))
    if len(graphs) == len(before) == 1 and len(graphs[0].outputs) == count:  # a map, unless its outputs are datasets
        return _followed(graphs[0], before[0])
    levels = [level for part in before for level in part] + [level for graph in graphs for level in _within(graph)]
    return [max([Same.INPUT, *levels])] * count


def _followed(graph: tf.Graph, before: Sequence[Same]) -> list[Same]:
    """Returns what has reached the outputs of a function's `graph`, given what has reached its arguments."""
    arguments = graph.inputs[: len(graph.inputs) - len(graph.captures)]
    known = len(arguments) == len(before)
    reached = {id(each): before[at] if known else max(before) for at, each in enumerate(arguments)}
    called = _called(graph)
    for op in graph.get_operations():  # in an order in which inputs come first
        if op.type != "Placeholder":
            own = [_source(op.type), *(called[name] for name in _calls(op.node_def) if name in called)]
            level = max(*own, Same.INPUT, *(reached.get(id(each), Same.INPUT) for each in op.inputs))
            reached.update((id(each), level) for each in op.outputs)
    return [reached.get(id(each), Same.INPUT) for each in graph.outputs]


def _within(graph: tf.Graph) -> list[Same]:
    """Returns what the ops of `graph` do, those of its functions included."""
    return [*(_source(op.type) for op in graph.get_operations()), *_called(graph).values()]


def _called(graph: tf.Graph) -> dict[str, Same]:
    """Returns what each function in the library of `graph` does, those that it calls included."""
    nodes = {each.signature.name: each.node_def for each in graph.as_graph_def().library.function}
    found: dict[str, Same] = {}

    def of(name: str) -> Same:
        if name not in found:
            found[name] = Same.INPUT  # if it calls itself
            own = [_source(node.op) for node in nodes[name]]
            found[name] = max(
                [Same.INPUT, *own, *(of(each) for node in nodes[name] for each in _calls(node) if each in nodes)]
            )
        return found[name]

    for name in nodes:
        of(name)
    return found


def _calls(node: Value) -> list[str]:
    """Returns the names of functions that are attributes of a node."""
    values = node.attr.values()
    return [each.name for value in values for each in (value.func, *value.list.func) if each.name]


def _source(op_type: str) -> Same:
    if "PyFunc" in op_type:
        return Same.MADE
    alike = op_type in _CALLS or any(part in op_type for part in _ALIKE)
    return Same.RANDOM if not alike and is_stateful(op_type) else Same.INPUT
