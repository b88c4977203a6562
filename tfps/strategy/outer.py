"""Local modes: global parameters of a strategy's variables, and how ranks meet between steps.

Ranks may have different numbers of batches. Where they meet, at the end of an epoch or in `Strategy.synchronize`, one
that has made fewer steps takes part in the exchanges that others wait for, and goes on from where the last of them is.

Tested in tests/strategy/test_outer.py and tests/integration/test_local.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import weakref
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfps.config import Config
from tfps.errors import MismatchError, UnsupportedError, WaitTimeoutError, WorkerLostError
from tfps.exchange.interface import BucketSpec
from tfps.runtime.runtime import Runtime
from tfps.strategy.emitter import Emitter
from tfps.strategy.initial_values import InitialValues
from tfps.strategy.names import own_name
from tfps.strategy.outer_bucket import copy_of, make_copy
from tfps.strategy.outer_steps import OuterSteps
from tfps.strategy.variables import GatedVariable

_MEETING = "steps of each worker"
_SPEC = BucketSpec((_MEETING,), "gather", 0, "uint8", 0, occasional=True)


class Outer:
    """Of one strategy in mode "diloco" or "local". Used by the threads that trace or run eagerly.

    Attributes:
        meetings: how often all ranks have met.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        runtime: Runtime,
        emitter: Emitter,
        initial_values: InitialValues,
        config: Config,
    ) -> None:
        self._strategy, self._runtime, self._emitter = strategy, runtime, emitter
        self._initial_values, self._config = initial_values, config
        self._numbers, self.meetings = itertools.count(), 0
        self._known: weakref.WeakSet[OuterSteps] = weakref.WeakSet()
        # By unique id, those that have a global copy.
        self._variables: weakref.WeakValueDictionary[str, GatedVariable] = weakref.WeakValueDictionary()
        self._own: dict[str, list[tf.Tensor]] | None = None  # values by unique id while global ones take their place
        if runtime.exchange.workers > 1:
            runtime.declare_later(_MEETING, _SPEC)  # with the first exchange: nothing new is declared within an epoch

    def build(self, variables: Sequence[GatedVariable], optimizer: str) -> OuterSteps:
        """Returns the outer steps of an optimizer of `variables`, with this name; their global copies are made.

        Raises:
            ConfigError: there are fewer variables than fragments.
        """
        overlaps = self._config.overlap_steps > 0
        apart = {each._unique_id for each in variables if each.global_copy is not None and not _alike(each)}
        for variable in variables:
            copy = make_copy(variable, own_gates=overlaps)
            self._variables[variable._unique_id] = variable
            self._runtime.gate_watch.add(copy.gates)
            self._initial_values.leave_out([copy])
        given = self._strategy, self._runtime, self._emitter, self._config
        steps = OuterSteps(*given, variables, optimizer, lambda: next(self._numbers))
        steps.apart = apart
        self._known.add(steps)
        return steps

    # Where ranks meet.

    def meet(self) -> list[OuterSteps]:
        """Brings all ranks to the same step of each optimizer; every rank must call it.

        Returns the outer steps that all ranks still have: when an optimizer is collected depends on the rank.

        Raises:
            TfpsError: another rank does not in time, or the exchange failed.
            UnsupportedError: a variable has been trained in steps that were not counted; the job has failed.
        """
        known = self._exchanged()
        self._check_counted(known)
        if self._runtime.exchange.workers == 1:
            return known
        with tf.init_scope(), _explained():
            (bucket,) = self._runtime.buckets([(_MEETING, _SPEC)])
            own = {str(each.number): each.steps for each in known}
            parts = self._runtime.exchange_now(
                bucket, json.dumps(own).encode(), lambda _: self._make_up(known, bucket)
            ).parts
            self.meetings += 1
            said = [json.loads(bytes(part)) for part in parts or []]
            common = [each for each in known if all(str(each.number) in steps for steps in said)]
            for each in common:
                number = str(each.number)
                each.meet_at(max(steps[number] for steps in said), trained=own[number] > each.met)
        return common

    def _check_counted(self, known: Sequence[OuterSteps]) -> None:
        counted = {variable._unique_id for each in known for variable in each.variables}
        for each in [each for each in self._known if each.number is None]:
            for variable in each.variables:
                if variable._unique_id in counted | each.apart or _alike(variable):
                    continue
                error = UnsupportedError(
                    f"mode={self._config.mode!r}: variable {own_name(variable)!r} has been trained, but no call of "
                    f"Keras' `apply` of its optimizer, {each.optimizer}, was counted, so nothing is exchanged; if that "
                    "class overrides `apply`, let it call super().apply, or override `update_step` instead; or use "
                    "mode='sync' (tfps.Config, the default)"
                )
                self._runtime.exchange.fail(error)
                raise error

    def synchronize(self) -> None:
        """See `Strategy.synchronize`."""
        for each in self.meet():
            each.end_round()

    def _exchanged(self) -> list[OuterSteps]:
        """Those that may have exchanged anything, in an order that all ranks share."""
        return sorted((each for each in self._known if each.number is not None), key=lambda each: each.number or 0)

    def _make_up(self, known: Sequence[OuterSteps], bucket: int) -> bool:
        """Takes part in exchanges that other ranks wait for; the wait for `bucket` then begins anew."""
        made = [each.make_up() for each in known]
        if any(made):
            self._runtime.exchange.peers.extend_deadline(bucket)
        return any(made)

    # Global parameters in place of own ones.

    @contextlib.contextmanager
    def global_parameters(self) -> Iterator[None]:
        """In the block variables have their global values: to evaluate, predict and save."""
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

    @property
    def shows_global(self) -> bool:
        """Whether this is within a block of `global_parameters`."""
        return self._own is not None

    def assigned(self, variable: GatedVariable) -> None:
        """Notes that the program has assigned `variable`: it keeps that value after `global_parameters`."""
        if self._own is not None:
            self._own.pop(variable._unique_id, None)


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
