"""Buckets whose variables pservers update: workers push gradients and get parameters back, or what to add to theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.exchange.interface import BucketSpec
from tfps.graph import ops as graph_ops
from tfps.runtime.remote import RemoteRule, RemoteUpdate, bring, check_moves, pieces_of
from tfps.runtime.runtime import Runtime
from tfps.runtime.transfers import DeferredUpdate, Group
from tfps.types import Value
from tfps.updates.names import common_name, own_name
from tfps.updates.pending import PendingUpdate
from tfps.updates.planned_bucket import PlannedBucket, split
from tfps.updates.variables import GatedVariable


def plan(updates: Sequence[PendingUpdate], graph: tf.Graph, replica: int, order: dict[str, int]) -> PlannedBucket:
    """Returns the planned bucket of updates that travel together."""
    rule = updates[0].function
    if isinstance(rule, RemoteRule):
        return RemoteBucket(rule, updates, graph, replica, order)
    return PlannedBucket(updates, graph, replica, order)


class RemoteBucket(PlannedBucket):
    """A bucket of variables that pservers update by one rule; the argument of its updates is the step's scalars.

    With a codec it gets changes of the parameters. All ranks add the same, but what one of them had changed by itself
    would stay, so weights are compared; without a codec they are replaced.
    """

    remote = True

    def __init__(
        self, rule: RemoteRule, updates: Sequence[PendingUpdate], graph: tf.Graph, replica: int, order: dict[str, int]
    ) -> None:
        super().__init__(updates, graph, replica, order)
        self.rule = rule
        self.spec = dataclasses.replace(self.spec, update=rule.spec(self.variables))
        self.kept = self.variables  # what pservers keep
        self.key = (*self.key, rule.number, self.spec.update)

    def transfer(self, number: int, messages: int, group: Group, runtime: Runtime) -> DeferredUpdate:
        return RemoteUpdate(
            number,
            self.spec,
            messages,
            group,
            runtime.exchange,
            pieces_of(self.kept, self.rule),
            ahead=self._changes,
            apart=_apart(self.variables),
        )

    def trace(self, strategy: tf.distribute.Strategy, compared: bool) -> None:
        super().trace(strategy, compared=compared and self._changes)

    @property
    def _changes(self) -> bool:
        """Whether the reply is a change of the parameters, not the parameters."""
        return self.spec.codec is not None and bool(_policy(self.variables).gets_changes)

    def _update(
        self, strategy: tf.distribute.Strategy, data: tf.Tensor, indices: tf.Tensor, *weigh: tf.Tensor
    ) -> tf.Tensor:
        written: list[list[tf.Operation]] = []
        for variable, value in zip(self.kept, _values(data, self.kept), strict=True):
            component = variable._values[self.replica]
            with tf.device(component.device):
                write = component.assign_add if self._changes else component.assign
                written.append([write(value, read_value=False)])
        return self._end(self._follow(written), *weigh)

    def _follow(self, written: list[list[tf.Operation]]) -> list[list[tf.Operation]]:
        """Writes what depends on `kept` after the ops that have `written` each; returns all these ops."""
        return written

    def update_in_graph(self) -> None:
        raise UnsupportedError(f"the update of {self.spec.name} by pservers must not run in the graph")

    def _payload(self, gradients: list[Value]) -> tuple[tf.Tensor, tf.Tensor | None]:
        data, _ = super()._payload(gradients)
        return data, graph_ops.to_bytes(self.updates[0].arguments[0])

    def _labels(self) -> tuple[tuple[str, ...], tuple[bool | None, ...]]:
        return (), ()


def update_eagerly(
    runtime: Runtime,
    rule: RemoteRule,
    variables: Sequence[GatedVariable],
    gradients: Sequence[Value],
    scalars: tf.Tensor,
) -> None:
    """Pushes float32 `gradients`, dense and as they are, waits for the new parameters and assigns them."""
    update = rule.spec(variables)
    nbytes = sum(4 * int(variable.shape.num_elements()) for variable in variables)
    names, alike = tuple(map(own_name, variables)), tuple(map(common_name, variables))
    spec = BucketSpec(names, "sum", nbytes, "float32", 0, alike=alike, update=update)
    key = ("update", "eager", rule.number, update, *(variable._unique_id for variable in variables))
    (bucket,) = runtime.buckets([(key, spec)])
    for variable in variables:
        variable.wait()
    pieces = pieces_of(variables, rule)
    if _apart(variables):
        check_moves(bucket, pieces)
    packed = bring(runtime.exchange, bucket, pieces, scalars.numpy().tolist())
    payload = np.concatenate([np.asarray(each.numpy(), np.float32).reshape(-1) for each in gradients])
    reply = runtime.exchange_now(bucket, payload, step_scalars=packed)
    new = graph_ops.tensor_of(reply.sum)
    for variable, value in zip(variables, _values(new, variables), strict=True):
        variable._values[0].assign(value)


def _apart(variables: Sequence[GatedVariable]) -> bool:
    """Whether pservers apply each push by itself."""
    return bool(_policy(variables).hands_out)


def _policy(variables: Sequence[GatedVariable]) -> Value:
    return variables[0].distribute_strategy.extended.policy


def _values(data: tf.Tensor, variables: Sequence[GatedVariable]) -> list[tf.Tensor]:
    """Returns the values of `variables` in a bucket's bytes."""
    pieces = split(data, tf.float32, variables)
    return [tf.reshape(piece, variable.shape) for piece, variable in zip(pieces, variables, strict=True)]
