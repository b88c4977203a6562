"""Timestamps inside a graph: when a step has its input, when a read wants its variable and when it may have it.

docs/design.md ("Times inside the graph") says how their places are found, and why they do not change what they observe.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import tensorflow as tf

from tfps.graph.ops import CLOSE, HOST, PASS, call_stateless, called, clock, has_clock, is_backward, traced_once
from tfps.graph.tf_private import control_flow_free
from tfps.types import Value

_FAR = 16  # ops between a variable and the op that computes something with it
_DEEP = 6  # ops between that op and a tensor with several uses
_MANY = 4  # tensors returned at most
_PARAMETERS = ("Const", "ReadVariableOp", "Placeholder")


class Note(NamedTuple):
    """The op that asks for the time, for what becomes of it if XLA compiles the step in parts (parts.py)."""

    op: tf.Operation
    probes: Sequence[tf.Operation]  # which it waits for
    handle: tf.Tensor | None = None  # of the variable that is wanted then; else something ends


@dataclass(eq=False)
class PassedGates:
    # By unique id of the variable and replica: the op that first passes the gate, and the variable's handle there.
    by_variable: dict[tuple[str, int], tuple[tf.Operation, tf.Tensor]] = field(default_factory=dict)
    noted: int = 0  # number of ops that belong to steps already sent
    notes: list[Note] = field(default_factory=list)  # of this call


class NotedTimes(NamedTuple):
    # Float64 scalars, wall-clock seconds, 0 if unknown: input ready, forward pass ended, read wanted, gate open. Empty
    # if nothing is known.
    times: tuple[Value, ...] = ()
    variable: int = -1  # the position of the variable that is read
    reports_step: bool = False  # whether the first two are valid: this send reports the step's forward pass


class Timestamps:
    """Makes the timestamps for the sends of one emission of `graph`."""

    def __init__(
        self,
        graph: tf.Graph,
        passed_of: Callable[[tf.Graph], PassedGates],
        inputs_of: Callable[[tf.Graph], Sequence[tf.Tensor]],  # of the graph's step
        replica: int,
    ) -> None:
        self._graph = control_flow_free(graph, loops=False)  # the step lies around a branch of a tf.cond that sends
        self._passed, self._inputs, self._replica = passed_of(self._graph), inputs_of(self._graph), replica
        self._landmarks = Landmarks(self._graph, self._inputs, since=self._passed.noted)

    def of_bucket(self, variables: Sequence[str], reports_step: bool) -> NotedTimes:
        """Returns timestamps for a bucket of `variables` (unique ids, in forward order); `reports_step`: the step's."""
        if not has_clock():
            return NotedTimes()
        with self._graph.as_default(), tf.control_dependencies(None), tf.device(None):
            read, variable = self._read(variables)
            step = self._step() if reports_step and self._replica == 0 else []
        if not step and not read:
            return NotedTimes()
        return NotedTimes((*(step or [0.0, 0.0]), *(read or [0.0, 0.0])), variable, bool(step))

    def done(self) -> None:
        """Ends the emission: all its sends have been built."""
        self._passed.noted = self._landmarks.ops

    def _read(self, variables: Sequence[str]) -> tuple[list[Value], int]:
        """Returns when the first of `variables` read in this graph was wanted and its gate was open; its position."""
        for number, variable in enumerate(variables):
            if (passed := self._passed.by_variable.get((variable, self._replica))) is not None:
                op, handle = passed
                operands = self._landmarks.first_use(handle)
                return ([self._note(operands, handle), now_after([op])] if operands else []), number
        return [], -1

    def _step(self) -> list[Value]:
        """Returns when the step had its input and when its forward pass ended."""
        if self._landmarks.backward is None and self._passed.noted:
            return []  # this backward pass has been sent already
        begin = now_after(self._inputs) if self._inputs else 0.0
        last = self._landmarks.last_of_forward()
        return [begin, self._note(last) if last else 0.0]

    def _note(self, tensors: Sequence[tf.Tensor], handle: tf.Tensor | None = None) -> tf.Tensor:
        """Returns when `tensors` are ready."""
        probes = _probes(tensors)
        noted = now_after(probes)
        self._passed.notes.append(Note(noted.op, probes, handle))
        return noted


def _probes(tensors: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """Returns ops that end when `tensors` are ready."""
    probes = []
    for tensor in tensors:
        if tensor.op.type == "Placeholder" or not has_elements(tensor):  # of the input
            probes.append(tensor.op)
            continue
        with tf.device(tensor.device or None):
            rank = tensor.shape.rank
            probes.append(tf.strided_slice(tensor, [0] * rank, [1] * rank).op)
    return probes


@traced_once()
def tfps_now() -> tf.Tensor:
    return clock()


def now_after(after: Sequence[tf.Operation | tf.Tensor]) -> tf.Tensor:
    """Returns the wall-clock time (float64 seconds, 0 if unknown) when all of `after` is ready."""
    with tf.device(HOST), tf.control_dependencies(list(after)):
        return call_stateless(tfps_now(), [])[0]


class Landmarks:
    """Finds places in `graph` as it is now. `inputs`: the step's batch; ops before `since` were of earlier sends."""

    def __init__(self, graph: tf.Graph, inputs: Sequence[tf.Tensor], since: int = 0) -> None:
        self._operations = graph.get_operations()
        self.ops = len(self._operations)
        self._inputs, self._since = inputs, since
        self._order = {op.name: number for number, op in enumerate(self._operations)}

    @functools.cached_property
    def backward(self) -> int | None:
        """Number of the first op of the step's backward pass; None if there is none."""
        own = range(self._since, self.ops)
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
                if number is not None and op.name not in names and called(op) not in (PASS, CLOSE):
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
        sources = tensor.op.inputs if depth else ()
        found = [each for source in sources for each in self._used_often(source, depth - 1)]
        return found[:_MANY]


def has_elements(tensor: tf.Tensor) -> bool:
    """Whether one number can be sliced out of `tensor`."""
    numbers = tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_complex
    return bool(numbers and tensor.shape.rank)
