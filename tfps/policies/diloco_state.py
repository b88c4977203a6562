"""State of outer steps in `tf.train.Checkpoint` and BackupAndRestore: the momentum, and the position in the round.

The global parameters are saved in place of the variables themselves. An optimizer carries the rest into checkpoints;
BackupAndRestore writes a file beside the weights. Keras' own files do not have it: they are for programs without tfps.

Tested in tests/policies/test_outer.py and tests/integration/test_local_programs.py.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping

import keras
import numpy as np
import tensorflow as tf

from tfps.keras_hooks.beside_backup import packed, read, unpacked, write
from tfps.keras_hooks.remote_variable import slots_from_first_rank
from tfps.policies.outer_optimizer import OuterOptimizer
from tfps.types import Array, Callback, Logs, Model, Optimizer

logger = logging.getLogger("tfps")
_FILE, _STEPS = "tfps_outer_steps.npz", "steps"


class OuterState(tf.train.experimental.PythonState):
    """The state of an optimizer's outer steps as a checkpoint has it. A rank may save it alone; all must restore it."""

    def __init__(self, steps: OuterOptimizer) -> None:
        self._steps = weakref.ref(steps)

    def serialize(self) -> bytes:
        steps = self._steps()
        return packed({} if steps is None else _arrays(steps))

    def deserialize(self, string_value: bytes) -> None:
        steps = self._steps()
        if steps is not None:
            _restore(steps, unpacked(string_value)[0])


def _arrays(steps: OuterOptimizer) -> dict[str, Array]:
    return {_STEPS: np.array(steps.steps, np.int64), **{name: slot.read() for name, slot in steps.slots().items()}}


def _restore(steps: OuterOptimizer, arrays: Mapping[str, Array]) -> None:
    if _STEPS not in arrays:
        return
    made = int(arrays[_STEPS])
    steps.set_steps(made, made)
    for name, slot in steps.slots().items():
        if name in arrays and arrays[name].shape == slot.shape:
            slot.assign(arrays[name])
        else:
            logger.warning("tfps: the outer momentum of %s is not in the checkpoint, or has another shape", slot.name)
    _note_trained(steps)


def _note_trained(steps: OuterOptimizer) -> None:
    """Notes which variables have been trained before, by the momentum that was restored."""
    steps.note_trained([int(place) for place, slot in steps.slots().items() if slot.offered().any()])


def back_up_outer_state(
    strategy_of: Callable[[Model], tf.distribute.Strategy | None],
    steps_of: Callable[[Optimizer], OuterOptimizer | None],
) -> None:
    """Makes BackupAndRestore have the state.

    Args:
        strategy_of: returns the strategy of a model in these modes, else None.
        steps_of: returns the outer steps of an optimizer.
    """
    callback = keras.callbacks.BackupAndRestore
    original_begin, original_save = callback.on_train_begin, callback._save_model

    def on_train_begin(self: Callback, logs: Logs | None = None) -> None:
        original_begin(self, logs)
        strategy, steps = strategy_of(self.model), steps_of(self.model.optimizer)
        if strategy is None or steps is None:
            return
        found = read(self, _FILE, "the state of the outer optimizer") if strategy.rank == 0 else None
        if found is not None:
            _restore(steps, found)
        with strategy.scope():
            made = tf.Variable(-1 if found is None else steps.steps, dtype=tf.int64, trainable=False, name="steps")
        strategy.extended.take_from_first_rank([made])
        if (count := int(made.numpy())) >= 0:
            steps.set_steps(count, count)
            slots_from_first_rank(list(steps.slots().values()), strategy)
            _note_trained(steps)

    def save_model(self: Callback) -> None:
        original_save(self)
        strategy, steps = strategy_of(self.model), steps_of(self.model.optimizer)
        if strategy is not None and steps is not None and strategy.rank == 0:
            write(self, _FILE, _arrays(steps))

    callback.on_train_begin, callback._save_model = on_train_begin, save_model
