"""Rank 0's initial values become everybody's, before the first step that could use them.

Variables are noted when they are created and exchanged in one go at the next `strategy.run`, so that a new model's
weights may be loaded on rank 0 only; weights loaded later must be loaded on every rank. What each rank has created is
compared first.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfps.exchange import BucketSpec
from tfps.progress import Progress
from tfps.runtime import Runtime
from tfps.variables import OnReadVariable

_BATCH_BYTES = 64 * 2**20  # exchanged at once; more would only need more memory


class InitialValues:
    """Variables whose values are not agreed yet. Used by the main thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._created: list[weakref.ref[Any]] = []

    def created(self, variable: Any) -> None:
        """Notes a new distributed variable."""
        if self._runtime.exchange.workers > 1 and variable.dtype != tf.string:
            self._created.append(weakref.ref(variable))

    def agree(self) -> None:
        """Gives all new variables the values that they have on rank 0.

        Raises:
            MismatchError: the ranks created different variables.
            WaitTimeoutError: a rank did not come to the same point.
        """
        if not self._created:
            return
        with tf.init_scope():
            gc.collect()  # what only this rank still holds by accident must not look like a different model
            variables = [variable for ref in self._created if (variable := ref()) is not None]
            ready = [variable for variable in variables if bool(variable.is_initialized())]
            self._created = [weakref.ref(variable) for variable in variables if not bool(variable.is_initialized())]
            self.share(ready)

    def share(self, variables: list[Any]) -> None:
        """Gives `variables` the values that they have on rank 0; called by all ranks.

        Raises:
            MismatchError: the variables differ between ranks.
            WaitTimeoutError: a rank did not come to the same point.
        """
        total = sum(map(_nbytes, variables)) if self._runtime.exchange.rank == 0 else 0  # rank 0 alone shows it
        with Progress("tfps: initial values", total) as progress:
            for batch in _batches(variables):
                self._exchange(batch, progress)

    def _exchange(self, variables: list[Any], progress: Progress) -> None:
        total = sum(map(_nbytes, variables))
        details = [f"variable '{_name(v)}' {tuple(v.shape)} {v.dtype.name}" for v in variables]
        spec = BucketSpec(name="initial values", kind="sum", nbytes=total, dtype="uint8", priority=0, occasional=True)
        key = ("initial values", tuple(variable._unique_id for variable in variables))
        (bucket,) = self._runtime.buckets([(key, spec)], details)
        payload = None
        if self._runtime.exchange.rank == 0:
            payload = np.concatenate([_bytes(variable) for variable in variables])
        received = self._runtime.exchange_now(bucket, payload, lambda part: progress.show(part * total)).sum
        progress.add(total)
        start = 0
        for variable in variables:
            end = start + _nbytes(variable)
            value = received[start:end].view(variable.dtype.as_numpy_dtype).reshape(variable.shape)
            if _on_read(variable):
                variable.assign(value)  # on rank 0 too: which replica holds a sum depends on the rank
            elif self._runtime.exchange.rank > 0:
                for component in variable.values:  # waits for what is under way
                    component.assign(value)
            start = end


def _batches(variables: list[Any]) -> Iterator[list[Any]]:
    """`variables` in groups of about `_BATCH_BYTES`."""
    batch: list[Any] = []
    for variable in variables:
        batch.append(variable)
        if sum(map(_nbytes, batch)) >= _BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def _name(variable: Any) -> str:
    return str(variable.name).removesuffix(":0")


def _on_read(variable: Any) -> bool:
    return isinstance(variable, OnReadVariable) and variable.aggregation != tf.VariableAggregation.NONE


def _nbytes(variable: Any) -> int:
    return int(np.prod(variable.shape, dtype=np.int64)) * int(variable.dtype.size)


def _bytes(variable: Any) -> Any:
    value = variable.current() if _on_read(variable) else variable.values[0]
    return np.ascontiguousarray(value.numpy()).reshape(-1).view(np.uint8)
