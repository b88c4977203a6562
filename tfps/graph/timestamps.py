"""Timestamps inside a graph: when a step has its input, when a read wants its variable and when it may have it.

Each is TensorFlow's Timestamp op behind control edges; it costs a microsecond and is always there. It must not change
what it observes: TensorFlow fuses and rewrites ops whose results have one use, but none that another op waits for. So
a timestamp follows a probe: one element of a tensor that backward needs as well and that has several uses anyway.
Timestamps travel with the send of a bucket; its gradient waits for whatever they wait for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import tensorflow as tf

from tfps.graph.landmarks import Landmarks, has_elements
from tfps.graph.ops import HOST, call_stateless
from tfps.graph.tf_private import ConcreteFunction, branch_free
from tfps.types import Value


class PassedGate(NamedTuple):
    """A gate passed in a graph: the op that passes it, and the variable's handle there."""

    op: tf.Operation
    handle: tf.Tensor


@dataclass(eq=False)
class PassedGates:
    """The first pass of each gate in one graph, by unique id of the variable and replica."""

    by_variable: dict[tuple[str, int], PassedGate] = field(default_factory=dict)
    noted: int = 0  # number of ops that belong to steps already sent


class NotedTimes(NamedTuple):
    """The timestamps of one send.

    Attributes:
        times: float64 scalars, wall-clock seconds, 0 if unknown: input ready, forward pass ended, read wanted, gate
            open. Empty if nothing is known.
        variable: the position of the variable that is read.
        whole: whether the first two are valid: this send reports the step's forward pass.
    """

    times: tuple[Value, ...] = ()
    variable: int = -1
    whole: bool = False


class Timestamps:
    """Makes the timestamps for the sends of one emission.

    Args:
        graph: the sending graph.
        passed_of, inputs_of: return a graph's passed gates and its step's inputs.
    """

    def __init__(
        self,
        graph: tf.Graph,
        passed_of: Callable[[tf.Graph], PassedGates],
        inputs_of: Callable[[tf.Graph], Sequence[tf.Tensor]],
        replica: int,
    ) -> None:
        self._graph = branch_free(graph)  # the step lies around a branch of a tf.cond that sends
        self._passed: PassedGates = passed_of(self._graph)
        self._inputs: Sequence[tf.Tensor] = inputs_of(self._graph)
        self._replica = replica
        self._landmarks = Landmarks(self._graph, self._inputs, since=self._passed.noted)

    def of_bucket(self, variables: Sequence[str], whole: bool) -> NotedTimes:
        """Returns timestamps for a bucket of `variables` (unique ids, in forward order); `whole`: the step's, too."""
        with self._graph.as_default(), tf.control_dependencies(None), tf.device(None):
            read, variable = self._read(variables)
            step = self._step() if whole and self._replica == 0 else []
        if not step and not read:
            return NotedTimes()
        return NotedTimes((*(step or [0.0, 0.0]), *(read or [0.0, 0.0])), variable, bool(step))

    def done(self) -> None:
        """Ends the emission: all its sends have been built."""
        self._passed.noted = self._landmarks.ops

    def _read(self, variables: Sequence[str]) -> tuple[list[Value], int]:
        """Returns when the first of `variables` read in this graph was wanted and its gate was open; its position."""
        for number, variable in enumerate(variables):
            passed = self._passed.by_variable.get((variable, self._replica))
            if passed is not None:
                operands = self._landmarks.first_use(passed.handle)
                return ([now_after(_probes(operands)), now_after([passed.op])] if operands else []), number
        return [], -1

    def _step(self) -> list[Value]:
        """Returns when the step had its input and when its forward pass ended."""
        if self._landmarks.backward is None and self._passed.noted:
            return []  # this backward pass has been sent already
        begin = now_after(self._inputs) if self._inputs else 0.0
        last = self._landmarks.last_of_forward()
        return [begin, now_after(_probes(last)) if last else 0.0]


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


@functools.cache
def _now_function() -> ConcreteFunction:
    @tf.function(autograph=False, input_signature=[])
    def tfps_now() -> tf.Tensor:
        return tf.timestamp()

    return tfps_now.get_concrete_function()


def now_after(after: Sequence[tf.Operation | tf.Tensor]) -> tf.Tensor:
    """Returns the wall-clock time (float64 seconds) when all of `after` is ready."""
    with tf.device(HOST), tf.control_dependencies(list(after)):
        return call_stateless(_now_function(), [])[0]
