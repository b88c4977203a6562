"""Variables of a tfps strategy: mirrored over the local devices, with a gate in front of every access.

An access is any use of a replica's component, whether it reads or writes. Inside a deferred update the updated
variable and its own slots are accessed directly; every other variable is read as it was when the gradient was sent.

Tested in tests/integration/test_semantics.py and tests/strategy/test_combined.py.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.graph.ops import HOST, Gate, pass_gate, write_after
from tfps.graph.shares import current_share
from tfps.graph.tf_private import ResourceVariable, distribute_lib, in_xla, ops, outer_graphs, values, values_util
from tfps.keras_hooks.keras_private import in_symbolic_scope


class _Tracing(threading.local):
    """What this thread traces just now: a deferred update, an update that every replica makes alike."""

    deferral: Deferral | None = None
    updating = False

    @contextlib.contextmanager
    def set(self, name: str, value: Any) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)


_tracing = _Tracing()


class Deferral:
    """Trace of one deferred update: what it may use by reference and what it keeps as of the send.

    Args:
        variables: the gated variables that the update writes.
        graph: the graph that sends; kept values are computed there.
    """

    def __init__(self, variables: list[GatedVariable], graph: tf.Graph) -> None:
        self.variables = variables
        self.graph: tf.Graph | None = graph
        self.kept: dict[int, tuple[ResourceVariable, tf.Tensor, Any]] = {}

    def release(self) -> None:
        """After the send has been built: lets go of the sending graph."""
        self.graph = None
        self.kept.clear()

    def kept_names(self) -> tuple[str, ...]:
        """Names of what is kept."""
        return tuple(str(what.name).removesuffix(":0") for _, _, what in self.kept.values())

    def owns(self, variable: GatedVariable) -> bool:
        """Whether the update may read and write `variable` directly."""
        return any(variable is own or variable.owner is own for own in self.variables)

    def keep_tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        """Inside the update: the value that `tensor` of the sending graph had at the send."""
        return self._keep(tensor, tensor)

    def keep_variable(self, variable: GatedVariable) -> tf.Tensor:
        """Inside the update: the value that `variable` had at the send."""
        if id(variable) not in self.kept:
            if self.graph is None:
                raise RuntimeError("a deferred update is traced once only")
            with deferring(None), self.graph.as_default(), tf.control_dependencies(None):
                tensor = tf.convert_to_tensor(variable)
        else:
            tensor = self.kept[id(variable)][1]
        return self._keep(variable, tensor)

    def _keep(self, what: Any, tensor: tf.Tensor) -> tf.Tensor:
        if id(what) not in self.kept:
            with ops.init_scope(), tf.device(HOST):
                holder = ResourceVariable(tf.zeros(tensor.shape, tensor.dtype), trainable=False, name="tfps_kept")
            self.kept[id(what)] = holder, tensor, what  # `what` stays alive, so that its id stays its own
        return self.kept[id(what)][0].read_value()


def current_replica(strategy: tf.distribute.Strategy) -> int | None:
    """The local replica of `strategy` that this code runs in: of a replica function or of an update; None outside.

    Outside of all scopes TensorFlow says that it is in replica 0, of its default strategy.
    """
    context = distribute_lib.get_replica_context()
    if context is None:
        return distribute_lib.get_update_replica_id()
    return context._replica_id if context.strategy is strategy else None


def deferring(deferral: Deferral | None) -> contextlib.AbstractContextManager[None]:
    """This thread traces `deferral` (or, with None, is back in the program)."""
    return _tracing.set("deferral", deferral)


def updating() -> contextlib.AbstractContextManager[None]:
    """This thread is in an update that every replica makes alike: what it writes stays equal by itself."""
    return _tracing.set("updating", True)


class GatedVariable(values.MirroredVariable):
    """A mirrored variable that is read behind its gate.

    `gates` has one gate per local replica for a variable that may get deferred updates, else it is empty; a slot of
    such a variable (`owner`) waits at its owner's gates.
    """

    gates: tuple[Gate, ...] = ()
    owner: GatedVariable | None = None

    def make_gates(self) -> None:
        """Gives this variable gates of its own, open."""
        self.gates = tuple(Gate(str(self.name)) for _ in self._values)
        self._slots: list[weakref.ref[GatedVariable]] = []
        self._passed: tuple[weakref.WeakSet[tf.Graph], ...] = tuple(weakref.WeakSet() for _ in self._values)

    def share_gates(self, owner: GatedVariable) -> None:
        """Makes this variable a slot of `owner`."""
        self.owner, self.gates = owner, owner.gates
        self._passed = tuple(weakref.WeakSet() for _ in self._values)
        owner._slots = [slot for slot in owner._slots if slot() is not None] + [weakref.ref(self)]

    def with_slots(self) -> list[GatedVariable]:
        """This variable and its slots, of all optimizers."""
        return [self, *(slot for ref in self._slots if (slot := ref()) is not None)]

    def forget_passes(self, replica: int, graph: tf.Graph) -> None:
        """After a close in `graph`: later accesses there, and in the graphs around it, must wait again."""
        for each in outer_graphs(graph):
            self._passed[replica].discard(each)

    def _access(self, replica: int) -> None:
        """Waits for this replica's component (eagerly), or orders what follows in the graph behind its gate."""
        if _tracing.deferral is not None:
            return
        extended = self._distribute_strategy.extended
        if tf.executing_eagerly():
            if self.gates:
                extended.check(self.gates[replica].wait())
            return
        graph = ops.get_default_graph()
        after = extended.note_access(self, graph)
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
        self._passed[replica].add(graph)
        passed = pass_gate(self.gates[replica], self._values[replica].handle, after)
        if self.owner is None:
            extended.note_passed(self, replica, graph, passed)

    @property
    def local(self) -> bool:
        """Whether what a replica assigns stays its own until it is read outside a step: moving statistics.

        TensorFlow would average at each assignment (MEAN) or leave the replicas apart for good (NONE, the default of
        Keras). Averaging is linear: for a moving average, later means the same.
        """
        averaged = self._aggregation in (tf.VariableAggregation.MEAN, tf.VariableAggregation.NONE)
        return averaged and self.dtype.is_floating and not self.trainable and not self.gates

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        extended = self._distribute_strategy.extended
        alike = _tracing.deferral is not None or _tracing.updating
        if self.local and not alike:
            extended.note_local_write(self)
            return update_fn(self._get_on_device_or_primary(), value, **kwargs)
        if self._aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA and tf.is_tensor(value):
            if not alike:
                value = extended.of_first_replica(self, value)
            context = distribute_lib.get_replica_context()
            return context._update(self, update_fn, args=(value,), kwargs=kwargs, group=True)
        return super()._update_replica(update_fn, value, **kwargs)

    def assign(self, value: Any, *arguments: Any, **options: Any) -> Any:
        return super().assign(self._counted(value, self._own), *arguments, **options)

    def assign_add(self, value: Any, *arguments: Any, **options: Any) -> Any:
        return super().assign_add(self._counted(value, None), *arguments, **options)

    def assign_sub(self, value: Any, *arguments: Any, **options: Any) -> Any:
        return super().assign_sub(self._counted(value, None), *arguments, **options)

    def _counted(self, value: Any, before: Callable[[], tf.Tensor] | None) -> Any:
        """What a replica writes: what it adds to `before` (None: to anything) counts by its rows.

        The mean over replicas is then that of a batch that divides evenly; one without rows adds nothing.
        """
        share = None if not self.local or _tracing.deferral is not None or _tracing.updating else current_share()
        if share is None:
            return value
        value = tf.convert_to_tensor(value, self.dtype)
        start = tf.zeros([], self.dtype) if before is None else before()
        relative = share.relative(self.dtype)
        counted = tf.where(tf.equal(relative, 1), value, start + relative * (value - start))
        return share.only_if_rows(counted, tf.broadcast_to(start, tf.shape(counted)))

    def _own(self) -> tf.Tensor:
        return self._get_on_device_or_primary().read_value()

    def take_combined(self, value: Any) -> None:
        """Gives all replicas `value`."""
        for component in self._values:
            if component.numpy().tobytes() != value.tobytes():
                component.assign(value)

    def _refresh(self) -> None:
        """Before a read outside a step: combines what replicas have written, on all ranks."""
        if self.local and current_replica(self._distribute_strategy) is None:
            with tf.init_scope():
                if tf.executing_eagerly():
                    self._distribute_strategy.extended.combiner.refresh()

    def _get(self) -> Any:
        if values_util.is_saving_non_distributed():
            return super()._get()
        replica = current_replica(self._distribute_strategy)
        return self._get_cross_replica() if replica is None else self._get_replica(replica)

    def _get_cross_replica(self) -> tf.Tensor:
        self._refresh()
        return super()._get_cross_replica()

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> Any:
        self._refresh()
        return super()._export_to_saved_model_graph(*args, **kwargs)

    def _kept(self) -> tf.Tensor | None:
        """Inside a deferred update that does not own this variable: its value as of the send."""
        deferral = _tracing.deferral
        if deferral is None or deferral.owns(self):
            return None
        return deferral.keep_variable(self)

    def _get_replica(self, replica_id: int) -> Any:
        self._access(replica_id)
        return super()._get_replica(replica_id)

    @property
    def handle(self) -> tf.Tensor:
        replica = values_util.get_current_replica_id_as_int()
        if replica is not None:  # outside of all scopes the first one's, as TensorFlow gives it
            self._refresh()
            self._access(replica)
        return super().handle

    @property
    def values(self) -> tuple[Any, ...]:
        for replica in range(len(self._values)):
            self._access(replica)
        return tuple(super().values)

    def __repr__(self) -> str:
        if tf.executing_eagerly():
            self._access(0)  # it shows the value, as it is on this worker: showing must not need other ranks
        return str(super().__repr__())

    def value(self) -> tf.Tensor:
        kept = self._kept()
        if kept is None:
            self._refresh()
        return super().value() if kept is None else kept

    def read_value(self) -> tf.Tensor:
        kept = self._kept()
        return super().read_value() if kept is None else kept

    def _dense_var_to_tensor(self, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> tf.Tensor:
        kept = self._kept()
        return super()._dense_var_to_tensor(dtype, name, as_ref) if kept is None else kept


class OnReadVariable(values.SyncOnReadVariable):
    """A variable whose replicas' components are combined when it is read outside a step: a metric's.

    Reads in a graph outside of `strategy.run` combine within that graph, at every run, on all ranks.
    """

    _combined: tf.Tensor | None = None  # None: no replica has written yet, or combined before the last `assign`

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        if self._aggregation != tf.VariableAggregation.NONE:
            self._distribute_strategy.extended.note_local_write(self)
        return super()._update_replica(update_fn, value, **kwargs)

    def take_combined(self, value: Any) -> None:
        """Keeps `value` for reads; the components go on as they are."""
        self._combined = tf.constant(value, self.dtype)

    def _get_cross_replica(self) -> Any:
        extended = self._distribute_strategy.extended
        if in_symbolic_scope():
            return self._primary  # there is nothing to combine, and ranks that have built their model do not come here
        if (
            not tf.executing_eagerly()
            or extended.combiner.single
            or self._aggregation == tf.VariableAggregation.NONE
            or values_util.is_saving_non_distributed()
        ):
            return super()._get_cross_replica()
        extended.combiner.refresh()
        return tf.identity(self.current())

    def current(self) -> tf.Tensor:
        """The value, where all that replicas have written is combined."""
        if self._combined is None:  # all ranks have what they were given alike
            components = [component.read_value() for component in self._values]
            if self._aggregation == tf.VariableAggregation.SUM:
                self._combined = tf.add_n(components) * tf.cast(self._distribute_strategy.num_workers, self.dtype)
            else:
                self._combined = components[0]
        return self._combined

    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        if not self._outside():
            value = self._counted(value, lambda: self._get_on_device_or_primary().read_value())
            return super().assign(value, use_locking, name, read_value)
        if not tf.executing_eagerly():
            self._distribute_strategy.extended.note_local_write(self)
            return super().assign(value, use_locking, name, read_value)
        value = tf.convert_to_tensor(value, self.dtype)
        nothing = tf.zeros_like(value)
        for replica, component in enumerate(self._values):
            # The first replica of all holds a sum: a part for each would not add up to the same for whole numbers.
            mine = self._aggregation != tf.VariableAggregation.SUM or replica == self._distribute_strategy.rank == 0
            with tf.device(component.device):
                component.assign(value if mine else nothing)
        self._combined = tf.identity(value)
        return self._combined if read_value else None

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._changed_outside():
            return super().assign_add(self._counted(value, None), *args, **kwargs)
        return self.assign(self.read_value() + tf.convert_to_tensor(value, self.dtype))

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._changed_outside():
            return super().assign_sub(self._counted(value, None), *args, **kwargs)
        return self.assign(self.read_value() - tf.convert_to_tensor(value, self.dtype))

    def _counted(self, value: Any, before: Callable[[], tf.Tensor] | None) -> Any:
        """What a replica writes; one without rows leaves `before`, or (None) adds nothing."""
        share = None if self._aggregation == tf.VariableAggregation.NONE else current_share()
        if share is None or not share.may_be_empty:
            return value
        return share.only_if_rows(tf.convert_to_tensor(value, self.dtype), before() if before else None)

    def _outside(self) -> bool:
        """Whether this is neither in a replica function nor in an update."""
        if values_util.is_saving_non_distributed():
            return False
        with distribute_lib.enter_or_assert_strategy(self._distribute_strategy):
            return distribute_lib.in_cross_replica_context() and not values_util.in_replica_update_context()

    def _changed_outside(self) -> bool:
        """Whether it is for this class to change the value: eagerly, outside a step. TensorFlow refuses a sum."""
        if not self._outside() or self._aggregation == tf.VariableAggregation.SUM:
            return False
        if not tf.executing_eagerly():
            self._distribute_strategy.extended.note_local_write(self)
            return False
        return True

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        factories = super()._gather_saveables_for_checkpoint()
        return {key: functools.partial(_OnReadSaveable, self, self._common_name) for key in factories}


class _OnReadSaveable(values._SyncOnReadSaveable):
    """Restores by `assign`, so that the variable knows."""

    def __init__(self, variable: OnReadVariable, default_name: str, name: str | None = None) -> None:
        super().__init__(variable, name or default_name)

    def restore(self, restored_tensors: Any, restored_shapes: Any) -> Any:
        (tensor,) = restored_tensors
        return self._sync_on_read_variable.assign(tensor)


def container_of(component: Any) -> Any:
    """The distributed variable that `component` belongs to, None if it belongs to none."""
    for holder in (component, getattr(component, "handle", None)):
        reference = getattr(holder, "_distributed_container", None)
        if reference is not None:
            return reference()
    return None
