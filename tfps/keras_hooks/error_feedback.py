"""What compression holds back is part of `tf.train.Checkpoint` and of BackupAndRestore.

An optimizer carries it into checkpoints, and BackupAndRestore writes a file beside the weights. Keras' own files
(`model.save`, `save_weights`) do not have it: they are for programs without tfps, too, and Keras would refuse the
optimizer's state in a file with more than that.

Tested in tests/integration/test_compression.py.
"""

from __future__ import annotations

import functools
import io
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfps.runtime.served import Ahead
from tfps.types import Argument, Array, Callback, Logs, Model, Optimizer, Variable

logger = logging.getLogger("tfps")
_FILE = "tfps_error_feedback.npz"
_ITERATIONS, _EXACT, _SHOWN = "iterations", "exact", "shown"


class HeldBack(tf.train.experimental.PythonState):
    """What is held back of an optimizer's variables, as a checkpoint has it. Every rank must save or restore it, or
    call `strategy.combine()` before one rank saves.
    """

    def __init__(self, strategy: tf.distribute.Strategy, variables: Sequence[Variable]) -> None:
        self._strategy = weakref.ref(strategy)
        self._variables = [weakref.ref(variable) for variable in variables]

    def serialize(self) -> bytes:
        strategy, variables = self._strategy(), [ref() for ref in self._variables]
        if strategy is None or any(variable is None for variable in variables):
            return _packed({}, {})
        compressing = strategy.extended.compressing
        compressing.collect()
        return _packed(compressing.held(variables), compressing.ahead(variables))

    def deserialize(self, string_value: bytes) -> None:
        strategy, variables = self._strategy(), [ref() for ref in self._variables]
        if strategy is not None and all(variable is not None for variable in variables):
            values, ahead, _ = _unpacked(string_value)
            strategy.extended.compressing.restore(variables, values, ahead)


def carry_held_back(optimizer: Optimizer, strategy: tf.distribute.Strategy, variables: Sequence[Variable]) -> None:
    """Makes checkpoints of `optimizer` have what is held back of `variables`."""
    if strategy.extended.compressing.has_state and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer.tfps_held_back = HeldBack(strategy, variables)  # Keras tracks it as it tracks variables


@functools.cache
def back_up_held_back(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Makes Keras collect and back up what is held back, for models of a `strategy_class`; done once per process."""

    def strategy_of(model: Model) -> tf.distribute.Strategy | None:
        strategy = getattr(model, "distribute_strategy", None)
        has_state = isinstance(strategy, strategy_class) and strategy.extended.compressing.has_state
        return strategy if has_state else None

    epoch_logs = keras.Model._get_metrics_result_or_logs

    @functools.wraps(epoch_logs)
    def get_metrics_result_or_logs(self: Model, logs: Logs) -> Logs:
        results = epoch_logs(self, logs)
        if (strategy := strategy_of(self)) is not None:
            strategy.extended.compressing.collect()  # so that one rank may save in `on_epoch_end`
        return results

    keras.Model._get_metrics_result_or_logs = get_metrics_result_or_logs
    _back_up(strategy_of)


def _back_up(strategy_of: Callable[[Model], tf.distribute.Strategy | None]) -> None:
    callback = keras.callbacks.BackupAndRestore
    original_begin, original_save = callback.on_train_begin, callback._save_model

    @functools.wraps(original_begin)
    def on_train_begin(self: Callback, logs: Logs | None = None) -> None:
        original_begin(self, logs)
        strategy = strategy_of(self.model)
        if strategy is None:
            return
        strategy.extended.compressing.collect()  # on all ranks; only the first knows whether there is a backup
        path = _path(self)
        if strategy.rank == 0 and tf.io.gfile.exists(path):
            with tf.io.gfile.GFile(path, "rb") as file:
                values, ahead, iterations = _unpacked(file.read())
            now = int(self.model.optimizer.iterations.numpy())
            if iterations == now:
                strategy.extended.compressing.restore(_variables(self.model), values, ahead)
            else:
                logger.warning(
                    "tfps: what compression had held back is dropped: %s is of step %d, the backup of step %d",
                    path,
                    iterations,
                    now,
                )

    @functools.wraps(original_save)
    def save_model(self: Callback) -> None:
        original_save(self)
        strategy = strategy_of(self.model)
        if strategy is None:
            return
        compressing = strategy.extended.compressing
        compressing.collect()
        if strategy.rank == 0:
            step = int(self.model.optimizer.iterations.numpy())
            path, variables = _path(self), _variables(self.model)
            with tf.io.gfile.GFile(f"{path}.part", "wb") as file:
                file.write(_packed(compressing.held(variables), compressing.ahead(variables), step))
            tf.io.gfile.rename(f"{path}.part", path, overwrite=True)

    callback.on_train_begin, callback._save_model = on_train_begin, save_model


def _path(callback: Callback) -> str:
    return str(tf.io.gfile.join(str(callback.backup_dir), _FILE))


def _variables(model: Model) -> list[Variable]:
    """The variables under those of Keras."""
    return [variable.value for variable in model.trainable_variables]


def _packed(values: Mapping[int, Array], ahead: Mapping[int, Ahead], iterations: int = 0) -> bytes:
    content = io.BytesIO()
    arrays: dict[str, Argument] = {_ITERATIONS: np.int64(iterations)}
    arrays |= {str(place): value for place, value in values.items()}
    for place, each in ahead.items():
        arrays |= {f"{_EXACT}{place}": each.exact, f"{_SHOWN}{place}": np.uint32(each.shown)}
    np.savez(content, **arrays)
    return content.getvalue()


def _unpacked(content: bytes) -> tuple[dict[int, Array], dict[int, Ahead], int]:
    """What is held back and what pservers have, by place, and the step."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        values = {int(name): arrays[name] for name in arrays.files if name.isdecimal()}
        places = [int(name.removeprefix(_EXACT)) for name in arrays.files if name.startswith(_EXACT)]
        ahead = {place: Ahead(arrays[f"{_EXACT}{place}"], int(arrays[f"{_SHOWN}{place}"])) for place in places}
        return values, ahead, int(arrays[_ITERATIONS])
