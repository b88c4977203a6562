"""What Keras' `fit` reports and decides by, where each rank would go by its own part of the data.

Metrics are combined over ranks when they are read. What a `train_step` returns besides is this rank's own value of the
last batch: at the end of an epoch it becomes the mean over ranks, so that History and callbacks are alike everywhere.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf


@functools.cache
def agree_on_logs(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Makes Keras ask all ranks, for models of a `strategy_class` with several workers; done once per process."""

    def strategy_of(model: Any) -> Any:
        strategy = getattr(model, "distribute_strategy", None)
        return strategy if isinstance(strategy, strategy_class) and strategy.num_workers > 1 else None

    epoch_logs = keras.Model._get_metrics_result_or_logs

    @functools.wraps(epoch_logs)
    def get_metrics_result_or_logs(self: Any, logs: Any) -> Any:
        results = epoch_logs(self, logs)
        strategy = strategy_of(self)
        if strategy is None or results is not logs or not isinstance(logs, dict):
            return results
        return {name: _mean(strategy, value) for name, value in sorted(logs.items())}

    keras.Model._get_metrics_result_or_logs = get_metrics_result_or_logs
    stop = keras.callbacks.TerminateOnNaN.on_batch_end

    @functools.wraps(stop)
    def on_batch_end(self: Any, batch: int, logs: Any = None) -> None:
        strategy = strategy_of(self.model)
        if strategy is not None and logs and logs.get("loss") is not None:
            # A loss that is not finite on one rank: all stop at this batch, or the others would wait for that rank.
            logs = {**logs, "loss": np.asarray(_mean(strategy, logs["loss"]))}
        stop(self, batch, logs)

    keras.callbacks.TerminateOnNaN.on_batch_end = on_batch_end


def _mean(strategy: Any, value: Any) -> Any:
    """The mean of numbers over ranks; anything else as it is."""
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        return value
    if not tensor.dtype.is_floating and not tensor.dtype.is_integer:
        return value
    if tensor.dtype.is_integer:
        tensor = tf.cast(tensor, tf.float32)
    return strategy.reduce(tf.distribute.ReduceOp.MEAN, tensor, axis=None)
