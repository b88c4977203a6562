"""Global parameters of variables that workers train alone, and buckets that exchange them.

A worker pushes its pseudo-gradient, (global - own) / workers; pservers keep the global parameters and the momentum of
the outer optimizer (DiLoCo, https://arxiv.org/abs/2311.08105), and reply with the new global parameters.

Tested in tests/strategy/test_outer.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfps.config import Config
from tfps.exchange.interface import Exchange
from tfps.exchange.update_spec import UpdateSpec
from tfps.runtime.served import RULES, ServedParameter, ServedRule, ServedSlot
from tfps.strategy.deferred import Noted
from tfps.strategy.names import common_name, own_name
from tfps.strategy.served_bucket import ServedBucket
from tfps.strategy.variables import GatedVariable, current_replica


class OuterRule(ServedRule):
    """How pservers update the global parameters: SGD with Nesterov momentum; in mode "local" they take the mean."""

    def __init__(self, config: Config, exchange: Exchange, copies: Sequence[GatedVariable]) -> None:
        self.number = next(RULES)
        averages = config.mode == "local"
        self.learning_rate = 1.0 if averages else config.outer_learning_rate
        self._momentum = 0.0 if averages else config.outer_momentum
        self._slots: dict[str, list[ServedSlot]] = {}
        for copy in copies:
            slot = ServedSlot(own_name(copy), exchange, copy.wait, copy.shape.as_list(), 0.0)
            self._slots[copy._unique_id] = [slot] if self._momentum else []

    def spec(self, variables: Sequence[GatedVariable]) -> UpdateSpec:
        return UpdateSpec(
            "sgd",
            (("momentum", self._momentum), ("nesterov", 1.0)),
            (("momentum", 0.0),) if self._momentum else (),
            tuple(int(variable.shape.num_elements()) for variable in variables),
            (False,) * len(variables),
        )

    def slots(self, variable: GatedVariable) -> Sequence[ServedSlot]:
        return self._slots[variable._unique_id]


class OuterBucket(ServedBucket):
    """A bucket of global parameters. `noted` has the variables whose gates are closed until it has come back: the
    trained ones, which then begin from the new global parameters, or only their global copies.
    """

    def __init__(
        self,
        rule: OuterRule,
        trained: Sequence[GatedVariable],
        noted: Sequence[Noted],
        graph: tf.Graph,
        replica: int,
        order: dict[str, int],
    ) -> None:
        super().__init__(rule, noted, graph, replica, order)
        self.trained = list(trained)
        self.kept = list(map(copy_of, trained))
        names, alike = tuple(map(own_name, trained)), tuple(map(common_name, trained))
        self.spec = dataclasses.replace(self.spec, names=names, alike=alike)

    def _follow(self, written: list[list[tf.Operation]]) -> list[list[tf.Operation]]:
        if self.variables[0] is self.kept[0]:
            return written
        for variable, copy, operations in zip(self.trained, self.kept, written, strict=True):
            component, new = variable._values[self.replica], copy._values[self.replica]
            with tf.device(component.device), tf.control_dependencies(operations):
                operations.append(component.assign(new.read_value(), read_value=False))
        return written


def copy_of(variable: GatedVariable) -> GatedVariable:
    """Returns the global copy of `variable`, which an optimizer updates that has been built."""
    if variable.global_copy is None:
        raise RuntimeError(f"{variable.name} has no global copy")
    return variable.global_copy


def make_copy(variable: GatedVariable, own_gates: bool) -> GatedVariable:
    """Returns the global copy of `variable`, made if it has none.

    Args:
        own_gates: whether reads of the copy wait for exchanges by themselves, and those of `variable` do not.
    """
    if variable.global_copy is not None:
        return variable.global_copy
    strategy = variable.distribute_strategy
    with tf.init_scope(), contextlib.ExitStack() as scopes:
        if current_replica(strategy) is None:
            scopes.enter_context(strategy.scope())
        if not own_gates:
            scopes.enter_context(strategy.extended.colocate_vars_with(variable))
        zeros, name = tf.zeros(variable.shape, variable.dtype), f"{own_name(variable)}/global"
        copy = tf.Variable(zeros, trainable=False, dtype=variable.dtype, name=name)
        if own_gates:
            copy.make_gates()
        copy.served, variable.global_copy = ServedParameter(), copy
        variable.note_assigned()
    return copy
