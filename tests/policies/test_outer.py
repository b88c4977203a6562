"""Modes "local" and "diloco" with one worker: what is exchanged when, evaluated, saved, restored, refused."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import local_training
import numpy as np
import pytest
import tensorflow as tf
from keras.saving import save_model  # before the first strategy is made, as programs do
from local_training import (
    ROWS,
    Settings,
    Simulation,
    Start,
    Weights,
    compiled,
    dataset,
    difference,
    rows,
    starting,
)

import tfps
from tfps.errors import ConfigError, UnsupportedError
from tfps.policies import global_values
from tfps.types import Argument, Logs, Model

OVERLAPPING = Settings("diloco", fragments=2, overlap_steps=2, own_share=0.25)


@pytest.fixture
def start() -> Iterator[Start]:
    with starting() as started:
        yield started


def trajectory(model: Model, steps: int, **options: Argument) -> list[Weights]:
    """Trains; returns the worker's own weights after each step."""
    own: list[Weights] = []
    keep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: own.append(model.get_weights()))
    model.fit(dataset(0, steps, 1), callbacks=[keep], shuffle=False, verbose=0, **options)
    return own


def simulated(model: Model, settings: Settings, steps: int) -> Simulation:
    simulation = Simulation(model.get_weights(), settings, [steps])
    for worker in simulation.workers:
        worker.model.run_eagerly = model.run_eagerly  # TensorFlow fuses ops in graphs only
    simulation.run()
    return simulation


def check(own: Sequence[Weights], expected: Sequence[Weights]) -> None:
    assert [difference(mine, other) for mine, other in zip(own, expected, strict=True)] == [0.0] * len(own)


long = pytest.mark.long
CASES = [
    pytest.param(Settings(), id="diloco", marks=long),
    pytest.param(Settings("diloco", optimizer="adam", fragments=2), id="diloco in fragments", marks=long),
    pytest.param(Settings("local", optimizer="adam", overlap_steps=1), id="local"),
    pytest.param(OVERLAPPING, id="streaming"),
]


@pytest.mark.parametrize("settings", CASES)
def test_one_worker_does_bitwise_what_is_done_by_hand(start: Start, settings: Settings) -> None:
    model = compiled(start(settings, pservers=2), settings.optimizer)
    simulation = simulated(model, settings, 11)
    check(trajectory(model, 11), simulation.trajectory[0])
    assert difference(model.get_weights(), simulation.shared) == 0.0


COMPRESSED = [
    pytest.param(Settings(compression="int8"), id="int8"),
    pytest.param(Settings("local", optimizer="adam", compression="topk:0.05"), id="topk", marks=long),
    pytest.param(replace(OVERLAPPING, compression="onebit"), id="onebit, streaming", marks=long),
    pytest.param(Settings(compression="bfloat16"), id="bfloat16", marks=long),
]


@pytest.mark.parametrize("settings", COMPRESSED)
def test_compressed_changes_come_late_but_are_not_lost_bitwise_as_by_hand(start: Start, settings: Settings) -> None:
    strategy = start(settings, pservers=2)
    model = compiled(strategy, settings.optimizer)
    simulation = simulated(model, settings, 11)
    check(trajectory(model, 11), simulation.trajectory[0])
    assert difference(model.get_weights(), simulation.shared) == 0.0
    variables, kernels = [each.value for each in model.trainable_variables], (0, 2, 4)
    ahead, held = strategy.extended.compressing.ahead(variables), strategy.extended.compressing.residuals(variables)
    assert set(ahead) == set(kernels)
    assert set(held) == (set() if settings.compression == "bfloat16" else set(kernels))
    for place in kernels:
        assert ahead[place].exact.tobytes() == simulation.exact[place].tobytes()
        assert place not in held or held[place].tobytes() == simulation.held[0][place].tobytes()


@pytest.mark.long
@pytest.mark.parametrize("options", [{"steps_per_execution": 3}, {"run_eagerly": True}], ids=["several", "eager"])
def test_eager_steps_and_several_per_execution_do_the_same(start: Start, options: dict[str, Argument]) -> None:
    model = compiled(start(OVERLAPPING), **options)
    simulation = simulated(model, OVERLAPPING, 9)
    trajectory(model, 9)
    assert difference(model.get_weights(), simulation.shared) == 0.0


def test_a_step_that_loss_scaling_skips_counts_as_a_step(start: Start) -> None:
    strategy = start(Settings())
    model = compiled(strategy, keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    x, y = rows(0, 4)
    x[ROWS : 2 * ROWS] = np.inf
    own: list[Weights] = []
    keep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: own.append(model.get_weights()))
    model.fit(x, y, batch_size=ROWS, shuffle=False, callbacks=[keep], verbose=0)
    assert int(model.optimizer.inner_optimizer.iterations.numpy()) == 3
    assert difference(own[1], own[0]) == 0.0
    assert strategy.extended.policy._exchanged()[0].steps == 4
    assert difference(own[-1], shared(model)) == 0.0  # exchanged with the last step, not only at the end


