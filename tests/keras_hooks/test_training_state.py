"""The state of a training changes with everything in it, and another rank's is refused by name."""

from __future__ import annotations

import types

import keras
import numpy as np
import pytest

import tfps
from tfps.errors import MismatchError
from tfps.keras_hooks.training_state import Snapshot, TrainingState
from tfps.types import Model


def built(strategy: tfps.Strategy, units: int = 3) -> Model:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(units, name="first"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
        model = keras.Sequential([keras.Input((2,)), *layers])
        model.compile(keras.optimizers.Adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def state_of(strategy: tfps.Strategy, model: Model) -> TrainingState:
    return TrainingState(strategy, types.SimpleNamespace(model=model, callbacks=[]))


def test_the_digest_changes_with_each_variable_of_model_and_optimizer(strategy: tfps.Strategy) -> None:
    model = built(strategy)
    state = state_of(strategy, model)
    before = state.digest()
    assert state.digest() == before
    trained = {id(each.value) for each in (*model.variables, *model.optimizer.variables)}
    assert {id(each) for each in state.variables} == trained - {id(each.value) for each in model.metrics_variables}
    for place, variable in enumerate(state.variables):
        variable.assign(variable.numpy() + 1)
        changed = state.digest()
        assert changed[0] == before[0]
        assert [own != theirs for own, theirs in zip(changed[1], before[1], strict=True)] == [
            number <= place for number in range(len(before[1]))
        ], variable.name


def test_who_joins_with_other_variables_or_values_is_told_the_first_that_differs(strategy: tfps.Strategy) -> None:
    state = state_of(strategy, built(strategy))
    theirs = Snapshot(state.digest(), {}, {})
    state.check_names(theirs)
    state.check(theirs)
    state.variables[0].assign(state.variables[0].numpy() + 1)
    with pytest.raises(MismatchError, match=r"values of the others, but those of 'sequential_1/first/kernel:0 \(2, 3\) float32'"):
        state.check(theirs)
    other = state_of(strategy, built(strategy, 4))
    with pytest.raises(MismatchError, match=r"differ are '.*\(2, 4\) float32' here and '.*\(2, 3\) float32' there"):
        other.check_names(theirs)


def test_a_snapshot_arrives_with_its_numbers_and_arrays() -> None:
    arrays = {"0/best_weights/0": np.arange(3, dtype=np.float16), "remote/1": np.zeros((0, 2), np.int8)}
    sent = Snapshot((["w (1,) float32"], [-1]), {"best": np.float32(0.5), "order": (3, (1, 2), None)}, arrays)
    found = Snapshot.unpacked(sent.packed())
    assert found.plain == {"best": 0.5, "order": [3, [1, 2], None]}
    assert list(map(list, found.digest)) == [["w (1,) float32"], [-1]]
    assert {name: (each.dtype, each.shape, each.tobytes()) for name, each in found.arrays.items()} == {
        name: (each.dtype, each.shape, each.tobytes()) for name, each in arrays.items()
    }
