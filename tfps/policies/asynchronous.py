"""Mode "async": pservers apply each gradient as it comes; workers get the latest parameters where they meet.

An epoch ends where the data does, or with `steps_per_epoch` after so many steps per worker on average. All begin the
next one together: what a rank reads or saves between two epochs is of one state.

Tested in tests/policies/test_asynchronous.py and tests/integration/test_async.py.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfps.collectives import AllReduce
from tfps.config import Config
from tfps.errors import UnsupportedError
from tfps.exchange.interface import BucketSpec
from tfps.graph.ops import HOST
from tfps.keras_hooks.keras_private import batch_counter, distributed_dataset, without_limit
from tfps.policies.policy import Independent
from tfps.runtime.remote import RemoteParameter
from tfps.runtime.report import Stepping
from tfps.runtime.runtime import Runtime
from tfps.types import Batches, Function, Model
from tfps.updates.initial_values import INITIAL_VALUES
from tfps.updates.variables import GatedVariable


class Asynchronous(Independent):
    """Pservers apply each gradient as it comes, and reply with the latest parameters; workers meet between epochs."""

    setting = "mode='async'"
    gets_changes = False  # each rank gets the latest parameters, also a single one

    def __init__(self, runtime: Runtime, config: Config) -> None:
        super().__init__(runtime, config)
        self.hands_out = not self.together
        self.in_epoch = False  # whether `fit` takes steps, so that nothing but initial values may be exchanged
        self._taken = 0  # times that the current epoch has asked for a step
        # By epoch iterator of Keras: `steps_per_epoch`, as the program gave it.
        self._epochs: weakref.WeakKeyDictionary[Batches, int | None] = weakref.WeakKeyDictionary()
        self._variables: weakref.WeakValueDictionary[str, GatedVariable] = weakref.WeakValueDictionary()
        if not self.together:
            runtime.declared.before = self._prepare

    def stepping(self) -> Stepping:
        waits = not self.together and self._config.staleness is not None
        return Stepping(waits=waits, uncoded_replies=True, every_step=False)

    def check_saves_now(self, what: str) -> None:
        if self.in_epoch:
            raise UnsupportedError(
                f"with mode='async' {what} saves at the end of epochs, where all workers meet: use save_freq='epoch', "
                "its default (and steps_per_epoch for shorter epochs)"
            )

    def end_epoch(self, model: Model) -> None:
        """Brings the latest parameters to all workers, after the last step of an epoch of `fit`."""
        if not self._strategy.extended.hands_out:
            return
        self._strategy.synchronize()
        optimizer = model.optimizer
        while optimizer is not None:  # what scales the loss has another one within
            counter, every = batch_counter(optimizer), optimizer.gradient_accumulation_steps or 1
            own = int(counter.numpy())
            # The mean of the workers' steps is what each takes in mode "sync". What is accumulated stays as far.
            mean = round(self.barrier(own))
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
        self.in_epoch = False  # the last one may have taken just one batch, to build the model
        self.barrier()
        self.in_epoch, self._taken = True, 0
        if self._ends_with_data(epochs):
            if _hands_out(epochs):  # its steps are those of all workers together; None: as many as there are batches
                steps, at_once = self._epochs[epochs], epochs.steps_per_execution
                workers = self._runtime.exchange.view.workers
                total = None if steps is None else math.ceil(steps / at_once) * int(at_once * workers)
                distributed_dataset(epochs).steps = total
            without_limit(epochs)
        for each in original(epochs):
            self._taken += 1
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
                if self._taken <= 1:
                    exchange = self._runtime.exchange
                    error = UnsupportedError(
                        f"mode='async' needs at least one batch for each worker in an epoch; rank {exchange.rank} of "
                        f"{exchange.view.workers} got none: use fewer workers, or smaller batches"
                    )
                    exchange.fail(error)
                    raise error from None
        finally:
            self.in_epoch = False

    def _ends_with_data(self, epochs: Batches) -> bool:
        """Whether an epoch has as many steps as there are batches for this worker, not a number that Keras counts."""
        return self._epochs.setdefault(epochs, epochs.steps_per_epoch) is None or _hands_out(epochs)

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
        self._runtime.finish()
        self._runtime.exchange.peers.quiesce()

    def barrier(self, number: int = 0) -> float:
        """Waits for all ranks; returns the mean of their numbers."""
        if self.together:
            return number
        total, ranks = AllReduce(self._runtime, "barrier", [], np.int64).of_ranks(np.array(number))
        self._barriers += 1
        return int(total) / len(ranks)

    def synchronize(self) -> None:
        """Gives all ranks the parameters as all gradients so far have left them; every rank must call it."""
        if self.together:
            return
        self.barrier()
        held: dict[int, list[tuple[GatedVariable, RemoteParameter]]] = {}  # whose value pservers have, by bucket
        with tf.init_scope(), tf.device(HOST):
            for variable in list(self._variables.values()):
                variable.wait()
                if (remote := variable.remote) is not None and remote.holder is not None:
                    held.setdefault(remote.holder, []).append((variable, remote))
            for bucket, variables in held.items():
                latest = np.asarray(self._runtime.exchange_now(bucket, None).sum)
                for variable, remote in variables:
                    shape = variable.shape.as_list()
                    end = remote.begin + 4 * int(np.prod(shape, dtype=np.int64))
                    value = latest[remote.begin : end].view(np.float32).reshape(shape)
                    remote.synchronized = True
                    for component in variable._values:  # not as an assignment of the program: pservers have it
                        component.assign(value)
        self.barrier()  # nobody changes them before all have them


def _hands_out(epochs: Batches) -> bool:
    return getattr(distributed_dataset(epochs), "all_data", None) is not None
