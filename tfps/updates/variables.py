"""Variables of a tfps strategy: mirrored over the local devices, with a gate in front of every access.

A deferred update accesses the updated variable and its slots directly; it reads every other one as of the send.

Tested in tests/integration/test_semantics.py, tests/updates/test_combined.py, tests/updates/test_additive.py
and tests/updates/test_conversions.py.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from numpy.typing import DTypeLike

from tfps.errors import JoinError, UnsupportedError
from tfps.graph.ops import HOST, Gate, computed_from, is_argument, outside, pass_gate, place_of, write_after
from tfps.graph.patches import replaced
from tfps.graph.row_kinds import Of
from tfps.graph.shares import Share, current_share
from tfps.graph.tf_private import (
    ResourceVariable,
    distribute_lib,
    in_xla,
    is_differentiated,
    ops,
    outer_graphs,
    values,
    values_util,
)
from tfps.keras_hooks.keras_private import in_symbolic_scope
from tfps.runtime.remote import RemoteParameter
from tfps.types import Array, Function, Structure, Value, Variable
from tfps.updates.state_reads import is_read_elsewhere

# What changes a value so that parts of a sum no longer add up.
_OTHER = {
    *("Maximum", "Minimum", "Mul", "RealDiv", "Div", "DivNoNan", "FloorDiv", "Pow", "Square", "Sqrt", "Rsqrt", "Exp"),
    *("Log", "Log1p", "Abs", "Neg", "Max", "Min", "Mean", "Prod", "ClipByValue", "Mod", "FloorMod", "Reciprocal"),
}


def adds_up(component: Variable, value: Value, replica: tf.Graph | None) -> bool:
    """Whether `value`, in the graph of a `replica` function, may be that of `component` plus something, or is zero."""
    if (constant := tf.get_static_value(value)) is not None:
        return not constant.any()

    def uses(tensor: tf.Tensor) -> bool:
        return any(each.dtype == tf.resource and outside(each) is component.handle for each in tensor.op.inputs)

    def goes_on(tensor: tf.Tensor) -> bool:
        return tensor.op.type != "ReadVariableOp" and not uses(tensor)

    def found(values: Iterable[tf.Tensor], goes_on: Callable[[tf.Tensor], bool]) -> list[tf.Tensor]:
        return [each for each in computed_from(values, goes_on) if tf.is_symbolic_tensor(each)]

    added = found([value], lambda each: goes_on(each) and each.op.type not in _OTHER)
    changed = found([part for each in added if each.op.type in _OTHER for part in each.op.inputs], goes_on)
    if any(each.op.type == "ReadVariableOp" and uses(each) for each in changed):
        return False
    # It is read, or a function hides whether it is.
    return any(uses(each) or (is_argument(each) and each.graph is not replica) for each in [*added, *changed])


def kept_part(component: Variable, value: tf.Tensor) -> tf.Tensor | None:
    """Returns the part of `value`, a tensor of a graph, that is what `component` had, times something.

    As `0.9 * v` of `0.9 * v + 0.1 * x`. Zeros if `value` is not computed from it; None if it is, but not like that.
    """
    captures = getattr(value.graph, "captures", ())
    handles = {id(inside) for _, inside in captures if outside(inside) is component.handle}
    try:
        found = _kept_part(value, handles)
    except ArithmeticError:
        return None
    return tf.zeros_like(value) if found is None else tf.broadcast_to(found, tf.shape(value))


def _kept_part(tensor: tf.Tensor, handles: set[int]) -> tf.Tensor | None:
    if not any(id(each) in handles for each in computed_from([tensor])):
        return None
    op = tensor.op
    if op.type == "ReadVariableOp":
        return tensor
    linear = op.type in ("Identity", "Cast", "Neg", "AddV2", "Add", "Sub", "Mul", "RealDiv")
    parts = [_kept_part(each, handles) for each in op.inputs] if linear else []
    match op.type, parts:
        case "Identity" | "Cast", [part]:
            return tf.cast(part, tensor.dtype)
        case "Neg", [part]:
            return tf.negative(part)
        case "AddV2" | "Add" | "Sub", _:
            pairs = zip(op.inputs, parts, strict=True)
            first, second = (tf.zeros_like(each) if part is None else part for each, part in pairs)
            return first - second if op.type == "Sub" else first + second
        case "Mul", [None, part]:
            return op.inputs[0] * part
        case "Mul" | "RealDiv", [part, None]:
            return part * op.inputs[1] if op.type == "Mul" else part / op.inputs[1]
    raise ArithmeticError("not a multiple of what the variable had, plus something")


class _Tracing(threading.local):
    deferral: Deferral | None = None  # the deferred update that this thread traces
    updating = False  # whether it is in an update that every replica makes alike
    assigning = False  # whether it reads a variable only in order to assign it

    @property
    def alike(self) -> bool:  # whether all replicas write the same
        return self.deferral is not None or self.updating


_tracing = _Tracing()


class Deferral:
    """Trace of an update of `variables`, deferred by `graph`, with what it keeps of other values as of the send."""

    def __init__(self, variables: list[GatedVariable], graph: tf.Graph) -> None:
        self.variables, self.graph = variables, graph
        self.kept: dict[int, tuple[ResourceVariable, tf.Tensor, Value]] = {}
        # What updates that are sent together read of variables, by id: from a device each is copied to the host once.
        self.reads: dict[int, tf.Tensor] = {}

    def keep(self, what: Value) -> tf.Tensor:
        """Returns, inside the update, the value at the send of `what`, a variable or a tensor of the sending graph."""
        if id(what) not in self.kept:
            tensor = what
            if not isinstance(what, tf.Tensor):
                if id(what) not in self.reads:
                    with deferring(None), self.graph.as_default(), tf.control_dependencies(None):
                        self.reads[id(what)] = tf.convert_to_tensor(what)
                tensor = self.reads[id(what)]
            with ops.init_scope(), tf.device(HOST):
                holder = ResourceVariable(tf.zeros(tensor.shape, tensor.dtype), trainable=False, name="tfps_kept")
            self.kept[id(what)] = holder, tensor, what  # keeps `what` alive, so that its id stays unique
        return self.kept[id(what)][0].read_value()


def current_replica(strategy: tf.distribute.Strategy) -> int | None:
    """Returns the local replica of `strategy` whose replica function or update this is; None outside."""
    context = distribute_lib.get_replica_context()
    if context is None:
        return distribute_lib.get_update_replica_id()
    return context._replica_id if context.strategy is strategy else None  # outside all scopes TensorFlow has its own


def deferring(deferral: Deferral | None) -> contextlib.AbstractContextManager[None]:
    """Marks that this thread traces `deferral`; None: that it is back in the program."""
    return replaced(_tracing, "deferral", deferral)


def updating() -> contextlib.AbstractContextManager[None]:
    """Marks that this thread is in an update that every replica makes alike, so that values stay equal anyway."""
    return replaced(_tracing, "updating", True)


class Converted:
    """What TensorFlow's distributed variables lack: without it `int(v)` raises, and an array would hold an object.

    Truth is left out: `bool(v)` is always true, as TensorFlow itself asks `if destinations` of such variables.
    """

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        if not tf.executing_eagerly():
            raise NotImplementedError("the value of a variable is known only in eager execution")  # as TensorFlow's
        return np.asarray(tf.convert_to_tensor(self).numpy(), dtype)  # a copy: updates write replicas' memory

    def __int__(self) -> int:
        return int(tf.convert_to_tensor(self))

    def __float__(self) -> float:
        return float(tf.convert_to_tensor(self))

    def __complex__(self) -> complex:
        return complex(tf.convert_to_tensor(self))


class GatedVariable(Converted, values.MirroredVariable):
    """A mirrored variable whose accesses wait at its gate.

    `gates` has one gate per local replica if the variable may get deferred updates, else it is empty. A slot of such a
    variable (`owner`) waits at its owner's gates. Small variables of a `group` may share gates; see pending.py.
    """

    gates: tuple[Gate, ...] = ()
    owner: GatedVariable | None = None
    group = 0  # its number; 0: none
    remote: RemoteParameter | None = None  # if pservers update it
    written_in_graph = False  # by a function of the program, at some time
    batch_statistic = False  # of a replica's batch, as documented: of Keras' BatchNormalization
    never_combined = False  # replicas step alike, or each worker has a value of its own
    unknown = ""  # why it must not be read; see stages.py
    global_copy: GatedVariable | None = None  # what all workers had after the last exchange; see outer_optimizer.py

    @property
    def shared(self) -> GatedVariable:
        """What all workers share, pservers and checkpoints have: the global copy, or else the variable itself."""
        return self if self.global_copy is None else self.global_copy

    def make_gates(self) -> None:
        self.gates = tuple(Gate(str(self.name)) for _ in self._values)
        self._slots: list[weakref.ref[GatedVariable]] = []
        self._sharing = [weakref.ref(self)]
        self._was_passed = False
        self._passed: tuple[weakref.WeakSet[tf.Graph], ...] = tuple(weakref.WeakSet() for _ in self._values)

    def share_gates(self, owner: GatedVariable) -> None:
        """Makes this variable a slot of `owner`."""
        self.owner, self.gates = owner, owner.gates
        self._passed = tuple(weakref.WeakSet() for _ in self._values)
        owner._slots = [slot for slot in owner._slots if slot() is not None] + [weakref.ref(self)]

    def share_gates_with(self, others: Sequence[GatedVariable]) -> None:
        """Makes `others` and their slots wait at this variable's gates."""
        self._sharing += [weakref.ref(other) for other in others]
        for other in others:
            other._sharing = self._sharing
            for each in other.with_slots():
                each.gates = self.gates
        for gate in self.gates:
            gate.names = (*gate.names, *(str(other.name) for other in others))

    def sharing(self) -> list[GatedVariable]:
        return [variable for ref in self._sharing if (variable := ref()) is not None]

    def is_gate_in_use(self) -> bool:
        """Whether a graph may wait at this variable's gates, or an update is under way."""
        return self._was_passed or any(gate.closed for gate in self.gates)

    @property
    def has_own_gates(self) -> bool:
        """Whether it may get deferred updates."""
        return bool(self.gates) and self.owner is None

    def with_slots(self) -> list[GatedVariable]:
        """This variable and its slots, of all optimizers."""
        return [self, *(slot for ref in self._slots if (slot := ref()) is not None)]

    def forget_passes(self, replica: int, graph: tf.Graph) -> None:
        """Makes later accesses in `graph` and its outer graphs wait again, after its gate was closed in `graph`."""
        for each in [slot for other in self.sharing() for slot in other.with_slots()]:
            each._passed[replica].difference_update(outer_graphs(graph))

    def _access(self, replica: int) -> None:
        """Waits for this replica's component (eagerly), or makes later ops of the graph wait for its gate."""
        if _tracing.deferral is not None:
            return
        extended = self._distribute_strategy.extended
        if tf.executing_eagerly():
            if self.gates:
                extended.check(self.gates[replica].wait())
            return
        if in_symbolic_scope():
            return  # Keras infers shapes: the graph never runs
        graph = ops.get_default_graph()
        if self.written_in_graph and not _tracing.assigning:
            self._combine_if_assigned()
        after = extended.scheduler.note_access(self, graph)
        if not self.gates:
            if after:
                write_after(self._values[replica], after)
            return
        if graph in self._passed[replica]:
            return
        if in_xla(graph):
            raise UnsupportedError(
                f"variable {self.name!r} is used in a function compiled by XLA (jit_compile=True), where tfps cannot "
                "wait for it; use jit_compile=False"
            )
        passing = self.sharing() if self.owner is None else [self]
        for each in passing:
            each._passed[replica].add(graph)
            (each.owner or each)._was_passed = True
        if current_replica(self._distribute_strategy) is None:
            self.gates[replica].passed_outside.add(graph)
        passed = pass_gate(self.gates[replica], [each._values[replica].handle for each in passing], after)
        if self.owner is None:
            extended.scheduler.note_passed(passing, replica, graph, passed)

    @property
    def local(self) -> bool:
        """Whether replicas assign locally until a read outside a step combines them: moving statistics."""
        # TensorFlow would average at each assignment (MEAN) or never (NONE, Keras' default); later gives the same.
        averaged = self._aggregation in (tf.VariableAggregation.MEAN, tf.VariableAggregation.NONE)
        own = self.never_combined or self.trainable or self.gates
        return averaged and self.dtype.is_floating and not own

    def wait(self) -> None:
        """Waits, eagerly, until all updates under way have been made."""
        for replica in range(len(self._values)):
            self._access(replica)

    def note_write(self) -> None:
        """Notes that the program is about to assign this variable."""
        if _tracing.deferral is not None or in_symbolic_scope():
            return
        self.unknown = ""
        if not tf.executing_eagerly():
            if self.remote is not None:
                raise UnsupportedError(
                    f"variable {self.name!r} is assigned within a function (a layer, a train_step or a tf.function "
                    "does), but with update='server' pservers hold it: assign it between steps, eagerly, or use "
                    "update='worker' (tfps.Config)"
                )
            self.written_in_graph = True
        elif self.remote is not None:
            self.wait()  # else what is being sent would count as assigned
            self.remote.holder = None
        elif self.global_copy is not None:
            self.wait()
            self.global_copy.wait()

    def note_assigned(self) -> None:
        """Notes that every rank has assigned this variable between steps: its global copy follows."""
        if self.remote is not None:
            self.remote.holder = None
        if self.global_copy is not None and tf.executing_eagerly():
            self.global_copy.note_write()
            for component, own in zip(self.global_copy._values, self._values, strict=True):
                component.assign(own.read_value())
            self._distribute_strategy.extended.policy.note_assigned(self)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Function]:
        factories = super()._gather_saveables_for_checkpoint()
        return {key: functools.partial(_Saveable, self, self._primary, self._common_name) for key in factories}

    def _update_replica(self, update_fn: Function, value: Value, **kwargs: object) -> Value:
        self.note_write()
        extended = self._distribute_strategy.extended
        if self.local and not _tracing.alike:
            extended.note_local_write(self)
            with replaced(_tracing, "assigning", True):
                return update_fn(self._get_on_device_or_primary(), value, **kwargs)
        if self._aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA and tf.is_tensor(value):
            if not _tracing.alike:
                value = extended.of_first_replica(self, value)
            context = distribute_lib.get_replica_context()
            return context._update(self, update_fn, args=(value,), kwargs=kwargs, group=True)
        return super()._update_replica(update_fn, value, **kwargs)

    def _update_cross_replica(self, update_fn: Function, value: Value, **kwargs: object) -> Value:
        """Updates all local replicas. In a step of a loop without `run` each worker does so for itself."""
        in_step = is_differentiated() or not tf.executing_eagerly()  # else it is assigned between steps
        if self.local and in_step and not _tracing.alike and not in_symbolic_scope():
            self._distribute_strategy.extended.note_local_write(self)
        return super()._update_cross_replica(update_fn, value, **kwargs)

    def assign(self, value: Value, *arguments: object, **options: object) -> Value:
        return super().assign(self._counted(value, lambda: self._get().read_value()), *arguments, **options)

    def assign_add(self, value: Value, *arguments: object, **options: object) -> Value:
        return super().assign_add(self._counted(value, None), *arguments, **options)

    def assign_sub(self, value: Value, *arguments: object, **options: object) -> Value:
        return super().assign_sub(self._counted(value, None), *arguments, **options)

    @replaced(_tracing, "assigning", True)
    def _counted(self, value: Value, before: Callable[[], tf.Tensor] | None) -> Value:
        """Returns what a replica writes, with its change of `before()` (None: `value` is the change) weighted by rows.

        The mean over replicas then equals that of a batch that divides evenly. Sums are not weighted, nor is what does
        not come from this replica's rows: a counter's increment, a statistic of the global batch. Eagerly nobody can
        tell, so a step of Keras takes the mean at once. TensorFlow reduces tensors only, and takes a number as it is.
        """
        summed = self._aggregation == tf.VariableAggregation.SUM
        reduced = (summed or self._aggregation == tf.VariableAggregation.MEAN) and tf.is_tensor(value)
        share = None if _tracing.alike else current_share()
        if not self.local and not reduced:
            if share is not None:
                self._check_alike(share, value)
            return value
        if share is None:
            return value
        value = tf.convert_to_tensor(value, self.dtype)
        if summed:
            return share.only_if_rows(value)
        # In evaluation some ranks may have a batch that others have not, but aggregated variables reduce anyway.
        together = not (self.local and share.step == "evaluation")
        if self.local and together and tf.executing_eagerly():
            # In 64 bits: the mean of a number that all replicas write alike is that number.
            part = share.only_if_rows(tf.cast(value, tf.float64) * share.weight(share.even, exchange=True))
            total = self._distribute_strategy.extended._replica_ctx_all_reduce(tf.distribute.ReduceOp.SUM, [part])[0]
            return tf.cast(total, self.dtype)
        # Asked for before the graph is looked at: a replica whose rows are fixed may have a constant, others have none.
        relative = share.relative(self.dtype, exchange=together)
        if self.local and not share.depends_on_rows(value):
            return value
        if self.local:
            self._check_mean(share, value)
        # Of a moving mean, only the batch's part is weighted: what replicas had before may differ between them.
        start = tf.zeros_like(value) if before is None else tf.broadcast_to(before(), tf.shape(value))
        kept = kept_part(self._get_on_device_or_primary(), value) if tf.is_symbolic_tensor(value) else None
        if self.local:
            self._note_assigned(share, linear=kept is not None)
        kept = start if kept is None else kept
        counted = tf.where(tf.equal(relative, 1), value, kept + relative * (value - kept))
        # Where nobody knows the rows of all, nothing is weighted: then a replica without rows changes nothing.
        return share.only_if_rows(counted, tf.where(tf.equal(relative, 0), kept, start))

    def _check_mean(self, share: Share, value: Value) -> None:
        """Raises UnsupportedError if `value` (or a change), of a step's graph, is not known to be a mean over rows.

        The mean over replicas is then not that of one process. With `aggregation="mean"` a program asks for it.
        """
        asked = self._aggregation == tf.VariableAggregation.MEAN or self.batch_statistic
        alone = self._distribute_strategy.extended.combiner.single
        if asked or alone or share.graph is None or not tf.is_symbolic_tensor(value):  # eagerly nobody can tell
            return
        kind = share.kinds.of(value)
        if not kind.is_mean:
            raise UnsupportedError(
                f"variable {self.name!r} is averaged over replicas, as moving statistics are, but what a step assigns "
                f"{kind.words} (at {place_of(share.kinds.origin(value).op)}), so the average is not what one process "
                "has. Compute it from all rows: context = tf.distribute.get_replica_context(), then "
                "context.all_gather(rows, axis=0) for rows, a queue or a maximum, and "
                "context.all_reduce(tf.distribute.ReduceOp.SUM, sums) for sums and counts. If the average over "
                "replicas is meant, create the variable with aggregation='mean'"
            )

    def _check_alike(self, share: Share, value: Value) -> None:
        """Raises UnsupportedError if what a step's graph assigns to a counter comes from a replica's rows.

        Counters are never combined: each replica would have counted its own rows only.
        """
        none = self._aggregation == tf.VariableAggregation.NONE
        counter = none and not (self.dtype.is_floating or self.trainable or self.never_combined)
        alone = self._distribute_strategy.extended.combiner.single
        if not counter or alone or share.graph is None or not tf.is_symbolic_tensor(value):
            return
        kind = share.kinds.of(value)
        if kind.of not in (Of.FIXED, Of.UNSURE) and share.depends_on_rows(value):
            raise UnsupportedError(
                f"variable {self.name!r} ({self.dtype.name}) must get the same value on all replicas, as nothing "
                f"combines it, but what a step assigns {kind.words} (at {place_of(share.kinds.origin(value).op)}), and "
                "each replica has rows of its own. Compute it from all rows: context = "
                "tf.distribute.get_replica_context(), then context.all_reduce(tf.distribute.ReduceOp.SUM, count) for "
                "counts, as of the rows of the batch, and context.all_gather(rows, axis=0) for all else"
            )

    def _note_assigned(self, share: Share, *, linear: bool) -> None:
        """Notes that a replica assigns this in a step's graph, by its rows; `linear` in what the variable had."""
        extended = self._distribute_strategy.extended
        apart = extended.combiner.single or extended.combines_apart
        if share.outer is None or share.outer.graph is None or apart or self.batch_statistic:
            return
        share.at_end[id(self)] = _Assigned(self, share.outer, ops.get_default_graph(), linear)

    def _combine_if_assigned(self) -> None:
        """Takes the mean over replicas at once, in the graph, if this step has assigned what is about to be read."""
        share = current_share() if self.local and not self.batch_statistic and not _tracing.alike else None
        assigned = None if share is None else share.at_end.get(id(self))
        if share is not None and isinstance(assigned, _Assigned) and assigned.outer.trains:
            del share.at_end[id(self)]
            assigned.combine()

    def take_combined(self, value: Value) -> None:
        for component in self._values:
            if component.numpy().tobytes() != value.tobytes():
                component.assign(value)

    def _refresh(self) -> None:
        """Combines what all have written before a read outside a step; under a tape, a loop without `run` is in one."""
        if self.local and current_replica(self._distribute_strategy) is None and not is_differentiated():
            with tf.init_scope():
                if tf.executing_eagerly():
                    self._distribute_strategy.extended.combiner.refresh(self)

    def _get(self) -> Value:
        if values_util.is_saving_non_distributed():
            return super()._get()
        replica = current_replica(self._distribute_strategy)
        return self._get_cross_replica() if replica is None else self._get_replica(replica)

    def _get_cross_replica(self) -> tf.Tensor:
        self._refresh()
        return super()._get_cross_replica()

    def _export_to_saved_model_graph(self, *args: object, **kwargs: object) -> Structure:
        self._refresh()
        return super()._export_to_saved_model_graph(*args, **kwargs)

    def _trackable_children(self, save_type: str = "checkpoint", **options: object) -> dict[str, object]:
        """Adds to a SavedModel the gates that its functions may pass."""
        children: dict[str, object] = super()._trackable_children(save_type, **options)
        if save_type == "savedmodel":
            for replica, gate in enumerate(self.gates):
                if gate.passed_outside:
                    children[f"tfps_gate_{replica}"] = gate.saved
        return children

    def _kept(self) -> tf.Tensor | None:
        """Returns the value as of the send, inside a deferred update that does not own this variable; else None."""
        if self.unknown and tf.executing_eagerly():
            raise JoinError.because(self.unknown)
        deferral = _tracing.deferral
        if deferral is None or any(self is own or self.owner is own for own in deferral.variables):
            return None
        return deferral.keep(self)

    def _get_replica(self, replica_id: int) -> Variable:
        self._access(replica_id)
        return super()._get_replica(replica_id)

    @property
    def handle(self) -> tf.Tensor:
        replica = values_util.get_current_replica_id_as_int()
        if replica is not None:  # outside all scopes the first replica's, as in TensorFlow
            self._refresh()
            self._access(replica)
        elif distribute_lib.get_replica_context() is None and not values_util.is_saving_non_distributed():
            # A loop in the scope without `run`: TensorFlow has none here, and its tape then knows no variable.
            self._access(0)
            return self._primary.handle
        return super().handle

    @property
    def values(self) -> tuple[Variable, ...]:
        self.wait()
        return tuple(super().values)

    def __repr__(self) -> str:
        if tf.executing_eagerly():
            self._access(0)  # shows this worker's value: printing must not need other ranks
        return str(super().__repr__())

    def value(self) -> tf.Tensor:
        kept = self._kept()
        if kept is None:
            self._refresh()
        return super().value() if kept is None else kept

    def read_value(self) -> tf.Tensor:
        kept = self._kept()
        return super().read_value() if kept is None else kept

    def _dense_var_to_tensor(
        self, dtype: tf.DType | None = None, name: str | None = None, as_ref: bool = False
    ) -> tf.Tensor:
        kept = self._kept()
        return super()._dense_var_to_tensor(dtype, name, as_ref) if kept is None else kept


