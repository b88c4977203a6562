"""`Model.predict` where several ranks run the same program: each predicts all that it is given, as one process does.

Keras joins the predictions of this worker's replicas only, in the order of their batches: of a shard, no rank would
have them all. Predicting needs no other rank, so one rank alone may do it, too.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import keras
import tensorflow as tf


@functools.cache
def predict_everything(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Makes Keras give all data to every rank, for models of a `strategy_class`; done once per process."""
    original = keras.Model.predict

    @functools.wraps(original)
    def predict(self: Any, *arguments: Any, **options: Any) -> Any:
        strategy = getattr(self, "distribute_strategy", None)
        whole = strategy.extended.unsharded() if isinstance(strategy, strategy_class) else contextlib.nullcontext()
        with whole:
            return original(self, *arguments, **options)

    keras.Model.predict = predict
