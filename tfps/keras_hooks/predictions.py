"""`Model.predict` where several ranks run the same program: each predicts all that it is given, as one process does.

Keras joins the predictions of this worker's replicas only, in the order of their batches: of a shard, no rank would
have them all. Predicting needs no other rank, so one rank alone may do it, too.

Tested in tests/integration/test_semantics.py.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf


class Sharding(threading.local):
    """Whether this thread divides work between workers: not while it predicts; other threads may train meanwhile."""

    on = True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Meanwhile datasets go to this worker's replicas whole, iterators wait for nobody, noise is one process'."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before

    def kept_off(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` for the threads of replicas, which are others."""

        def in_replica(*arguments: Any, **options: Any) -> Any:
            with self.off():
                return function(*arguments, **options)

        return in_replica


@functools.cache
def predict_everything(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Makes Keras give all data to every rank, for models of a `strategy_class`; done once per process."""

    def undivided(original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def predict(self: Any, *arguments: Any, **options: Any) -> Any:
            strategy = getattr(self, "distribute_strategy", None)
            whole = (
                strategy.extended.sharding.off() if isinstance(strategy, strategy_class) else contextlib.nullcontext()
            )
            with whole:
                return original(self, *arguments, **options)

        return predict

    keras.Model.predict = undivided(keras.Model.predict)
    keras.Model.predict_on_batch = undivided(keras.Model.predict_on_batch)  # they share a traced function