@dataclass(frozen=True)
class _Assigned:
    """A state that a replica has assigned by its rows, in `graph`, and that replicas have others of since then."""

    variable: GatedVariable
    outer: Share
    graph: tf.Graph
    linear: bool  # in what the variable had: else averaging later is not averaging in each step

    def __call__(self, result: Structure) -> None:
        """At the end of the replica function, which returns `result`: averages if the step depends on the state."""
        with replaced(_tracing, "assigning", True):  # nothing is read here
            component, graph = self.variable._get_on_device_or_primary(), self.outer.graph
            read = not self.linear or is_read_elsewhere(component, graph, result, self.outer.kinds)
            if read and self.outer.trains:
                self.combine()

    def combine(self) -> None:
        """Takes the mean over replicas, in the innermost graph that is around the assignment and the current one."""
        around = outer_graphs(self.graph)
        graph = next(each for each in outer_graphs(ops.get_default_graph()) if each in around)
        extended = self.variable._distribute_strategy.extended
        inside = contextlib.nullcontext() if graph is ops.get_default_graph() else graph.as_default()
        with inside, replaced(_tracing, "assigning", True):
            component = self.variable._get_on_device_or_primary()
            own = tf.cast(component.read_value(), tf.float64)  # so that the mean of equal values is that value
            (mean,) = extended._replica_ctx_all_reduce(tf.distribute.ReduceOp.MEAN, [own])
            component.assign(tf.cast(mean, component.dtype), read_value=False)


class _Saveable(values._MirroredSaveable):
    """Saves the global copy, if there is one. Restores as TensorFlow does, and notes it."""

    def __init__(self, variable: GatedVariable, primary: Variable, default_name: str, name: str | None = None) -> None:
        super().__init__(variable.shared, variable.shared._primary, name or default_name)
        self._mirrored_variable = variable

    def restore(self, restored_tensors: Sequence[tf.Tensor], restored_shapes: object) -> tf.Operation:
        self._mirrored_variable.note_write()
        restored = super().restore(restored_tensors, restored_shapes)
        self._mirrored_variable.note_assigned()
        return restored


def container_of(component: Variable) -> Variable:
    """Returns the distributed variable that `component` belongs to, or None."""
    for holder in (component, getattr(component, "handle", None)):
        reference = getattr(holder, "_distributed_container", None)
        if reference is not None:
            return reference()
    return None
