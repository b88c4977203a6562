"""Mode "async": brings the newest parameters to all workers, where these meet.

Tested in tests/strategy/test_newest.py and tests/integration/test_async.py.
"""

from __future__ import annotations

import weakref

import numpy as np
import tensorflow as tf

from tfps.errors import UnsupportedError, WaitTimeoutError
from tfps.exchange.interface import BucketSpec
from tfps.graph.ops import HOST
from tfps.runtime.runtime import Runtime
from tfps.strategy.initial_values import INITIAL_VALUES
from tfps.strategy.variables import GatedVariable

_MEETING = BucketSpec(("meeting",), "sum", 8, "int64", 0, occasional=True)


class Newest:
    """Where workers meet that do not step together. Used by the threads that run eagerly.

    Args:
        on: whether this is so; else nothing here does anything.

    Attributes:
        on: see above.
        in_epoch: whether `fit` takes steps, so that nothing but initial values may be exchanged.
        meetings: how often all ranks have met.
    """

    def __init__(self, runtime: Runtime, on: bool) -> None:
        self._runtime, self.on, self.in_epoch, self.meetings = runtime, on, False, 0
        self._variables: weakref.WeakValueDictionary[str, GatedVariable] = weakref.WeakValueDictionary()
        if on:
            runtime.before_exchange = runtime.declared.before = self._prepare

    def note(self, variable: GatedVariable) -> None:
        """Notes a variable that pservers update."""
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
        if not self.on:
            return number
        (bucket,) = self._runtime.buckets([("meeting", _MEETING)])
        reply = self._runtime.exchange_now(bucket, np.array([number], np.int64))
        self.meetings += 1
        return int(np.frombuffer(memoryview(reply.sum), np.int64)[0])

    def synchronize(self) -> None:
        """Gives all ranks the parameters as all gradients so far have left them; every rank must call it.

        Raises:
            WaitTimeoutError: a rank did not come in time; the message names it.
            TfpsError: the exchange has failed.
        """
        if not self.on:
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
            if variable.served is not None and variable.served.holder is not None:
                held.setdefault(variable.served.holder, []).append(variable)
        return held

    @staticmethod
    def _take(variable: GatedVariable, newest: np.ndarray) -> None:
        begin = 0 if variable.served is None else variable.served.begin
        shape = variable.shape.as_list()
        nbytes = 4 * int(np.prod(shape, dtype=np.int64))
        value = newest[begin : begin + nbytes].view(np.float32).reshape(shape)
        if variable.served is not None:
            variable.served.newest = True
        for component in variable._values:  # not as an assignment of the program: pservers have it
            component.assign(value)
