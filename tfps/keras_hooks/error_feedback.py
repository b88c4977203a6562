"""What compression holds back is part of `tf.train.Checkpoint` and of BackupAndRestore.

An optimizer carries it into checkpoints, and BackupAndRestore writes a file beside the weights. Keras' own files
(`model.save`, `save_weights`) do not have it: they are for programs without tfps, too, and Keras would refuse the
optimizer's state in a file with more than that.

Tested in tests/integration/test_compression.py.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfps.keras_hooks.beside_backup import packed, read, unpacked, write
from tfps.runtime.remote import Ahead
from tfps.types import Array, Callback, Logs, Model, Optimizer, Variable

_FILE = "tfps_error_feedback.npz"
_EXACT, _SHOWN = "exact", "shown"


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
            return packed({})
        compressing = strategy.extended.compressing
        compressing.collect()
        return packed(_named(compressing.held(variables), compressing.ahead(variables)))

    def deserialize(self, string_value: bytes) -> None:
        strategy, variables = self._strategy(), [ref() for ref in self._variables]
        if strategy is not None and all(variable is not None for variable in variables):
            strategy.extended.compressing.restore(variables, *_by_place(unpacked(string_value)[0]))


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
        if strategy.rank == 0 and (values := read(self, _FILE, "what compression had held back")) is not None:
            strategy.extended.compressing.restore(_variables(self.model), *_by_place(values))

    @functools.wraps(original_save)
    def save_model(self: Callback) -> None:
        original_save(self)
        strategy = strategy_of(self.model)
        if strategy is None:
            return
        compressing = strategy.extended.compressing
        compressing.collect()
        if strategy.rank == 0:
            variables = _variables(self.model)
            write(self, _FILE, _named(compressing.held(variables), compressing.ahead(variables)))

    callback.on_train_begin, callback._save_model = on_train_begin, save_model


def _variables(model: Model) -> list[Variable]:
    """The variables under those of Keras."""
    return [variable.value for variable in model.trainable_variables]


def _named(values: Mapping[int, Array], ahead: Mapping[int, Ahead]) -> dict[str, Array]:
    arrays = {str(place): value for place, value in values.items()}
    for place, each in ahead.items():
        arrays |= {f"{_EXACT}{place}": each.exact, f"{_SHOWN}{place}": np.array(each.shown, np.uint32)}
    return arrays


def _by_place(arrays: Mapping[str, Array]) -> tuple[dict[int, Array], dict[int, Ahead]]:
    """What is held back and what pservers have, by place."""
    values = {int(name): array for name, array in arrays.items() if name.isdecimal()}
    places = [int(name.removeprefix(_EXACT)) for name in arrays if name.startswith(_EXACT)]
    return values, {place: Ahead(arrays[f"{_EXACT}{place}"], int(arrays[f"{_SHOWN}{place}"])) for place in places}
