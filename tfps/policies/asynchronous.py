"""Mode "async": pservers apply each gradient as it comes; workers get the newest parameters where they meet.

Tested in tests/policies/test_asynchronous.py and tests/integration/test_async.py.
"""

from __future__ import annotations

import weakref

import numpy as np
import tensorflow as tf

from tfps.collectives.collectives import AllReduce
from tfps.config import Config
from tfps.errors import UnsupportedError, WaitTimeoutError
from tfps.exchange.interface import BucketSpec
from tfps.graph.ops import HOST
from tfps.keras_hooks.keras_private import batch_counter
from tfps.policies.policy import Policy
from tfps.runtime.runtime import Runtime
from tfps.runtime.stepping import Stepping
from tfps.types import Model
from tfps.updates.initial_values import INITIAL_VALUES
from tfps.updates.reductions import Reductions
from tfps.updates.variables import GatedVariable


class Asynchronous(Policy):
    """Pservers apply each gradient as it comes, and reply with the newest parameters; workers meet between epochs.

    Attributes:
        in_epoch: whether `fit` takes steps, so that nothing but initial values may be exchanged.
    """

    setting = "mode='async'"
    gets_changes = False  # each rank gets the newest parameters, also a single one

    def __init__(self, runtime: Runtime, config: Config) -> None:
        super().__init__(runtime, config)
        self.together = runtime.exchange.workers == 1
        self.hands_out = not self.together
        self.in_epoch, self._meetings = False, 0
        self._variables: weakref.WeakValueDictionary[str, GatedVariable] = weakref.WeakValueDictionary()
        if not self.together:
            runtime.before_exchange = runtime.declared.before = self._prepare

    def reductions(self) -> Reductions:
        return Reductions(self._runtime, estimates=not self.together)

    @property
    def gradient_factor(self) -> int:
        return int(self._runtime.exchange.workers)

    def stepping(self) -> Stepping:
        waits = not self.together and self._config.staleness is not None
        return Stepping(waits=waits, whole_replies=True, every_step=False)

    @property
    def state(self) -> str | None:
        return str(self._meetings)

    def check_saves_now(self, what: str) -> None:
        if self.in_epoch:
            raise UnsupportedError(
                f"with mode='async' {what} saves at the end of epochs, where all workers meet: use save_freq='epoch', "
                "its default (and steps_per_epoch for shorter epochs)"
            )

    def end_epoch(self, model: Model) -> None:
        """Brings the newest parameters to all workers, after the last step of an epoch of `fit`."""
        if self._strategy is None or not self._strategy.extended.hands_out:
            return
        self._strategy.synchronize()
        optimizer = model.optimizer
        while optimizer is not None:  # what scales the loss has another one within
            counter, every = batch_counter(optimizer), optimizer.gradient_accumulation_steps or 1
            own = int(counter.numpy())
            # The mean of the workers' steps is what each takes in mode "sync". What is accumulated stays as far.
            mean = round(self.meet(own) / self._strategy.num_workers)
            counter.assign(mean + (own - mean) % every)
            optimizer = getattr(optimizer, "inner_optimizer", None)

    def note_remote(self, variable: GatedVariable) -> None:
        self._variables[variable._unique_id] = variable

    def _prepare(self, spec: BucketSpec) -> None:
        """Prepares for an exchange with all ranks: waits until this rank's pushes have been answered, then rests.

        Raises:
            UnsupportedError: the ranks are within an epoch of `fit`, at different batches.
        """
        if self.in_epoch and spec.names != (INITIAL_VALUES,):
            raise UnsupportedError(
                f"within an epoch of fit, mode='async' cannot exchange {spec.name} between the workers, which are at "
                "different batches: combine, reduce, gather, and read metrics and moving statistics in on_epoch_end, "
                "or take mode='sync'"
            )
        timeout_s = 2 * self._runtime.wait_s  # the exchange fails earlier and says why
        if not self._runtime.settle(timeout_s):
            raise WaitTimeoutError(f"updates under way did not end within {timeout_s:.0f} s")
        self._runtime.exchange.peers.quiesce()

    def meet(self, number: int = 0) -> int:
        """Waits for all ranks; returns the sum of their numbers.

        Raises:
            WaitTimeoutError: a rank did not come in time; the message names it.
            TfpsError: the exchange has failed.
        """
        if self.together:
            return number
        total = AllReduce(self._runtime, "meeting", [], np.int64)(np.array(number))
        self._meetings += 1
        return int(total)

    def synchronize(self) -> None:
        """Gives all ranks the parameters as all gradients so far have left them; every rank must call it."""
        if self.together:
            return
        self.meet()
        with tf.init_scope(), tf.device(HOST):
            for bucket, variables in self._held().items():
                newest = np.asarray(self._runtime.exchange_now(bucket, None).sum)
                for variable in variables:
                    self._take(variable, newest)
        self.meet()  # nobody changes them before all have them

    def _held(self) -> dict[int, list[GatedVariable]]:
        """The variables whose value pservers have, by bucket."""
        held: dict[int, list[GatedVariable]] = {}
        for variable in list(self._variables.values()):
            variable.wait()
            if variable.remote is not None and variable.remote.holder is not None:
                held.setdefault(variable.remote.holder, []).append(variable)
        return held

    @staticmethod
    def _take(variable: GatedVariable, newest: np.ndarray) -> None:
        begin = 0 if variable.remote is None else variable.remote.begin
        shape = variable.shape.as_list()
        nbytes = 4 * int(np.prod(shape, dtype=np.int64))
        value = newest[begin : begin + nbytes].view(np.float32).reshape(shape)
        if variable.remote is not None:
            variable.remote.newest = True
        for component in variable._values:  # not as an assignment of the program: pservers have it
            component.assign(value)
