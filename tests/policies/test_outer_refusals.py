"""Modes "local" and "diloco": what would end with wrong weights is refused by name, and what would not is not."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import local_training
import numpy as np
import pytest
import tensorflow as tf
from local_training import Settings, Start, dataset, difference, starting

import tfps
from tfps.errors import UnsupportedError
from tfps.types import Argument, Logs, Model, Variable

DILOCO, LOCAL = Settings(), Settings("local")
both_modes = pytest.mark.parametrize("settings", [DILOCO, LOCAL], ids=["diloco", "local"])


@pytest.fixture
def start() -> Iterator[Start]:
    with starting() as started:
        # What is within the process is not compressed.
        yield lambda settings: started(settings, pservers=int(settings.compression != "none"))


def compiled(strategy: tfps.Strategy, optimizer: Argument = "plain", **options: Argument) -> Model:
    return local_training.compiled(strategy, optimizer, **options)


def fit(model: Model, steps: int = 6, **options: Argument) -> None:
    model.fit(dataset(0, steps, 1), shuffle=False, verbose=0, **options)


def freeze_first_layer(model: Model, optimizer: Argument) -> None:
    model.layers[0].trainable = False
    model.compile(optimizer, local_training.loss(), jit_compile=False)


# Variables that steps update no more.


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        pytest.param(DILOCO, "the outer momentum would move it on", id="momentum", marks=pytest.mark.long),
        pytest.param(
            Settings("local", compression="topk:0.05"), "the residual of compression would move it on", id="topk"
        ),
    ],
)
def test_freezing_a_variable_that_exchanges_would_move_on_is_refused(
    start: Start, settings: Settings, why: str
) -> None:
    model = compiled(start(settings))
    fit(model)
    freeze_first_layer(model, model.optimizer)
    frozen = model.layers[0].kernel.numpy()
    with pytest.raises(UnsupportedError, match=rf"'.*kernel' has no gradient in this step of SGD, .* {why}; to freeze"):
        fit(model)
    assert model.layers[0].kernel.numpy().tobytes() == frozen.tobytes()


def test_an_eager_step_is_refused_before_it_updates_anything(start: Start) -> None:
    model = compiled(start(DILOCO), run_eagerly=True)
    fit(model)
    freeze_first_layer(model, model.optimizer)
    model.run_eagerly, before = True, model.get_weights()
    with pytest.raises(UnsupportedError, match="has no gradient in this step of SGD"):
        fit(model)
    assert difference(model.get_weights(), before) == 0.0


@pytest.mark.parametrize(
    ("settings", "new"),
    [
        pytest.param(DILOCO, True, id="new optimizer"),
        pytest.param(LOCAL, False, id="no momentum, no codec", marks=pytest.mark.long),
    ],
)
def test_a_frozen_layer_stays_as_it_is_while_others_are_trained(start: Start, settings: Settings, new: bool) -> None:
    model = compiled(start(settings))
    fit(model)
    freeze_first_layer(model, keras.optimizers.SGD(0.1) if new else model.optimizer)
    before = model.get_weights()
    fit(model)
    assert difference(model.get_weights()[:2], before[:2]) == 0.0
    assert difference(model.get_weights()[2:], before[2:]) > 1e-3


def test_a_variable_that_no_step_has_updated_yet_may_stay_without_gradient(start: Start) -> None:
    model = compiled(start(DILOCO))
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    freeze_first_layer(model, model.optimizer)
    before = model.get_weights()
    fit(model)
    assert difference(model.get_weights()[:2], before[:2]) == 0.0
    model.layers[0].trainable = True
    model.compile(model.optimizer, local_training.loss(), jit_compile=False)
    fit(model)
    assert difference(model.get_weights()[:2], before[:2]) > 1e-3


def test_a_variable_that_was_trained_before_a_checkpoint_is_known_after_restoring(start: Start, tmp_path: Path) -> None:
    model = compiled(start(DILOCO))
    fit(model)
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "checkpoint"))
    other = compiled(start(DILOCO))
    with other.distribute_strategy.scope():
        other.optimizer.build(other.trainable_variables)
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(str(tmp_path / "checkpoint"))
    freeze_first_layer(other, other.optimizer)
    with pytest.raises(UnsupportedError, match="has no gradient in this step of SGD"):
        fit(other)


# Optimizers and variables.


@both_modes
def test_constraints_are_refused(start: Start, settings: Settings) -> None:
    strategy = start(settings)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64, kernel_constraint="non_neg")])
        model.compile("sgd", local_training.loss(), jit_compile=False)
    with pytest.raises(UnsupportedError, match=f"mode='{settings.mode}': variable '.*kernel' has a constraint"):
        fit(model, 1)


FREE = getattr(keras.optimizers, "ScheduleFreeAdamW", None)  # not in all versions of Keras


@both_modes
@pytest.mark.parametrize("kind", [keras.optimizers.Ftrl, *([FREE] if FREE else [])])
def test_optimizers_that_compute_weights_from_slots_are_refused(
    start: Start, settings: Settings, kind: Argument
) -> None:
    model = compiled(start(settings), kind(0.1))
    with pytest.raises(
        UnsupportedError, match=f"{kind.__name__} with mode='{settings.mode}': it computes weights anew"
    ):
        fit(model, 1)


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer")
@both_modes
def test_an_optimizer_of_several_is_refused(start: Start, settings: Settings) -> None:
    kernels = {".*kernel": keras.optimizers.SGD(0.1)}
    several = keras.optimizers.OptimizerMap(keras.optimizers.Adam(), kernels)
    model = compiled(start(settings), keras.optimizers.MultiOptimizer(several))
    with pytest.raises(UnsupportedError, match=f"MultiOptimizer with mode='{settings.mode}': backups and checkpoints"):
        fit(model, 1)


class Uncounted(keras.optimizers.SGD):
    """Does not call Keras' `apply`."""

    def apply(self, grads: Sequence[tf.Tensor], trainable_variables: Sequence[Variable] | None = None) -> None:
        if not self.built:
            self.build(trainable_variables)
        for gradient, variable in zip(grads, trainable_variables or self._trainable_variables, strict=True):
            self.update_step(gradient, variable, self.learning_rate)


