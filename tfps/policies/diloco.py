"""Modes "diloco" and "local": workers train alone, and meet between steps to bring global parameters on.

Ranks may have different numbers of batches. Where they meet, at the end of an epoch or in `Strategy.synchronize`, one
that has made fewer steps takes part in the exchanges that others wait for, and goes on from where the last of them is.

Tested in tests/policies/test_outer.py, tests/policies/test_outer_refusals.py, tests/integration/test_local.py and
tests/integration/test_local_programs.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfps.collectives import AllGather
from tfps.config import Config
from tfps.errors import MismatchError, UnsupportedError, WaitTimeoutError, WorkerLostError
from tfps.keras_hooks.checkpoint import ExtraState
from tfps.keras_hooks.keras_private import trained_variables
from tfps.keras_hooks.variables import check_variable, of_tensorflow, slots_from_first_rank
from tfps.policies.outer_optimizer import OuterOptimizer, OuterRule, copy_of, make_copy
from tfps.policies.policy import DEFAULT, Independent
from tfps.runtime.report import Stepping
from tfps.runtime.runtime import Runtime
from tfps.types import Array, Model, Optimizer, Structure, Variable
from tfps.updates.initial_values import InitialValues
from tfps.updates.names import own_name
from tfps.updates.reductions import Reductions
from tfps.updates.scheduler import UpdateScheduler
from tfps.updates.variables import GatedVariable

logger = logging.getLogger("tfps")
_INSTEAD = "use mode='sync' (tfps.Config, the default)"
# They compute weights anew from slots. Not all versions of Keras have all of them.
_WEIGHTS_IN_SLOTS = ("Ftrl", "ScheduleFreeAdamW")


class _Applying(threading.local):
    """How many calls of `apply` this thread is in: an optimizer may wrap another."""

    depth = 0


_applying = _Applying()


class DiLoCo(Independent):
    """Workers train alone for some steps; then an outer optimizer updates global parameters by what has changed."""

    setting = "mode='diloco'"
    exchanges_gradients = False
    keeps_global = True

    def __init__(self, runtime: Runtime, config: Config) -> None:
        super().__init__(runtime, config)
        self._numbers = itertools.count()
        self._known: weakref.WeakSet[OuterOptimizer] = weakref.WeakSet()
        self._of_optimizers: weakref.WeakKeyDictionary[Optimizer, OuterOptimizer] = weakref.WeakKeyDictionary()
        # By unique id, those that have a global copy.
        self._variables: weakref.WeakValueDictionary[str, GatedVariable] = weakref.WeakValueDictionary()
        self._own: dict[str, list[tf.Tensor]] | None = None  # values by unique id while global ones take their place
        self._said = AllGather(runtime, "steps of each worker")
        if runtime.exchange.view.workers > 1:
            self._said.later()  # with the first exchange: nothing new is declared within an epoch

    def attach(
        self, strategy: tf.distribute.Strategy, scheduler: UpdateScheduler, initial_values: InitialValues
    ) -> None:
        super().attach(strategy, scheduler, initial_values)
        self._initial_values = initial_values

    def reductions(self) -> Reductions:
        return Reductions(self._runtime, estimates=True)

    def staging_depth(self, requested: int) -> int:
        return requested

    @property
    def remote_parameters(self) -> bool:
        return True

    def stepping(self) -> Stepping:
        config = self._config
        return Stepping(
            config.inner_steps, config.fragments, config.overlap_steps, waits=not self.together, every_step=False
        )

    def rule(self, copies: Sequence[GatedVariable]) -> OuterRule:
        """Returns how pservers update the global parameters `copies`: SGD with Nesterov momentum."""
        return OuterRule(self._runtime.exchange, copies, self._config.outer_learning_rate, self._config.outer_momentum)

    def group_gates(self, variables: Sequence[GatedVariable]) -> None:
        """The outer optimizer groups those of each fragment."""

    def prepare(self, optimizer: Optimizer, variables: Sequence[Variable], *, alone: bool) -> None:
        self._check_alone(alone, self.setting, DEFAULT)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            self._of_optimizers[optimizer] = self._of_optimizers[optimizer.inner_optimizer]  # built before
            return
        _check_optimizer(optimizer, self.setting)
        for variable in variables:
            constrained = getattr(variable, "constraint", None) is not None
            why = "has a constraint, which the mean of workers' parameters need not fulfil" if constrained else ""
            check_variable(variable, self.setting, "average", _INSTEAD, why)
        known, updated = self._of_optimizers.get(optimizer), list(map(of_tensorflow, variables))
        if known is None or list(map(id, known.variables)) != list(map(id, updated)):
            self._of_optimizers[optimizer] = self._build(updated, type(optimizer).__name__)

    def _build(self, variables: Sequence[GatedVariable], optimizer: str) -> OuterOptimizer:
        """Returns the outer optimizer of an optimizer of `variables`, with this name; their global copies are made."""
        overlaps = self._config.overlap_steps > 0
        apart = {each._unique_id for each in variables if each.global_copy is not None and not _alike(each)}
        copies = [make_copy(variable, own_gates=overlaps) for variable in variables]
        for variable, copy in zip(variables, copies, strict=True):
            self._variables[variable._unique_id] = variable
            self._runtime.gate_watch.add(copy.gates)
        self._initial_values.forget(copies)
        steps = OuterOptimizer(
            self._strategy,
            self._runtime,
            self._scheduler,
            self._config,
            self.setting,
            self.rule(copies),
            variables,
            optimizer,
            lambda: next(self._numbers),
        )
        steps.apart = apart
        self._known.add(steps)
        return steps

    @contextlib.contextmanager
    def step(self, optimizer: Optimizer, gradients: Structure, variables: Sequence[Variable] | None) -> Iterator[None]:
        """Counts a step, if no other optimizer calls this one."""
        outermost = not _applying.depth
        if outermost:
            self._check_place()
            if (known := self._of_optimizers.get(optimizer)) is not None:  # before anything is updated
                known.check_trained(_with_gradients(optimizer, gradients, variables))
        _applying.depth += 1
        try:
            yield
        finally:
            _applying.depth -= 1
        if outermost and (known := self._of_optimizers.get(optimizer)) is not None and len(gradients):
            known.check_trained(_with_gradients(optimizer, gradients, variables))  # maybe built only now
            known.after_step()

    def _check_place(self) -> None:
        context = tf.distribute.get_replica_context()
        if context is None or context.strategy is not self._strategy:
            raise UnsupportedError(
                f"with {self.setting} an optimizer's gradients must be applied in a replica function, where its steps "
                f"are counted: call its `apply` within strategy.run, or {_INSTEAD}"
            )

    # Where ranks meet.

    def end_epoch(self, model: Model) -> None:
        if self._own is None:  # else this evaluates, and has met
            self.barrier()

    def begin_evaluation(self) -> None:
        self.barrier()

    def end_training(self) -> None:
        self.synchronize()
        if self._strategy is not None:  # ending the round has sent more: one rank may save from here on
            self._strategy.extended.compressing.collect()

    def barrier(self) -> list[OuterOptimizer]:
        """Brings all ranks to the same step of each optimizer; every rank must call it.

        Returns the outer steps that all ranks still have: when an optimizer is collected depends on the rank.
        """
        known = self._exchanged()
        self._check_counted(known)
        if self._runtime.exchange.view.workers == 1:
            return known
        with tf.init_scope(), _explained():
            bucket = self._said.declare()
            own = {str(each.number): each.steps for each in known}
            said = list(map(json.loads, self._said(json.dumps(own).encode(), lambda _: self._make_up(known, bucket))))
            self._barriers += 1
            common = [each for each in known if all(str(each.number) in steps for steps in said)]
            for each in common:
                number = str(each.number)
                each.catch_up(max(steps[number] for steps in said), trained=own[number] > each.last_barrier)
        return common

    def _check_counted(self, known: Sequence[OuterOptimizer]) -> None:
        counted = {variable._unique_id for each in known for variable in each.variables}
        for each in [each for each in self._known if each.number is None]:
            for variable in each.variables:
                if variable._unique_id in counted | each.apart or _alike(variable):
                    continue
                error = UnsupportedError(
                    f"{self.setting}: variable {own_name(variable)!r} has been trained, but no call of "
                    f"Keras' `apply` of its optimizer, {each.optimizer}, was counted, so nothing is exchanged; if that "
                    "class overrides `apply`, let it call super().apply, or override `update_step` instead; or use "
                    "mode='sync' (tfps.Config, the default)"
                )
                self._runtime.exchange.fail(error)
                raise error

    def synchronize(self) -> None:
        for each in self.barrier():
            each.end_round()

    def _exchanged(self) -> list[OuterOptimizer]:
        """Those that may have exchanged anything, in an order that all ranks share."""
        return sorted((each for each in self._known if each.number is not None), key=lambda each: each.number or 0)

    def _make_up(self, known: Sequence[OuterOptimizer], bucket: int) -> bool:
        """Takes part in exchanges that other ranks wait for; the wait for `bucket` then begins anew."""
        made = [each.make_up() for each in known]
        if any(made):
            self._runtime.exchange.peers.extend_deadline(bucket)
        return any(made)

    # Global parameters in place of own ones.

    @contextlib.contextmanager
    def global_parameters(self) -> Iterator[None]:
        """In the block variables have their global values."""
        if self._own is not None:
            yield
            return
        with tf.init_scope():
            variables = list(self._variables.values())
            for variable in variables:
                variable.wait()
                copy_of(variable).wait()
            own = {each._unique_id: [component.read_value() for component in each._values] for each in variables}
        try:
            self._own = own
            for variable in variables:
                _assign(variable, [component.read_value() for component in copy_of(variable)._values])
            yield
        finally:
            try:
                self._take_back(own)
            except KeyboardInterrupt:  # else some would train on from global parameters, on this rank only
                self._take_back(own)
                raise

    def _take_back(self, own: dict[str, list[tf.Tensor]]) -> None:
        """Gives variables their own values again, but for those that the program has assigned meanwhile."""
        for variable in list(self._variables.values()):
            if variable._unique_id in own:
                _assign(variable, own[variable._unique_id])
        self._own = None

    # Saving.

    def check_save_freq(self, what: str, frequency: object) -> None:
        if frequency != "epoch":
            raise UnsupportedError(
                f"{what}(save_freq={frequency!r}) with {self.setting}: within an epoch workers are at different steps; "
                f"use save_freq='epoch', or {_INSTEAD}"
            )

    def checkpoint_state(self, optimizer: Optimizer) -> ExtraState | None:
        known = self._of_optimizers.get(optimizer)
        return None if known is None or self._strategy is None else _OuterState(known, self._strategy)

    def note_assigned(self, variable: GatedVariable) -> None:
        """Notes that the program has assigned `variable`: it keeps that value after `global_parameters`."""
        if self._own is not None:
            self._own.pop(variable._unique_id, None)


class LocalSGD(DiLoCo):
    """Workers train alone for some steps, and then take the mean of their parameters."""

    setting = "mode='local'"

    def rule(self, copies: Sequence[GatedVariable]) -> OuterRule:
        return OuterRule(self._runtime.exchange, copies, learning_rate=1.0, momentum=0.0)


def _check_optimizer(optimizer: Optimizer, setting: str) -> None:
    name = type(optimizer).__name__
    if optimizer.use_ema:
        raise UnsupportedError(
            f"use_ema with {setting} would average each worker's own parameters, not the global ones that are "
            f"evaluated and saved; leave it out, or {_INSTEAD}"
        )
    if _is_a(optimizer, *_WEIGHTS_IN_SLOTS):
        raise UnsupportedError(
            f"{name} with {setting}: it computes weights anew from its slots, which workers do not exchange, and so "
            f"would undo each exchange; take another optimizer, such as Adam, or {_INSTEAD}"
        )
    if _is_a(optimizer, "MultiOptimizer"):
        raise UnsupportedError(
            f"{name} with {setting}: backups and checkpoints would lack the outer state of the optimizers within; "
            f"compile the model with one optimizer, or {_INSTEAD}"
        )


def _is_a(optimizer: Optimizer, *names: str) -> bool:
    """Whether `optimizer` is of one of Keras' classes with these names, as far as this Keras has them."""
    kinds = (getattr(keras.optimizers, name, None) for name in names)
    return any(kind is not None and isinstance(optimizer, kind) for kind in kinds)


