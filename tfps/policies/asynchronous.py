"""Mode "async": pservers apply each gradient as it comes; workers get the newest parameters where they meet.

Keras takes as many steps in an epoch of `fit` as the dataset has batches, divided alike. Here batches are handed out,
so the number differs between workers, and an epoch ends where the data does. With `steps_per_epoch` it ends after so
many steps per worker on average. All begin the next epoch together: what a rank reads or saves between two epochs is of
one state.

Tested in tests/policies/test_asynchronous.py and tests/integration/test_async.py.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfps.collectives import AllReduce
from tfps.config import Config
from tfps.errors import UnsupportedError, WaitTimeoutError
from tfps.exchange.interface import BucketSpec
from tfps.graph.ops import HOST
from tfps.keras_hooks.keras_private import batch_counter, distributed_dataset, without_limit
from tfps.policies.policy import Independent
from tfps.runtime.report import Stepping
from tfps.runtime.runtime import Runtime
from tfps.types import Batches, Function, Model
from tfps.updates.initial_values import INITIAL_VALUES
from tfps.updates.reductions import Reductions
from tfps.updates.variables import GatedVariable


@dataclass(eq=False)
class _Epochs:
    """What is known of an epoch iterator of Keras.

    Args:
        steps: `steps_per_epoch`, as the program gave it.
        taken: times that the current epoch has asked for a step.
    """

    steps: int | None
    taken: int = 0


class Asynchronous(Independent):
    """Pservers apply each gradient as it comes, and reply with the newest parameters; workers meet between epochs.

    Attributes:
        in_epoch: whether `fit` takes steps, so that nothing but initial values may be exchanged.
    """

    setting = "mode='async'"
    gets_changes = False  # each rank gets the newest parameters, also a single one

    def __init__(self, runtime: Runtime, config: Config) -> None:
        super().__init__(runtime, config)
        self.hands_out = not self.together
        self.in_epoch = False
        self._epochs: weakref.WeakKeyDictionary[Batches, _Epochs] = weakref.WeakKeyDictionary()
        self._variables: weakref.WeakValueDictionary[str, GatedVariable] = weakref.WeakValueDictionary()
        if not self.together:
            runtime.declared.before = self._prepare

    def reductions(self) -> Reductions:
        return Reductions(self._runtime, estimates=not self.together)

    def stepping(self) -> Stepping:
        waits = not self.together and self._config.staleness is not None
        return Stepping(waits=waits, whole_replies=True, every_step=False)

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
            mean = round(self.barrier(own) / self._strategy.num_workers)
            counter.assign(mean + (own - mean) % every)
            optimizer = getattr(optimizer, "inner_optimizer", None)

    def reset_epochs(self, epochs: Batches) -> None:
        """Lets an epoch of `fit` take steps while there are batches, where Keras resets its iterator `epochs`."""
        self.in_epoch = False
        if self._ends_with_data(epochs):
            without_limit(epochs)  # already here, where `fit` asks how many steps a progress bar shows
            if _hands_out(epochs):
                distributed_dataset(epochs).begin_anew()

    def epoch_steps(self, epochs: Batches, original: Function) -> Iterator[tuple[object, ...]]:
        """Yields what Keras' `original(epochs)` does, until a step finds that the epoch has ended."""
        known = self._known(epochs)
        self.in_epoch = False  # the last one may have taken just one batch, to build the model
        self.barrier()
        self.in_epoch, known.taken = True, 0
        if self._ends_with_data(epochs):
            if _hands_out(epochs):
                distributed_dataset(epochs).steps = self._steps_of_all(epochs)
            without_limit(epochs)
        for each in original(epochs):
            known.taken += 1
            yield each

    @contextlib.contextmanager
    def epoch(self, epochs: Batches, original: Function) -> Iterator[None]:
        """In the block `fit` takes the steps of an epoch; `original(epochs)` is Keras' block."""
        try:
            if not self._ends_with_data(epochs):
                with original(epochs):
                    yield
                return
            try:
                yield
                epochs.tf_sync()
            except (StopIteration, tf.errors.OutOfRangeError):
                epochs.data_adapter.on_epoch_end()
                self._check_steps(self._known(epochs))
        finally:
            self.in_epoch = False

    def _known(self, epochs: Batches) -> _Epochs:
        if epochs not in self._epochs:
            self._epochs[epochs] = _Epochs(epochs.steps_per_epoch)
        return self._epochs[epochs]

    def _ends_with_data(self, epochs: Batches) -> bool:
        """Whether an epoch has as many steps as there are batches for this worker, not a number that Keras counts."""
        return self._known(epochs).steps is None or _hands_out(epochs)

    def _steps_of_all(self, epochs: Batches) -> int | None:
        """Returns how many steps all workers take together in an epoch; None: as many as there are batches."""
        steps, at_once = self._known(epochs).steps, epochs.steps_per_execution
        if steps is None:
            return None
        return math.ceil(steps / at_once) * int(at_once * self._runtime.exchange.view.workers)

    def _check_steps(self, known: _Epochs) -> None:
        """Checks that the epoch that has ended had a step for this worker."""
        if known.taken > 1:
            return
        exchange = self._runtime.exchange
        error = UnsupportedError(
            f"mode='async' needs at least one batch for each worker in an epoch; rank {exchange.rank} of "
            f"{exchange.view.workers} got none: use fewer workers, or smaller batches"
        )
        exchange.fail(error)
        raise error

    def note_remote(self, variable: GatedVariable) -> None:
        self._variables[variable._unique_id] = variable

    def _prepare(self, spec: BucketSpec) -> None:
        """Prepares for an exchange with all ranks: waits until this rank's pushes have been answered, then quiesces."""
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

    def barrier(self, number: int = 0) -> int:
        """Waits for all ranks; returns the sum of their numbers."""
        if self.together:
            return number
        total = AllReduce(self._runtime, "barrier", [], np.int64)(np.array(number))
        self._barriers += 1
        return int(total)

    def synchronize(self) -> None:
        """Gives all ranks the parameters as all gradients so far have left them; every rank must call it."""
        if self.together:
            return
        self.barrier()
        with tf.init_scope(), tf.device(HOST):
            for bucket, variables in self._held().items():
                newest = np.asarray(self._runtime.exchange_now(bucket, None).sum)
                for variable in variables:
                    self._take(variable, newest)
        self.barrier()  # nobody changes them before all have them

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
            variable.remote.synchronized = True
        for component in variable._values:  # not as an assignment of the program: pservers have it
            component.assign(value)


def _hands_out(epochs: Batches) -> bool:
    return getattr(distributed_dataset(epochs), "whole", None) is not None
