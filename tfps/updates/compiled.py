"""Which replica functions of a strategy XLA compiles, and in which parts.

Tested in tests/strategy/test_xla.py.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfps.config import Config
from tfps.errors import UnsupportedError
from tfps.graph.cut import group
from tfps.graph.first_runs import flag, watch
from tfps.graph.ops import computed_from, outside, place_of
from tfps.graph.parts import Part, Parts, Traced
from tfps.graph.tf_private import eagerly, is_differentiated
from tfps.keras_hooks.xla import asked_by_keras
from tfps.runtime.first_runs import Compiling, FirstRuns, KnownParts
from tfps.runtime.report import Report
from tfps.runtime.runtime import Runtime
from tfps.trace.capture import CapturedPart
from tfps.types import Structure, Variable
from tfps.updates.pending import PendingUpdate
from tfps.updates.scheduler import UpdateScheduler
from tfps.updates.variables import GatedVariable, container_of

logger = logging.getLogger("tfps")


@dataclass(frozen=True)
class CompiledFunction:
    """What XLA compiles of one traced function."""

    function: str  # its name
    parts: Sequence[Part]
    groups: int  # of variables, in forward order
    cut_s: float  # what tracing took longer
    trains: bool  # whether it updates variables by gradients
    runs: FirstRuns  # when XLA compiled it, and for which sizes
    traces: Sequence[FirstRuns]  # of this and earlier graphs of the same function

    @property
    def sizes(self) -> int:
        """For how many sizes it was compiled."""
        return len({each for runs in self.traces for each in runs.sizes})


class CompiledSteps:
    """Cuts traced replica functions of one strategy into parts that XLA compiles."""

    def __init__(self, scheduler: UpdateScheduler, runtime: Runtime, config: Config, devices: Sequence[str]) -> None:
        self._scheduler, self._config, self._devices = scheduler, config, devices
        self._runtime = runtime
        self._compiling = Compiling(runtime.exchange.peers.tell_compiling, config.step_timeout_s)
        self._recording: Variable | None = None  # whether a capture is recorded, for graphs; with the first of them
        self._alone = runtime.exchange.info.embedded
        self.made: list[CompiledFunction] = []

    def in_report(self, report: Report) -> Report:
        """Adds what XLA compiles of a training step to `report`."""
        made = next((each for each in reversed(self.made) if each.trains and each.parts), None)
        if made is None:
            return report
        seconds = sum(runs.seconds for runs in made.traces)
        return dataclasses.replace(report, xla_parts=len(made.parts), xla_sizes=made.sizes, xla_compile_s=seconds)

    def wanted(self, *, eagerly: bool) -> bool:
        """Whether the replica function that is about to be traced is to be compiled.

        Raises:
            UnsupportedError: it is, but not on these devices.
        """
        asked = asked_by_keras()
        if eagerly or asked is False or not (asked or self._config.xla == "on"):
            return False
        if self._config.xla == "off":
            _say_once(
                "xla is 'off' (tfps.Config, TFPS_XLA): what a model with jit_compile=True computes is not compiled"
            )
            return False
        if len(self._devices) > 1:
            raise UnsupportedError(
                f"{'jit_compile=True' if asked else 'xla=' + repr(self._config.xla)} is for one local device, got "
                f"{len(self._devices)} ({', '.join(self._devices)}): start a worker for each device (tfps_launch), or "
                "use jit_compile=False"
            )
        if is_differentiated():
            # The tape has noted the ops that would move.
            _say_once("a replica function that runs under a gradient tape outside of it is not compiled by XLA")
            return False
        return True

    def compile(
        self,
        graph: tf.Graph,
        begin: int,
        arguments: Structure,
        sent: Sequence[PendingUpdate],
        results: Structure,
        *,
        sends: bool,
    ) -> Structure:
        """Cuts the replica function with `results` that has been traced in `graph` from its op number `begin` on.

        Says so in the log, also if nothing is left to compile.

        Args:
            sent: updates whose gradients it sends; sends: whether gradients leave in each step.
        """
        began, spans, first = time.perf_counter(), self._runtime.spans, 0
        traced = Traced(graph, begin, results, notes=self._scheduler.notes(graph), arguments=arguments)
        if sent and sends:
            traced = self._with_groups(traced, sent)
        parts = Parts(traced, self._devices[0])
        self._say_what_stays(traced, parts)
        runs = FirstRuns(
            self._compiling,
            on_new=lambda: _warn_of_sizes() if made.trains and made.sizes > 1 else None,
            record=lambda times: spans.parts(first, times) if sent and spans.recorder.enabled else None,
        )
        if parts.parts:
            self._runtime.adopt(runs, graph)
            runs.last = watch(parts.parts, parts.sized, self._runtime.queue, self._recorded(), runs.id)
        if sent:
            described = _described(parts, sent, graph, self._scheduler.first_use(graph))
            first = self._runtime.shared(KnownParts, KnownParts).add(graph.name, runs, described)
        key = graph.name, bool(sent)  # Keras' steps of training and of evaluation have one name
        before = [each for each in self.made if (each.function, each.trains) == key]
        traces = [*(runs for each in before for runs in each.traces), runs]
        made = CompiledFunction(
            graph.name, parts.parts, traced.groups, time.perf_counter() - began, key[1], runs, traces
        )
        self.made = [*(each for each in self.made if each not in before), made]
        if not parts.parts:
            _say_once(
                f"XLA compiles nothing of {graph.name}: it has few ops itself, or they are in functions that it calls: "
                "take the tf.function from what a train_step calls"
            )
        logger.info(
            "tfps: XLA compiles %s in %d part%s (cut in %.1f s), at its first run",
            graph.name,
            len(made.parts),
            "" if len(made.parts) == 1 else "s",
            made.cut_s,
        )
        return parts.moved(results)

    def _recorded(self) -> Variable:
        if self._recording is None:
            self._recording, recorder = flag(), self._runtime.recorder
            recorder.listeners.append(self._note_recording)
            self._note_recording(recorder.enabled)
        return self._recording

    def _note_recording(self, on: bool) -> None:
        with eagerly():  # wherever a program begins a capture, or traces its first step
            if self._recording is not None:
                self._recording.assign(on)

    def _with_groups(self, traced: Traced, sent: Sequence[PendingUpdate]) -> Traced:
        graph, order = traced.graph, self._scheduler.first_use(traced.graph)
        gated = {
            id(inside): variable for _, inside in graph.captures if (variable := _gated(inside)) is not None
        }  # by resource
        trained = {update.variable._unique_id: update.variable for update in sent}
        every = {variable._unique_id: variable for variable in gated.values()} | trained
        ids = sorted(every, key=lambda each: order.get(each, len(order)))
        nbytes = [_bytes_of(every[each]) if each in trained else 0 for each in ids]
        size = self._config.xla_part_bytes
        groups = group(nbytes, None if size == "auto" else size, alone=self._alone and size == "auto")
        group_of = dict(zip(ids, groups, strict=True))
        gradients = [
            (tensor, group_of[update.variable._unique_id]) for update in sent for tensor in _sources(update, graph)
        ]
        handles = {each: group_of[variable._unique_id] for each, variable in gated.items()}
        return dataclasses.replace(traced, groups=groups[-1] + 1, gradients=gradients, handles=handles)

    def _say_what_stays(self, traced: Traced, parts: Parts) -> None:
        for op in traced.graph.get_operations()[traced.begin :]:
            if op.type in ("While", "StatelessWhile"):
                _say_once(
                    "loops, so the cells of recurrent layers, stay with TensorFlow in a step that XLA compiles, first "
                    f"at {place_of(op)}"
                )
                break
        needed = {id(each) for each in computed_from(tensor for tensor, _ in traced.gradients)}
        unsized = parts.unsized  # of a step that trains only what gradients need: the others are tfps' own
        of_loops = set[tf.Operation]()  # said above: what they return may have a size that only data tells
        for op in unsized:
            if any(each.op.type.startswith("TensorList") or each.op in of_loops for each in op.inputs):
                of_loops.add(op)
        unsized = [op for op in unsized if op not in of_loops]
        if needed:
            unsized = [op for op in unsized if any(id(each) in needed for each in op.outputs)]
        if unsized:
            _say_once(
                "what returns as many values as its data says (tf.where, tf.unique, tf.boolean_mask), and what is "
                "computed from that, stays with TensorFlow in a step that XLA compiles, first at "
                f"{place_of(unsized[0])}"
            )


@functools.cache
def _say_once(what: str) -> None:
    logger.warning("tfps: %s (docs/xla.md)", what)


@functools.cache
def _warn_of_sizes() -> None:
    logger.warning(
        "tfps: there are batches of different sizes on this worker: XLA compiles the step for each, and other workers "
        "wait meanwhile; batches of one size avoid that, as of drop_remainder=True (docs/xla.md)"
    )


def _gated(resource: tf.Tensor) -> GatedVariable | None:
    """Returns the variable of a resource in a graph, if its reads wait at a gate of its own."""
    if resource.dtype != tf.resource:
        return None
    variable = container_of(outside(resource))
    return variable if isinstance(variable, GatedVariable) and variable.has_own_gates else None


def _described(
    parts: Parts, sent: Sequence[PendingUpdate], graph: tf.Graph, order: Mapping[str, int]
) -> list[CapturedPart]:
    """What captures say of the parts of a step; `order`: places of variables in the forward pass, by unique id."""
    gradients: dict[tf.Operation, dict[str, GatedVariable]] = {}  # variables by the call that computes their gradients
    for update in sent:
        for tensor in parts.moved(_sources(update, graph)):
            gradients.setdefault(tensor.op, {})[update.variable._unique_id] = update.variable

    def names(variables: Mapping[str, GatedVariable]) -> list[str]:
        return [variables[each].name.removesuffix(":0") for each in sorted(variables, key=lambda x: order.get(x, -1))]

    found = []
    for number, part in enumerate(parts.parts, 1):
        reads = [each.op.inputs[0] for each in part.call.inputs if each.op.type == "ReadVariableOp"]
        gated = {variable._unique_id: variable for each in reads if (variable := _gated(each)) is not None}
        waits, sends = names(gated), names(gradients.get(part.call, {}))
        layers = list(dict.fromkeys(name.rpartition("/")[0] for name in sends or waits))
        span = f": {layers[0]}{f' … {layers[-1]}' if len(layers) > 1 else ''}" if layers else ""
        passes = "" if not sends else ", forward and backward" if part.waits == part.sends else ", backward"
        found.append(CapturedPart(f"part {number}{span}{passes}", tuple(waits), tuple(sends)))
    return found


def _bytes_of(variable: GatedVariable) -> int:
    return int(math.prod(variable.shape)) * int(variable.dtype.size)


def _sources(update: PendingUpdate, graph: tf.Graph) -> list[tf.Tensor]:
    """Returns the tensors of `graph` that the gradient of `update` is, or is computed from within a branch."""
    gradient = update.reduced.gradient
    parts = [gradient.values, gradient.indices] if update.sparse else [gradient]
    found = computed_from(parts, lambda tensor: tensor.graph is not graph)
    return [each for each in found if tf.is_symbolic_tensor(each) and each.graph is graph and each.dtype != tf.resource]