def _with_gradients(optimizer: Optimizer, gradients: Structure, variables: Sequence[Variable] | None) -> list[Variable]:
    """The variables of TensorFlow that a call of `apply` updates."""
    given = trained_variables(optimizer) if variables is None else variables
    return [of_tensorflow(each) for each, gradient in zip(given, gradients, strict=False) if gradient is not None]


def _alike(variable: GatedVariable) -> bool:
    """Whether the worker's own value of `variable` is the global one."""
    with tf.init_scope():
        both = [variable, copy_of(variable)]
        for each in both:
            each.wait()
        own, shared = (each._values[0].numpy() for each in both)
    return bool(own.tobytes() == shared.tobytes())


def _assign(variable: GatedVariable, values: Sequence[tf.Tensor]) -> None:
    with tf.init_scope():
        for component, value in zip(variable._values, values, strict=True):
            component.assign(value)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Says in the block's errors where ranks have to meet."""
    try:
        yield
    except (WaitTimeoutError, WorkerLostError, MismatchError) as error:
        raise type(error)(
            "workers meet at the end of each epoch of fit, at its end, and in strategy.synchronize(), which every rank "
            f"must call. {error}"
        ) from error


class _OuterState(ExtraState):
    """The outer optimizer's momentum, and the position in the round; global parameters are saved for the own ones.

    A rank may save a checkpoint with it alone; all must restore it.
    """

    name, file, title = "tfps_outer", "tfps_outer_steps.npz", "the state of the outer optimizer"
    _STEPS = "steps"

    def __init__(self, outer: OuterOptimizer, strategy: tf.distribute.Strategy) -> None:
        self._outer, self._strategy = weakref.ref(outer), weakref.ref(strategy)

    def collect(self) -> None:
        """Rank 0 can read all of it."""

    def arrays(self) -> dict[str, Array]:
        if (outer := self._outer()) is None:
            return {}
        slots = {name: slot.read() for name, slot in outer.slots().items()}
        return {self._STEPS: np.array(outer.steps, np.int64), **slots}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        outer = self._outer()
        if outer is None or self._STEPS not in arrays:
            return
        made = int(arrays[self._STEPS])
        outer.set_steps(made, made)
        for name, slot in outer.slots().items():
            if name in arrays and arrays[name].shape == slot.shape:
                slot.assign(arrays[name])
            else:
                logger.warning(
                    "tfps: the outer momentum of %s is not in the checkpoint, or has another shape", slot.name
                )
        _note_trained(outer)

    def share(self, restored: bool) -> None:
        outer, strategy = self._outer(), self._strategy()
        if outer is None or strategy is None:
            return
        with strategy.scope():
            made = tf.Variable(outer.steps if restored else -1, dtype=tf.int64, trainable=False, name="steps")
        strategy.extended.take_from_first_rank([made])
        if (count := int(made.numpy())) >= 0:
            outer.set_steps(count, count)
            slots_from_first_rank(list(outer.slots().values()), strategy)
            _note_trained(outer)


def _note_trained(outer: OuterOptimizer) -> None:
    """Notes which variables have been trained before, by the momentum that was restored."""
    outer.note_trained([int(place) for place, slot in outer.slots().items() if slot.offered().any()])
