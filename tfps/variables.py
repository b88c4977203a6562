"""Variables of a tfps strategy: mirrored over the local devices, with a gate in front of every access.

An access is any use of a replica's component, whether it reads or writes. Inside a deferred update the updated
variable and its own slots are accessed directly; every other variable is read as it was when the gradient was sent.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.graph_ops import HOST, Gate, pass_gate
from tfps.tf_private import ResourceVariable, in_xla, ops, outer_graphs, values, values_util

_tracing = threading.local()  # .deferral: the deferred update that this thread traces, if any


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


@contextlib.contextmanager
def deferring(deferral: Deferral | None) -> Iterator[None]:
    """This thread traces `deferral` (or, with None, is back in the program)."""
    before = getattr(_tracing, "deferral", None)
    _tracing.deferral = deferral
    try:
        yield
    finally:
        _tracing.deferral = before


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
        if getattr(_tracing, "deferral", None) is not None:
            return
        extended = self._distribute_strategy.extended
        if tf.executing_eagerly():
            if self.gates:
                extended.check(self.gates[replica].wait())
            return
        graph = ops.get_default_graph()
        after = extended.note_access(self, graph)
        if not self.gates or graph in self._passed[replica]:
            return
        if in_xla(graph):
            raise UnsupportedError(
                f"variable {self.name!r} is used in a function compiled by XLA (jit_compile=True), where tfps cannot "
                "wait for it; use jit_compile=False"
            )
        self._passed[replica].add(graph)
        pass_gate(self.gates[replica], self._values[replica].handle, after)

    def _kept(self) -> tf.Tensor | None:
        """Inside a deferred update that does not own this variable: its value as of the send."""
        deferral: Deferral | None = getattr(_tracing, "deferral", None)
        if deferral is None or deferral.owns(self):
            return None
        return deferral.keep_variable(self)

    def _get_replica(self, replica_id: int) -> Any:
        self._access(replica_id)
        return super()._get_replica(replica_id)

    @property
    def handle(self) -> tf.Tensor:
        replica = values_util.get_current_replica_id_as_int()
        if replica is not None:
            self._access(replica)
        return super().handle

    @property
    def values(self) -> tuple[Any, ...]:
        for replica in range(len(self._values)):
            self._access(replica)
        return tuple(super().values)

    def __repr__(self) -> str:
        if tf.executing_eagerly():
            self._access(0)  # it shows the value
        return str(super().__repr__())

    def value(self) -> tf.Tensor:
        kept = self._kept()
        return super().value() if kept is None else kept

    def read_value(self) -> tf.Tensor:
        kept = self._kept()
        return super().read_value() if kept is None else kept

    def _dense_var_to_tensor(self, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> tf.Tensor:
        kept = self._kept()
        return super()._dense_var_to_tensor(dtype, name, as_ref) if kept is None else kept