@long
def test_accumulated_gradients_count_each_batch(start: Start) -> None:
    strategy = start(Settings("local"))
    model = compiled(strategy, keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    initial = model.get_weights()
    own = trajectory(model, 5)
    assert difference(own[0], initial) == 0.0
    assert strategy.extended.policy._exchanged()[0].steps == 8  # the round of 5 steps was ended


# Global parameters.


def between(strategy: tfps.Strategy) -> Model:
    """A model two steps after an exchange: own and global parameters differ."""
    model = compiled(strategy)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        strategy.run(lambda x, y: train_step(model, x, y), args=(x, y))

    for x, y in strategy.experimental_distribute_dataset(dataset(0, 6, 1)):
        step(x, y)
    return model


def train_step(model: Model, x: tf.Tensor, y: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True))
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


def shared(model: Model) -> Weights:
    return [each.value.global_copy.numpy() for each in model.trainable_variables]


def test_early_stopping_keeps_the_global_parameters_which_were_evaluated(start: Start) -> None:
    model = compiled(start(Settings()))
    kept: list[tuple[Weights, Weights]] = []

    class Stopping(keras.callbacks.EarlyStopping):
        def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            super().on_epoch_end(epoch, logs)
            kept.append((self.best_weights, shared(model)))

    x, y = rows(0, 3)  # within the first round of 4 steps
    stopping = Stopping(monitor="loss", restore_best_weights=True)
    model.fit(x, y, batch_size=len(x) // 3, epochs=1, verbose=0, callbacks=[stopping])
    assert difference(*kept[0]) == 0.0


def test_evaluation_prediction_and_files_have_the_global_parameters(start: Start, tmp_path: Path) -> None:
    model = between(start(Settings()))
    own, expected = model.get_weights(), shared(model)
    assert difference(own, expected) > 1e-3
    x, y = rows(0, 4)
    plain = local_training.model()
    plain.set_weights(expected)
    plain.compile(loss=local_training.loss())
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0), rtol=1e-6)
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(model.test_on_batch(x, y), plain.test_on_batch(x, y), rtol=1e-6)
    np.testing.assert_allclose(model.predict_on_batch(x), plain.predict_on_batch(x), rtol=1e-4, atol=1e-6)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    tf.train.Checkpoint(model=model).write(str(tmp_path / "checkpoint"))
    model.export(tmp_path / "exported", verbose=False)
    keras.models.save_model(model, tmp_path / "function.keras")
    save_model(model, tmp_path / "imported.keras")
    save_model(model, tmp_path / "legacy.h5")
    save_model(model, tmp_path / "folder", zipped=False)
    keras.saving.save_weights(model, tmp_path / "function.weights.h5")
    assert difference(pickle.loads(pickle.dumps(model)).get_weights(), expected) == 0.0
    assert difference(model.get_weights(), own) == 0.0  # it goes on with its own
    for name in ("model.keras", "function.keras", "imported.keras", "legacy.h5", "folder"):
        assert difference(keras.models.load_model(tmp_path / name).get_weights(), expected) == 0.0, name
    for name in ("model.weights.h5", "function.weights.h5"):
        plain.load_weights(tmp_path / name)
        assert difference(plain.get_weights(), expected) == 0.0, name
    read = tf.train.load_checkpoint(str(tmp_path / "checkpoint"))
    kernels = [read.get_tensor(name) for name, shape in read.get_variable_to_shape_map().items() if shape == [64, 64]]
    for kernel in expected[::2]:
        assert any(kernel.tobytes() == each.tobytes() for each in kernels)
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    np.testing.assert_allclose(exported.serve(x), plain.predict(x, verbose=0), rtol=1e-4, atol=1e-6)


@long
def test_a_worker_has_its_own_parameters_again_after_an_error(start: Start) -> None:
    model = between(start(Settings()))
    own = model.get_weights()

    def stop(batch: int, logs: Logs) -> None:
        raise RuntimeError("stopped")

    x, y = rows(0, 4)
    with pytest.raises(RuntimeError, match="stopped"):
        model.evaluate(x, y, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_test_batch_end=stop)])
    assert difference(model.get_weights(), own) == 0.0


