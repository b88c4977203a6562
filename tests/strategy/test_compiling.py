"""What is compiled or created outside of the scope works as under plain Keras, where the model was made in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf
import training

import tfps
from tfps.types import Options, Value

Adam, SGD = keras.optimizers.Adam, keras.optimizers.SGD
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "name": lambda: "adam",
    "instance": lambda: Adam(1e-3),
    "average": lambda: SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "loss scaling": lambda: keras.optimizers.LossScaleOptimizer(Adam(1e-3)),
}


def fine_tuned(
    strategy: tfps.Strategy | None, optimizer: Callable[[], keras.optimizers.Optimizer]
) -> tuple[list[bytes], list[Value]]:
    """Frozen, compiled outside of the scope, unfrozen, compiled again; weights and what `fit` reports."""
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model, x, y = training.mlp()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    options: Options = {"batch_size": 64, "shuffle": False, "verbose": 0}
    reported = [model.fit(x, y, **options).history]
    for trainable in (False, True):
        model.layers[0].trainable = trainable
        metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3, name="top")]
        model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=metrics)
        if strategy is None:
            model.optimizer.build(model.trainable_variables)  # as under any strategy, see training.train
        reported.append(model.fit(x, y, validation_data=(x, y), **options).history)
    variables = [*model.weights, *model.optimizer.variables]
    return [np.asarray(variable.numpy()).tobytes() for variable in variables], reported


@pytest.mark.parametrize(
    "name", ["instance", *(pytest.param(name, marks=pytest.mark.long) for name in ("name", "average", "loss scaling"))]
)
def test_a_model_compiled_again_outside_of_the_scope_trains_as_in_plain_keras(
    strategy: tfps.Strategy, name: str
) -> None:
    assert fine_tuned(strategy, OPTIMIZERS[name]) == fine_tuned(None, OPTIMIZERS[name])


@pytest.mark.parametrize(
    ("name", "update"),
    [pytest.param("Nadam", "worker", marks=pytest.mark.long), ("ScheduleFreeAdamW", "worker"), ("Adam", "server")],
)
def test_an_optimizer_may_be_built_outside_of_the_scope(
    name: str, update: Literal["worker", "server"], caplog: pytest.LogCaptureFixture
) -> None:
    kind = getattr(keras.optimizers, name, None)
    if kind is None:
        pytest.skip(f"this Keras has no {name}")
    weights = []
    with contextlib.closing(tfps.Strategy(config=tfps.Config(update=update))) as strategy:
        for each in (strategy, None):
            keras.utils.set_random_seed(1)
            with each.scope() if each else contextlib.nullcontext():
                model, x, y = training.mlp()
            model.compile(kind(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            model.optimizer.build(model.trainable_variables)
            model.fit(x, y, batch_size=64, shuffle=False, verbose=0)
            weights.append([np.asarray(variable.numpy()) for variable in model.weights])
    for own, plain in zip(*weights, strict=True):
        np.testing.assert_allclose(own, plain, rtol=0, atol=1e-6 if update == "server" else 0)
    assert "runs inside the step" not in caplog.text


def test_a_loop_may_use_an_optimizer_made_outside_of_the_scope(strategy: tfps.Strategy) -> None:
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
    optimizer = SGD(0.5, momentum=0.5)
    step = tf.function(lambda: strategy.run(lambda: optimizer.apply([tf.ones([2])], [variable])), autograph=False)
    step()
    optimizer.learning_rate = 1.0
    step()
    np.testing.assert_array_equal(variable.numpy(), [1.0 - 0.5 - 1.25, 2.0 - 0.5 - 1.25])
    assert optimizer.iterations.numpy() == 2


def test_a_metric_that_has_counted_keeps_its_value_when_it_is_compiled(strategy: tfps.Strategy) -> None:
    metric = keras.metrics.Mean()
    metric.update_state([1.0, 3.0])
    with strategy.scope():
        model, _, _ = training.mlp()
    model.compile("sgd", "mse", metrics=[metric])
    assert float(metric.result()) == 2.0


def test_an_optimizer_that_has_trained_other_variables_is_refused(strategy: tfps.Strategy) -> None:
    optimizer = SGD(0.5, momentum=0.5)
    optimizer.build([keras.Variable([1.0])])
    with strategy.scope():
        model, x, y = training.mlp()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises((RuntimeError, ValueError, KeyError, tfps.UnsupportedError)):
        model.fit(x, y, verbose=0)


def test_a_loaded_model_is_compiled_as_it_was_saved(strategy: tfps.Strategy, tmp_path: Path) -> None:
    with strategy.scope():
        model, x, y = training.mlp()
    model.compile(Adam(0.25), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert float(loaded.optimizer.learning_rate.numpy()) == 0.25
    assert loaded.evaluate(x, y, verbose=0) == model.evaluate(x, y, verbose=0)


def stepped(strategy: tfps.Strategy | None, name: str) -> tuple[list[str], list[bytes]]:
    """A loop outside of the scope and of `run`, as without a strategy; paths and bits of the optimizer's variables."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model, x, y = training.mlp()
        optimizer = OPTIMIZERS[name]()
    for _ in range(3):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y[:64], model(x[:64]), from_logits=True)
            loss = optimizer.scale_loss(tf.reduce_mean(losses))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    variables = [*optimizer.variables, *model.weights]
    return [v.path for v in variables], [np.asarray(v.numpy()).tobytes() for v in variables]


@pytest.mark.parametrize(
    "name", [*(pytest.param(each, marks=pytest.mark.long) for each in ("instance", "average")), "loss scaling"]
)
def test_a_loop_outside_of_run_steps_as_in_plain_keras(strategy: tfps.Strategy, name: str) -> None:
    assert stepped(strategy, name) == stepped(None, name)
