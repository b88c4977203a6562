"""Metric variables: each replica writes its own component, and a read combines them.

Tested in tests/updates/test_combined.py.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.graph.shares import current_share
from tfps.graph.tf_private import distribute_lib, values, values_util
from tfps.keras_hooks.keras_private import in_symbolic_scope
from tfps.types import Function, Value
from tfps.updates.variables import Converted, adds_up


class OnReadVariable(Converted, values.SyncOnReadVariable):
    """A metric's variable. A read outside `strategy.run` combines all replicas' components; in a graph at every run."""

    _combined: tf.Tensor | None = None  # None until the first combination, `assign` or `current`

    def _update_replica(self, update_fn: Function, value: Value, **kwargs: object) -> Value:
        if self._aggregation != tf.VariableAggregation.NONE:
            self._distribute_strategy.extended.note_local_write(self)
        return super()._update_replica(update_fn, value, **kwargs)

    def take_combined(self, value: Value) -> None:
        """Keeps `value` for reads; the components stay as they are."""
        self._combined = tf.constant(value, self.dtype)

    def _get_cross_replica(self) -> Value:
        extended = self._distribute_strategy.extended
        if in_symbolic_scope():
            return self._primary  # nothing to combine, and ranks whose model is built do not come here
        if (
            not tf.executing_eagerly()
            or extended.combiner.single
            or self._aggregation == tf.VariableAggregation.NONE
            or values_util.is_saving_non_distributed()
        ):
            return super()._get_cross_replica()
        extended.combiner.refresh(self)
        return tf.identity(self.current())

    def current(self) -> tf.Tensor:
        """Returns the value, provided that all writes of replicas have been combined."""
        if self._combined is None:  # not written yet: equal on all ranks
            components = [component.read_value() for component in self._values]
            if self._aggregation == tf.VariableAggregation.SUM:
                self._combined = tf.add_n(components) * tf.cast(self._distribute_strategy.num_workers, self.dtype)
            else:
                self._combined = components[0]
        return self._combined

    def assign(
        self, value: Value, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Value:
        summed = self._aggregation == tf.VariableAggregation.SUM
        if not self._outside():
            share, component = current_share(), self._get_on_device_or_primary()
            if summed and share is not None and not tf.executing_eagerly():  # eagerly nobody can tell
                tensor = tf.convert_to_tensor(value, self.dtype)
                if not adds_up(component, tensor, share.graph):
                    raise UnsupportedError(
                        f"variable {self.name!r} is a sum over replicas, as a metric's is by default, but a step "
                        "assigns what does not add up (a maximum, a moving average, the last batch's value); create "
                        "it by add_variable(..., aggregation='mean') if the mean over replicas is meant "
                        "('only_first_replica': the value of rank 0), or keep sums and compute the rest of them in "
                        "result()"
                    )
            value = self._counted(value, component.read_value)
            return super().assign(value, use_locking, name, read_value)
        if not tf.executing_eagerly():
            self._distribute_strategy.extended.note_local_write(self)
            if summed and self.dtype.is_integer:
                return self._assign_parts(tf.convert_to_tensor(value, self.dtype), read_value)
            return super().assign(value, use_locking, name, read_value)
        value = tf.convert_to_tensor(value, self.dtype)
        nothing = tf.zeros_like(value)
        for replica, component in enumerate(self._values):
            # The first replica of the job holds a sum: equal parts of an integer would not add up to it.
            mine = not summed or replica == self._distribute_strategy.rank == 0
            with tf.device(component.device):
                component.assign(value if mine else nothing)
        self._combined = tf.identity(value)
        return self._combined if read_value else None

    def _assign_parts(self, value: tf.Tensor, read_value: bool) -> Value:
        """Assigns to each replica its part of an integer sum. TensorFlow's parts are equal: they lose the remainder."""
        extended, written = self._distribute_strategy.extended, []
        replicas = extended._num_replicas_in_sync
        values_util.mark_as_unsaveable()
        for replica, component in enumerate(self._values):
            one_more = value % replicas >= replicas - extended._get_replica_id_in_sync_group(replica)
            with tf.device(component.device):
                written.append(component.assign(value // replicas + tf.cast(one_more, self.dtype)))
        with tf.control_dependencies(written):
            return self.read_value() if read_value else tf.no_op()

    def _change(self, method: str, changed: Function, value: Value, *args: object, **kwargs: object) -> Value:
        outside = self._outside() and self._aggregation != tf.VariableAggregation.SUM  # TensorFlow refuses sums
        if outside and tf.executing_eagerly():
            return self.assign(changed(self.read_value(), tf.convert_to_tensor(value, self.dtype)))
        if outside:
            self._distribute_strategy.extended.note_local_write(self)
        return getattr(super(), method)(self._counted(value, None), *args, **kwargs)

    assign_add = functools.partialmethod(_change, "assign_add", operator.add)
    assign_sub = functools.partialmethod(_change, "assign_sub", operator.sub)

    def _counted(self, value: Value, before: Callable[[], tf.Tensor] | None) -> Value:
        """Returns what a replica writes; one without rows keeps `before()`, or adds 0 if that is None."""
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

    def _gather_saveables_for_checkpoint(self) -> dict[str, Function]:
        def saveable(name: str = self._common_name) -> _OnReadSaveable:
            return _OnReadSaveable(self, name)

        return dict.fromkeys(super()._gather_saveables_for_checkpoint(), saveable)


class _OnReadSaveable(values._SyncOnReadSaveable):
    """Restores with `assign`, which also updates the combined value."""

    def restore(self, restored_tensors: Sequence[tf.Tensor], restored_shapes: object) -> tf.Operation:
        (tensor,) = restored_tensors
        return self._sync_on_read_variable.assign(tensor)
