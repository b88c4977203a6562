"""Notes of the clock inside a graph: when a step has its input, when a read wants its variable and when it may have it.

A note is TensorFlow's Timestamp behind control edges: it costs a microsecond and is always there. It must not change
what it observes: TensorFlow fuses and rewrites ops whose results have one use, and none on which something else waits.
So a note comes after a probe, one element of a tensor that backward needs as well and that has several uses anyway.
Notes travel with the send of a bucket; whatever they wait for, its gradient waits for, too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

from tfps.graph.landmarks import Landmarks, has_elements
from tfps.graph.ops import HOST, call_stateless
from tfps.graph.tf_private import branch_free


class PassedGate(NamedTuple):
    """A gate that was passed in a graph: the op that did it, and the variable's handle there."""

    op: tf.Operation
    handle: tf.Tensor


@dataclass(eq=False)
class PassedGates:
    """The gates that were passed in one graph, the first time each, by unique id of the variable and replica."""

    by_variable: dict[tuple[str, int], PassedGate] = field(default_factory=dict)
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


class Timestamps:
    """Makes the notes for the sends of one emission.

    Args:
        graph: that sends.
        passed_of, inputs_of: what is known of a graph: gates that were passed, what the step computes with.
    """

    def __init__(self, graph: tf.Graph, passed_of: Any, inputs_of: Any, replica: int) -> None:
        self._graph = branch_free(graph)  # what has run when a branch of a tf.cond sends lies around it
        self._passed: PassedGates = passed_of(self._graph)
        self._inputs: Sequence[tf.Tensor] = inputs_of(self._graph)
        self._replica = replica
        self._landmarks = Landmarks(self._graph, self._inputs, since=self._passed.noted)

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
        self._passed.noted = self._landmarks.ops

    def _read(self, variables: Sequence[str]) -> tuple[list[Any], int]:
        """When the first of `variables` that is read in this graph was wanted, and when its gate was open."""
        for number, variable in enumerate(variables):
            passed = self._passed.by_variable.get((variable, self._replica))
            if passed is not None:
                operands = self._landmarks.first_use(passed.handle)
                return ([_note(_probes(operands)), _note([passed.op])] if operands else []), number
        return [], -1

    def _step(self) -> list[Any]:
        """When the step had its input, and when its forward pass had ended."""
        if self._landmarks.backward is None and self._passed.noted:
            return []  # of a backward pass that has been sent already
        begin = _note(self._inputs) if self._inputs else 0.0
        last = self._landmarks.last_of_forward()
        return [begin, _note(_probes(last)) if last else 0.0]


def _probes(tensors: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """Ops that end when `tensors` are there."""
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
def _now_function() -> Any:
    @tf.function(autograph=False, input_signature=[])
    def tfps_now() -> tf.Tensor:
        return tf.timestamp()

    return tfps_now.get_concrete_function()


def _note(after: Sequence[Any]) -> tf.Tensor:
    """The time (float64 seconds) when all of `after` is there."""
    with tf.device(HOST), tf.control_dependencies(list(after)):
        return call_stateless(_now_function(), [])[0]
