"""The state of a training changes with everything in it, and another rank's is refused by name."""

from __future__ import annotations

import re
import types
import weakref

import keras
import numpy as np

import tfps
from tfps.keras_hooks.training_state import Snapshot, TrainingState, found_by, keyed, note_begun, set_found
from tfps.types import Array, Callback, Model


def built(strategy: tfps.Strategy, units: int = 3) -> Model:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(units, name="first"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
        model = keras.Sequential([keras.Input((2,)), *layers])
        model.compile(keras.optimizers.Adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def state_of(strategy: tfps.Strategy, model: Model, *others: Model) -> TrainingState:
    """As with several workers, who have agreed on the variables of all the models."""
    variables = [each.value for made in (*others, model) for each in (*made.variables, *made.optimizer.variables)]
    strategy.extended.initial_values.agreed = list(map(weakref.ref, variables))
    return TrainingState(strategy, types.SimpleNamespace(model=model, callbacks=[]))


def test_the_digest_changes_with_each_variable_that_the_strategy_has_created(strategy: tfps.Strategy) -> None:
    other, model = built(strategy, 4), built(strategy)
    state = state_of(strategy, model, other)
    before = state.digest()
    assert (state.digest() == before).all()
    created = {id(each.value) for made in (other, model) for each in (*made.variables, *made.optimizer.variables)}
    assert {id(each) for each in state.variables} == created - {id(each.value) for each in model.metrics_variables}
    for place, variable in enumerate(state.variables):
        variable.assign(variable.numpy() + 1)
        assert np.flatnonzero(state.digest() != before).tolist() == list(range(place + 1)), variable.name


def test_a_difference_is_named(strategy: tfps.Strategy) -> None:
    state = state_of(strategy, built(strategy))
    own = state.inventory()
    assert not state.difference(own, own)
    less = dict(list(own.items())[-3:])  # what some rank has not any more
    assert not state.difference(own, less)
    number = next(number for number, text in own.items() if "first/kernel" in text)
    theirs = {**own, number: own[number].replace("(2, 3)", "(2, 4)")}
    assert re.search(
        r"other variables .*first/kernel:0 \(2, 3\) float32' where .*\(2, 4\)", state.difference(theirs, own)
    )
    slower = {**own, "settings": own["settings"].replace("0.9,", "0.8,")}
    assert state.difference(slower, own) == "its optimizer differs from the others': beta_1 is 0.9, not 0.8"
    later = {**own, "1000": "later (1,) float32"}
    assert "created later (1,) float32 in this training" in state.difference(later, own)


def test_a_snapshot_arrives_with_its_numbers_and_arrays() -> None:
    arrays: dict[str, Array] = {
        "0/best_weights/0": np.arange(3, dtype=np.float16),
        "remote/1": np.zeros((0, 2), np.int8),
    }
    found = Snapshot.unpacked(Snapshot({"best": 0.5, "order": (3, (1, 2), None)}, arrays).packed())
    assert found.plain == {"best": 0.5, "order": [3, [1, 2], None]}
    assert {name: (each.dtype, each.shape, each.tobytes()) for name, each in found.arrays.items()} == {
        name: (each.dtype, each.shape, each.tobytes()) for name, each in arrays.items()
    }


def test_what_callbacks_have_found_goes_on_and_settings_stay() -> None:
    def made(min_delta: float) -> list[Callback]:
        plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=min_delta)
        return [plateau, keras.callbacks.EarlyStopping("loss", patience=9, mode="min", restore_best_weights=True)]

    x = np.ones((8, 4), np.float32)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ours, theirs = made(1.0), made(1.0)
    begun = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: note_begun(theirs))
    model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[*theirs, begun])
    arrays: dict[str, Array] = {}
    found = {key: found_by(key, each, arrays) for key, each in keyed(theirs)}
    snapshot = Snapshot.unpacked(Snapshot({"callbacks": found}, arrays).packed())
    for key, each in keyed(ours):
        each.set_model(model)
        each.on_train_begin()
        assert set_found(key, each, snapshot.plain["callbacks"][key], snapshot)
    (plateau, stopping), (its, stopped) = ours, theirs
    assert (plateau.wait, plateau.best, plateau.min_delta) == (its.wait, its.best, 1.0)  # Keras turns its sign later
    assert (stopping.best, stopping.best_epoch) == (stopped.best, 1)
    assert [each.tobytes() for each in stopping.best_weights] == [each.tobytes() for each in stopped.best_weights]


def test_a_history_of_metrics_that_are_vectors_goes_on() -> None:
    theirs, ours = keras.callbacks.History(), keras.callbacks.History()
    note_begun([theirs])
    theirs.history, theirs.epoch = {"loss": [0.5], "f1_score": [np.array([0.25, np.nan], np.float32)]}, [0]
    found = Snapshot.unpacked(Snapshot({"callbacks": found_by("", theirs, {})}, {}).packed()).plain["callbacks"]
    assert set_found("", ours, found, Snapshot({}, {}))
    assert (ours.history["loss"], ours.epoch) == ([0.5], [0])
    (vector,) = ours.history["f1_score"]
    assert vector.dtype == np.float32
    assert vector.tobytes() == theirs.history["f1_score"][0].tobytes()