@long
def test_a_worker_has_its_own_parameters_again_where_they_come_back_and_the_user_interrupts(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = start(Settings())
    model = between(strategy)
    own, assign, calls = model.get_weights(), global_values._assign, itertools.count()

    def interrupted(*arguments: Argument) -> None:
        assign(*arguments)
        if next(calls) == len(own) + 1:  # one variable has its own value again
            raise KeyboardInterrupt

    monkeypatch.setattr(global_values, "_assign", interrupted)
    with pytest.raises(KeyboardInterrupt), strategy.extended.policy.global_parameters():
        assert difference(model.get_weights(), own) > 0
    assert difference(model.get_weights(), own) == 0.0
    assert not strategy.extended.policy._global_values.used


@pytest.mark.parametrize(
    "settings", [pytest.param(Settings(), id="waits", marks=long), pytest.param(OVERLAPPING, id="overlaps")]
)
def test_synchronizing_ends_the_round(start: Start, settings: Settings) -> None:
    strategy = start(settings)
    model = between(strategy)
    strategy.synchronize()
    assert difference(model.get_weights(), shared(model)) == 0.0
    keras.utils.set_random_seed(1)
    simulation = Simulation(local_training.model().get_weights(), settings, [6])
    simulation.run()
    assert difference(model.get_weights(), simulation.shared) == 0.0
    strategy.synchronize()  # again: nothing to do
    assert difference(model.get_weights(), simulation.shared) == 0.0


def test_what_is_assigned_is_what_all_workers_go_on_from(start: Start) -> None:
    model = between(start(Settings()))
    given = [np.full_like(each, 0.25) for each in model.get_weights()]
    model.set_weights(given)
    assert difference(shared(model), given) == 0.0
    with model.distribute_strategy.extended.policy.global_parameters():
        model.layers[0].bias.assign(np.zeros(64, np.float32))
    assert not model.layers[0].bias.numpy().any()
    assert not shared(model)[1].any()


# Saved and restored.


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(replace(OVERLAPPING, compression="int8"), id="int8, streaming", marks=long),
        *(pytest.param(settings, marks=long) for settings in (Settings(), OVERLAPPING, Settings(compression="int8"))),
        *COMPRESSED[1:],
    ],
)
def test_a_restored_checkpoint_goes_on_as_the_saved_training_does_with_other_pservers(
    start: Start, settings: Settings, tmp_path: Path
) -> None:
    strategy = start(settings, pservers=2)
    model = compiled(strategy, "adam")
    trajectory(model, 10)  # which ends the round
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "checkpoint"))
    on = trajectory(model, 10)
    other = compiled(start(settings, pservers=3), "adam")
    with other.distribute_strategy.scope():
        other.optimizer.build(other.trainable_variables)
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(str(tmp_path / "checkpoint")).assert_consumed()
    check(trajectory(other, 10), on)
    assert difference(other.get_weights(), model.get_weights()) == 0.0


@long
def test_a_checkpoint_in_a_round_keeps_the_position(start: Start, tmp_path: Path) -> None:
    strategy = start(Settings())
    model = between(strategy)
    expected = shared(model)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    checkpoint.write(str(tmp_path / "checkpoint"))
    strategy.synchronize()
    checkpoint.read(str(tmp_path / "checkpoint"))
    assert strategy.extended.policy._exchanged()[0].steps == 6
    assert difference(model.get_weights(), expected) == 0.0
    assert difference(shared(model), expected) == 0.0


def test_a_backup_goes_on_as_if_nothing_had_happened(start: Start, tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(epoch: int, logs: Logs) -> None:
        if epoch == 2:
            raise Stopped

    def fit(model: Model, *callbacks: keras.callbacks.Callback) -> Weights:
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
        model.fit(dataset(0, 4, 1), epochs=4, shuffle=False, callbacks=[backup, *callbacks], verbose=0)
        return list(model.get_weights())

    settings = Settings(inner_steps=4)
    with pytest.raises(Stopped):
        fit(compiled(start(settings, pservers=1), "adam"), keras.callbacks.LambdaCallback(on_epoch_begin=stop))
    resumed = fit(compiled(start(settings, pservers=2), "adam"))
    whole = compiled(start(settings), "adam")
    whole.fit(dataset(0, 4, 1), epochs=4, verbose=0)
    assert difference(resumed, whole.get_weights()) == 0.0


# Refused.


def test_what_cannot_work_is_refused_by_name(start: Start) -> None:
    strategy = start(Settings())
    with pytest.raises(UnsupportedError, match="use_ema with mode='diloco' would average each worker's own"):
        trajectory(compiled(strategy, keras.optimizers.SGD(use_ema=True)), 1)
    with strategy.scope():
        wide = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64, dtype="float64")])
        wide.compile("sgd", local_training.loss())
    with pytest.raises(UnsupportedError, match=r"mode='diloco': variable '.*kernel' has dtype float64"):
        wide.fit(dataset(0, 1, 1), verbose=0)
    model = compiled(strategy)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    with pytest.raises(UnsupportedError, match="gradients must be applied in a replica function"):
        model.optimizer.apply([tf.zeros(each.shape) for each in model.trainable_variables])
    with pytest.raises(ConfigError, match=r"fragments must be at most the number of variables .* 6, got 7"):
        trajectory(compiled(start(Settings(inner_steps=8, fragments=7))), 1)


def test_rows_are_those_of_one_batch() -> None:
    assert [len(x) for x, _ in dataset(0, 3, 1)] == [ROWS] * 3
