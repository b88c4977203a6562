"""Modes "diloco" and "local": workers train alone, and meet between steps to bring global parameters on.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfps.collectives import AllGather
from tfps.config import Config
from tfps.errors import MismatchError, UnsupportedError, WaitTimeoutError, WorkerLostError
from tfps.exchange.interface import BucketSpec
from tfps.graph.patches import replaced
from tfps.keras_hooks.checkpoint import ExtraState
from tfps.keras_hooks.keras_private import trained_variables
from tfps.keras_hooks.variables import check_variable, of_tensorflow, slots_from_first_rank
from tfps.policies.global_values import GlobalValues
from tfps.policies.outer_optimizer import OuterOptimizer, copy_of, make_copy
from tfps.policies.policy import Independent, check_alone
from tfps.runtime.report import Stepping
from tfps.runtime.runtime import Runtime
from tfps.types import Array, Model, Optimizer, Structure, Variable
from tfps.updates.names import own_name
from tfps.updates.variables import GatedVariable

logger = logging.getLogger("tfps")
_INSTEAD = "use mode='sync' (tfps.Config, the default)"
_WEIGHTS_IN_SLOTS = {"Ftrl", "ScheduleFreeAdamW"}  # they compute weights anew from slots
_applying = threading.local()  # `inside`: whether this thread is in a call of `apply`; an optimizer may wrap another


class DiLoCo(Independent):
    """Workers train alone for some steps; then an outer optimizer updates global parameters by what has changed."""

    setting = "mode='diloco'"
    exchanges_gradients = False

    def __init__(self, runtime: Runtime, config: Config) -> None:
        super().__init__(runtime, config)
        self.remote_parameters = True
        self._numbers = itertools.count()
        self.exchanged: dict[int, tuple[weakref.ref[OuterOptimizer], int]] = {}  # by bucket, with the fragment
        self._known: weakref.WeakSet[OuterOptimizer] = weakref.WeakSet()
        self._of_optimizers: weakref.WeakKeyDictionary[Optimizer, OuterOptimizer] = weakref.WeakKeyDictionary()
        self._global_values = GlobalValues()
        # Within `fit` residuals travel only if a rank saves: rounds are as long as epochs may be, so that collecting
        # them after each epoch would send more than compression saves. See `begin_steps`.
        self._fits = self._one_may_save = False
        self._said, self._met = AllGather(runtime, "steps of each worker"), AllGather(runtime, "end of saving alone")
        if runtime.exchange.view.workers > 1:
            for gather in self._said, self._met:
                gather.later()  # with the first exchange: nothing new is declared within an epoch
            policy = weakref.ref(self)  # the runtime may outlive its strategies

            def before(_: BucketSpec) -> None:
                if (found := policy()) is not None:
                    found.begin_steps()

            runtime.declared.before = before

            def awaited(bucket: int, step: int) -> None:
                if (found := policy()) is not None and bucket in found.exchanged:
                    outer, fragment = found.exchanged[bucket]
                    if (known := outer()) is not None:
                        known.note_awaited(fragment, step)

            runtime.exchange.peers.on_awaited = awaited

    def stepping(self) -> Stepping:
        config = self._config
        return Stepping(
            config.inner_steps, config.fragments, config.overlap_steps, waits=not self.together, every_step=False
        )

    def outer_settings(self) -> tuple[float, float]:
        """Returns the learning rate and the momentum of the outer optimizer."""
        return self._config.outer_learning_rate, self._config.outer_momentum

    def group_gates(self, variables: Sequence[GatedVariable]) -> None:
        """The outer optimizer groups those of each fragment."""

    def prepare(self, optimizer: Optimizer, variables: Sequence[Variable], *, alone: bool) -> None:
        check_alone(alone, self.setting, _INSTEAD)
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
        apart = {each._unique_id for each in variables if each.global_copy is not None and not _alike(each)}
        copies = [make_copy(variable, own_gates=self._config.overlap_steps > 0) for variable in variables]
        for variable, copy in zip(variables, copies, strict=True):
            self._global_values.add(variable)
            self._runtime.gate_watch.add(copy.gates)
        self._strategy.extended.initial_values.forget(copies)
        outer = OuterOptimizer(self._strategy, variables, apart, optimizer, self._numbers)
        self._known.add(outer)
        return outer

    @contextlib.contextmanager
    def step(self, optimizer: Optimizer, gradients: Structure, variables: Sequence[Variable] | None) -> Iterator[None]:
        """Counts a step, if no other optimizer calls this one."""
        if getattr(_applying, "inside", False):
            yield
            return
        context = tf.distribute.get_replica_context()
        if context is None or context.strategy is not self._strategy:
            raise UnsupportedError(
                f"with {self.setting} an optimizer's gradients must be applied in a replica function, where its steps "
                f"are counted: call its `apply` within strategy.run, or {_INSTEAD}"
            )
        if (known := self._of_optimizers.get(optimizer)) is not None:  # before anything is updated
            known.check_trained(_with_gradients(optimizer, gradients, variables))
        _applying.inside = True
        try:
            yield
        finally:
            _applying.inside = False
        if (known := self._of_optimizers.get(optimizer)) is not None and len(gradients):
            known.check_trained(_with_gradients(optimizer, gradients, variables))  # maybe built only now
            known.after_step()

    # Where ranks meet.

    @contextlib.contextmanager
    def fitting(self) -> Iterator[None]:
        with replaced(self, "_fits", True):
            try:
                yield
            finally:
                self._one_may_save = False  # after an error; else ranks have met since

    def let_one_save(self) -> None:
        compressing = self._strategy.extended.compressing
        if not self._fits:
            compressing.collect()
        elif not self.together:
            self._one_may_save = compressing.has_residuals

    def begin_steps(self) -> None:
        """Ends the time in which one rank may save alone, before anything else that ranks do together.

        A rank that saves waits for the residuals of the others, which wait for it here and give them.
        """
        if not self._one_may_save:
            return
        self._one_may_save = False
        compressing, peers = self._strategy.extended.compressing, self._runtime.exchange.peers
        bucket = self._met.declare()

        def give(_: float) -> bool:
            given = compressing.take_part()
            if given:
                peers.extend_deadline(bucket)
            return given

        self._met(b"", give)

    def end_epoch(self, model: Model) -> None:
        if not self._global_values.used:  # else this evaluates, and has met
            self.barrier()

    def begin_evaluation(self) -> None:
        self.barrier()

    def end_training(self) -> None:
        self.synchronize()
        self._strategy.extended.compressing.collect()  # that has sent more: one rank may save from here on

    def barrier(self) -> list[OuterOptimizer]:
        """Brings all ranks to the same step of each optimizer; every rank must call it.

        Returns the outer optimizers that all ranks still have: when one is collected depends on the rank.
        """
        with self._meeting():
            return self._barrier()

    @contextlib.contextmanager
    def _meeting(self) -> Iterator[None]:
        with contextlib.ExitStack() as meetings:
            for each in self._exchanged():
                meetings.enter_context(each.meeting())
            yield

    def _barrier(self) -> list[OuterOptimizer]:
        self.begin_steps()
        known = self._exchanged()
        try:
            _check_counted(known, self._known, self.setting)
        except UnsupportedError as error:
            self._runtime.exchange.fail(error)
            raise
        if self._runtime.exchange.view.workers == 1:
            return known

        def make_up(_: float) -> bool:  # of exchanges that other ranks wait for; the wait then begins anew
            made = [each.make_up() for each in known]
            if any(made):
                self._runtime.exchange.peers.extend_deadline(bucket)
            return any(made)

        try:
            with tf.init_scope():
                bucket = self._said.declare()
                own = {str(each.job_number): each.position() for each in known}
                said = list(map(json.loads, self._said(json.dumps(own).encode(), make_up).values()))
                self._barriers += 1
                common = [each for each in known if all(str(each.job_number) in positions for positions in said)]
                for each in common:
                    number = str(each.job_number)
                    trained = own[number][0] > each.last_barrier
                    each.catch_up([positions[number] for positions in said], trained=trained)
        except (WaitTimeoutError, WorkerLostError, MismatchError) as error:
            raise type(error)(
                "workers meet at the end of each epoch of fit, at its end, and in strategy.synchronize(), which every "
                f"rank must call. {error}"
            ) from error
        return common

    def synchronize(self) -> None:
        with self._meeting():
            for each in self._barrier():
                each.end_round()

    def _exchanged(self) -> list[OuterOptimizer]:
        """Those that may have exchanged anything, in an order that all ranks share."""
        known = [each for each in self._known if each.job_number is not None]
        return sorted(known, key=lambda each: each.job_number or 0)

    def global_parameters(self) -> contextlib.AbstractContextManager[None]:
        return self._global_values.in_use()

    # Saving.

    def check_save_freq(self, what: str, frequency: object) -> None:
        if frequency != "epoch":
            raise UnsupportedError(
                f"{what}(save_freq={frequency!r}) with {self.setting}: within an epoch workers are at different steps; "
                f"use save_freq='epoch', or {_INSTEAD}"
            )

    def checkpoint_state(self, optimizer: Optimizer) -> ExtraState | None:
        known = self._of_optimizers.get(optimizer)
        return None if known is None else _OuterState(known, self._strategy)

    def note_assigned(self, variable: GatedVariable) -> None:
        self._global_values.keep(variable)


class LocalSGD(DiLoCo):
    """Workers train alone for some steps, and then take the mean of their parameters."""

    setting = "mode='local'"

    def outer_settings(self) -> tuple[float, float]:
        return 1.0, 0.0


def _check_counted(exchanged: Sequence[OuterOptimizer], known: Iterable[OuterOptimizer], setting: str) -> None:
    """Checks that of `known` outer optimizers those which have not exchanged anything have trained nothing."""
    counted = {variable._unique_id for each in exchanged for variable in each.variables}
    for each in [each for each in known if each.job_number is None]:
        for variable in each.variables:
            if variable._unique_id not in counted | each.apart and not _alike(variable):
                raise UnsupportedError(
                    f"{setting}: variable {own_name(variable)!r} has been trained, but no call of Keras' `apply` of "
                    f"its optimizer, {each.optimizer}, was counted, so nothing is exchanged; if that class overrides "
                    "`apply`, let it call super().apply, or override `update_step` instead; or use mode='sync' "
                    "(tfps.Config, the default)"
                )


def _check_optimizer(optimizer: Optimizer, setting: str) -> None:
    if optimizer.use_ema:
        raise UnsupportedError(
            f"use_ema with {setting} would average each worker's own parameters, not the global ones that are "
            f"evaluated and saved; leave it out, or {_INSTEAD}"
        )
    name, kinds = type(optimizer).__name__, type(optimizer).__mro__
    known = {kind.__name__ for kind in kinds if kind.__module__.startswith("keras.")}
    if known & _WEIGHTS_IN_SLOTS:
        raise UnsupportedError(
            f"{name} with {setting}: it computes weights anew from its slots, which workers do not exchange, and so "
            f"would undo each exchange; take another optimizer, such as Adam, or {_INSTEAD}"
        )
    if "MultiOptimizer" in known:
        raise UnsupportedError(
            f"{name} with {setting}: backups and checkpoints would lack the outer state of the optimizers within; "
            f"compile the model with one optimizer, or {_INSTEAD}"
        )


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


class _OuterState(ExtraState):
    """The outer optimizer's momentum, and the position in the round; global parameters are saved for the own ones.

    A rank may save a checkpoint with it alone; all must restore it.
    """

    name, file, title = "tfps_outer", "tfps_outer_steps.npz", "the state of the outer optimizer"

    def __init__(self, outer: OuterOptimizer, strategy: tf.distribute.Strategy) -> None:
        self._outer, self._strategy = weakref.ref(outer), weakref.ref(strategy)

    def collect(self) -> None:
        """Rank 0 can read all of it."""

    def arrays(self) -> dict[str, Array]:
        if (outer := self._outer()) is None:
            return {}
        momenta = {name: slot.read() for name, slot in outer.momenta().items()}
        return {"steps": np.array(outer.steps, np.int64), **momenta}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        outer = self._outer()
        if outer is None or "steps" not in arrays:
            return
        outer.begin_round(int(arrays["steps"]))
        for name, slot in outer.momenta().items():
            if name in arrays and arrays[name].shape == slot.shape:
                slot.assign(arrays[name])
            else:
                logger.warning(
                    "tfps: the outer momentum of %s is not in the checkpoint, or has another shape", slot.name
                )
        outer.note_trained()

    def share(self, restored: bool) -> None:
        outer, strategy = self._outer(), self._strategy()
        if outer is None or strategy is None:
            return
        with strategy.scope():
            made = tf.Variable(outer.steps if restored else -1, dtype=tf.int64, trainable=False, name="steps")
        strategy.extended.take_from_first_rank([made])
        if (count := int(made.numpy())) >= 0:
            outer.begin_round(count)
            slots_from_first_rank(list(outer.momenta().values()), strategy)
            outer.note_trained()
