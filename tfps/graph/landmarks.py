"""Finds phases of a traced training step: end of forward, begin of backward, first use of a variable.

TensorFlow marks none of these places. The backward pass is recognized by the op names of tf.GradientTape and
tf.gradients; the rest follows from which op uses what. `tests/graph/test_landmarks.py` says what must be found,
on every supported TensorFlow.
"""

from __future__ import annotations

import functools
import heapq
import re
from collections.abc import Sequence

import tensorflow as tf

from tfps.graph.ops import is_gate_op

_BACKWARD = re.compile(r"(^|/)gradient(s|_tape)(_\d+)?/")  # ops of tf.GradientTape and tf.gradients
_FAR = 16  # ops between a variable and the op that computes something with it
_DEEP = 6  # ops between that op and a tensor with several uses
_MANY = 4  # tensors returned at most
_PARAMETERS = ("Const", "ReadVariableOp", "Placeholder")


def is_backward(op: tf.Operation) -> bool:
    """Whether `op` belongs to a backward pass."""
    return _BACKWARD.search(op.name) is not None


class Landmarks:
    """Finds the places in `graph` as it is now. All tensors that it finds have several uses.

    Args:
        inputs: the step's batch.
        since: number of the step's first op; earlier ops belong to steps already sent.
    """

    def __init__(self, graph: tf.Graph, inputs: Sequence[tf.Tensor], since: int = 0) -> None:
        self._operations = graph.get_operations()
        self._inputs, self._since = inputs, since
        self._order = {op.name: number for number, op in enumerate(self._operations)}

    @property
    def ops(self) -> int:
        """How many ops the graph has."""
        return len(self._operations)

    @functools.cached_property
    def backward(self) -> int | None:
        """Number of the first op of the step's backward pass; None if there is none."""
        own = range(self._since, len(self._operations))
        return next((number for number in own if is_backward(self._operations[number])), None)

    def last_of_forward(self) -> list[tf.Tensor]:
        """Returns the last tensors before the backward pass that backward needs."""
        found: list[tf.Tensor] = []
        for op in reversed(self._operations[self._since : self.backward or self._since]):
            for output in op.outputs if op.type not in _PARAMETERS else ():
                uses = output.consumers()
                # An op that makes something for backward alone has several results: no rewrite fuses it.
                if (len(uses) > 1 or len(op.outputs) > 1) and any(map(is_backward, uses)):
                    found += [output] if has_elements(output) else []
            if len(found) >= _MANY:
                break
        return found[:_MANY]

    def first_use(self, handle: tf.Tensor) -> list[tf.Tensor]:
        """Returns the other operands of the first op that computes with `handle`'s variable; empty if unclear."""
        order, names = self._order, set[str]()
        heap: list[tuple[int, tf.Operation]] = []

        def uses(tensor: tf.Tensor) -> None:
            for op in tensor.consumers():
                number = order.get(op.name)
                if number is not None and op.name not in names and not is_gate_op(op):
                    names.add(op.name)
                    heapq.heappush(heap, (number, op))

        uses(handle)
        for _ in range(_FAR):
            if not heap or is_backward(heap[0][1]):
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
        """Returns `tensor` if it has several uses, else such sources of it; nothing that exists before the step."""
        if any(tensor is each for each in self._inputs):
            return [tensor]
        if tensor.op.type in _PARAMETERS or not has_elements(tensor):
            return []
        if len(tensor.consumers()) > 1:
            return [tensor]
        if not depth:
            return []
        found = [each for source in tensor.op.inputs for each in self._used_often(source, depth - 1)]
        return found[:_MANY]


def has_elements(tensor: tf.Tensor) -> bool:
    """Whether one number can be sliced out of `tensor`."""
    numbers = tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_complex
    return bool(numbers and tensor.shape.rank)
