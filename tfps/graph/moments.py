"""Notes of the clock inside a graph: when a step has its input, when a read wants its variable and when it may have it.

A note is TensorFlow's Timestamp behind control edges: it costs a microsecond and is always there. It must not change
what it observes: TensorFlow fuses and rewrites ops whose results have one use, and none on which something else waits.
So a note comes after a probe, one element of a tensor that backward needs as well and that has several uses anyway.
Notes travel with the send of a bucket; whatever they wait for, its gradient waits for, too.
"""

from __future__ import annotations

import functools
import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

from tfps.graph.ops import HOST, call_stateless, is_gate_op
from tfps.graph.tf_private import branch_free

_BACKWARD = re.compile(r"(^|/)gradient(s|_tape)/")  # what tf.GradientTape and tf.gradients call their ops
_FAR = 16  # ops between a variable and the op that computes something with it
_DEEP = 6  # ops between that and a tensor with several uses
_MANY = 4  # tensors of which one note takes the last
_PARAMETERS = ("Const", "ReadVariableOp", "Placeholder")


class Passage(NamedTuple):
    """A gate that was passed in a graph: the op that did it, and the variable's handle there."""

    op: tf.Operation
    handle: tf.Tensor


@dataclass(eq=False)
class Passages:
    """The gates that were passed in one graph, the first time each, by unique id of the variable and replica."""

    by_variable: dict[tuple[str, int], Passage] = field(default_factory=dict)
    noted: int = 0  # so many ops of the graph are of steps that have been sent


class Noted(NamedTuple):
    """What a send is to say.

    Attributes:
        times: float64 scalars, seconds of the wall clock, 0 where unknown: input there, forward pass ended, read
            wanted, gate open. Empty if nothing is known.
        variable: the position of the variable that is read.
        whole: whether the first two are meant: this send says when the step's forward pass was.
    """

    times: tuple[Any, ...] = ()
    variable: int = -1
    whole: bool = False


class Moments:
    """Makes the notes for the sends of one emission.

    Args:
        graph: that sends.
        passages_of, inputs_of: what is known of a graph: gates that were passed, what the step computes with.
    """

    def __init__(self, graph: tf.Graph, passages_of: Any, inputs_of: Any, replica: int) -> None:
        self._graph = branch_free(graph)  # what has run when a branch of a tf.cond sends lies around it
        self._passages: Passages = passages_of(self._graph)
        self._inputs: Sequence[tf.Tensor] = inputs_of(self._graph)
        self._replica = replica
        self._operations = self._graph.get_operations()
        self._order = {op.name: number for number, op in enumerate(self._operations)}

    def of_bucket(self, variables: Sequence[str], whole: bool) -> Noted:
        """The notes for a bucket of `variables` (unique ids, in forward order); `whole`: those of the step as well."""
        with self._graph.as_default(), tf.control_dependencies(None), tf.device(None):
            read, variable = self._read(variables)
            step = self._step() if whole and self._replica == 0 else []
        if not step and not read:
            return Noted()
        return Noted((*(step or [0.0, 0.0]), *(read or [0.0, 0.0])), variable, bool(step))

    def done(self) -> None:
        """All sends of the emission have been built."""
        self._passages.noted = len(self._operations)

    def _read(self, variables: Sequence[str]) -> tuple[list[Any], int]:
        """When the first of `variables` that is read in this graph was wanted, and when its gate was open."""
        for number, variable in enumerate(variables):
            passage = self._passages.by_variable.get((variable, self._replica))
            if passage is not None:
                operands = self._operands(passage)
                return ([_note(_probes(operands)), _note([passage.op])] if operands else []), number
        return [], -1

    def _step(self) -> list[Any]:
        """When the step had its input, and when its forward pass had ended."""
        first = next(
            (
                number
                for number in range(self._passages.noted, len(self._operations))
                if _BACKWARD.search(self._operations[number].name)
            ),
            None,
        )
        if first is None and self._passages.noted:
            return []  # of a backward pass that has been sent already
        begin = _note(self._inputs) if self._inputs else 0.0
        last = [] if first is None else self._last_of_forward(first)
        return [begin, _note(_probes(last)) if last else 0.0]

    def _last_of_forward(self, first: int) -> list[tf.Tensor]:
        """The last tensors before the op number `first` that backward needs."""
        found: list[tf.Tensor] = []
        for op in reversed(self._operations[self._passages.noted : first]):
            for output in op.outputs if op.type not in _PARAMETERS else ():
                uses = output.consumers()
                # Where an op makes something for backward alone, it has several results: no rewrite joins such.
                if (len(uses) > 1 or len(op.outputs) > 1) and any(_BACKWARD.search(use.name) for use in uses):
                    found += [output] if _can_be_probed(output) else []
            if len(found) >= _MANY:
                break
        return found[:_MANY]

    def _operands(self, passage: Passage) -> list[tf.Tensor]:
        """What the first op that computes with the variable computes with besides; nothing where that is not clear."""
        order, names = self._order, set[str]()
        heap: list[tuple[int, Any]] = []

        def uses(tensor: tf.Tensor) -> None:
            for op in tensor.consumers():
                number = order.get(op.name)
                if number is not None and op.name not in names and not is_gate_op(op):
                    names.add(op.name)
                    heapq.heappush(heap, (number, op))

        uses(passage.handle)
        for _ in range(_FAR):
            if not heap or _BACKWARD.search(heap[0][1].name):
                break
            op = heapq.heappop(heap)[1]
            others = [each for each in op.inputs if each.op.name not in names]
            found = [tensor for other in others for tensor in self._used_often(other, _DEEP)]
            if found:
                return list({id(tensor): tensor for tensor in found}.values())[:_MANY]
            for output in op.outputs:
                uses(output)
        return []

    def _used_often(self, tensor: tf.Tensor, depth: int) -> list[tf.Tensor]:
        """`tensor` if it has several uses, else what it is made from; nothing of what is there before the step."""
        if any(tensor is each for each in self._inputs):
            return [tensor]
        if tensor.op.type in _PARAMETERS or not _can_be_probed(tensor):
            return []
        if len(tensor.consumers()) > 1:
            return [tensor]
        if not depth:
            return []
        found = [each for source in tensor.op.inputs for each in self._used_often(source, depth - 1)]
        return found[:_MANY]


def _can_be_probed(tensor: tf.Tensor) -> bool:
    numbers = tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_complex
    return bool(numbers and tensor.shape.rank)


def _probes(tensors: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """Ops that end when `tensors` are there."""
    probes = []
    for tensor in tensors:
        if tensor.op.type == "Placeholder" or not _can_be_probed(tensor):  # of the input
            probes.append(tensor.op)
            continue
        with tf.device(tensor.device or None):
            rank = tensor.shape.rank
            probes.append(tf.strided_slice(tensor, [0] * rank, [1] * rank).op)
    return probes


@functools.cache
def _now_function() -> Any:
    @tf.function(autograph=False, input_signature=[])
    def tfps_now() -> tf.Tensor:
        return tf.timestamp()

    return tfps_now.get_concrete_function()


def _note(after: Sequence[Any]) -> tf.Tensor:
    """The time (float64 seconds) when all of `after` is there."""
    with tf.device(HOST), tf.control_dependencies(list(after)):
        return call_stateless(_now_function(), [])[0]