@both_modes
def test_training_that_exchanges_nothing_fails_by_name_where_workers_meet(start: Start, settings: Settings) -> None:
    strategy = start(settings)
    model = compiled(strategy, Uncounted(0.1))
    text = (
        f"mode='{settings.mode}': variable '.*kernel' has been trained, but no call .* of its optimizer, Uncounted, was"
    )
    with pytest.raises(UnsupportedError, match=text):
        fit(model)
    assert isinstance(strategy.extended.exchange.failure, UnsupportedError)  # other workers end, too


def test_steps_of_an_optimizer_that_is_gone_are_no_reason_to_fail(start: Start) -> None:
    def stop(batch: int, logs: Logs) -> None:
        raise KeyboardInterrupt

    model = compiled(start(DILOCO))
    with pytest.raises(KeyboardInterrupt):
        fit(model, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=stop)])
    first = weakref.ref(model.optimizer)
    model.compile(keras.optimizers.SGD(0.1), local_training.loss(), jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    gc.collect()
    assert first() is None
    assert np.isfinite(model.evaluate(dataset(0, 2, 1), verbose=0))


def test_an_optimizer_that_a_program_does_not_use_is_no_reason_to_fail(start: Start) -> None:
    class WithItsOwn(keras.Model):
        def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            variables = self.trainable_variables
            own.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    strategy = start(DILOCO)
    with strategy.scope():
        plain = local_training.model()
        model, own = WithItsOwn(plain.inputs, plain.outputs), keras.optimizers.SGD(0.1)
        model.compile("rmsprop", local_training.loss(), jit_compile=False)
        model.optimizer.build(model.trainable_variables)
    before = model.get_weights()
    fit(model)
    assert difference(model.get_weights(), before) > 1e-3
    assert np.isfinite(model.evaluate(dataset(0, 2, 1), verbose=0))
