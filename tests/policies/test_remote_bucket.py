"""Update on the server ends where plain Keras ends: rules, options, assignments, saving; else it is refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf
import training
from _pytest.mark import ParameterSet
from keras_versions import KERAS_3_8

import tfps
from tfps.errors import UnsupportedError
from tfps.keras_hooks.variables import RemoteVariable
from tfps.pserver.server import ParameterServer
from tfps.types import Argument, Array, Model, Options

SERVER = tfps.Config(update="server", slice_bytes=4096, window_bytes=16384)
Build = Callable[[], keras.optimizers.Optimizer]


@pytest.fixture(params=[pytest.param("embedded", marks=pytest.mark.long), "pservers"])
def served(request: pytest.FixtureRequest) -> Iterator[tfps.Strategy]:
    """One worker; parameters live in the process, or on two pservers in many slices."""
    servers = [ParameterServer("127.0.0.1", 0, workers=1) for _ in range(2 * (request.param == "pservers"))]
    strategy = tfps.Strategy([server.address for server in servers] or None, config=SERVER)
    yield strategy
    strategy.close()
    for server in servers:
        server.stop()


@pytest.fixture
def here() -> Iterator[tfps.Strategy]:
    strategy = tfps.Strategy(config=SERVER)
    yield strategy
    strategy.close()


def optimizer(name: str, **options: Argument) -> Build:
    return lambda: getattr(keras.optimizers, name)(**options)


SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)
# Rules and options in which NumPy's and TensorFlow's kernels agree on every bit.
BITWISE: dict[str, Build] = {
    "SGD": optimizer("SGD"),
    "SGD momentum": optimizer("SGD", momentum=0.9),
    "SGD Nesterov": optimizer("SGD", momentum=0.9, nesterov=True),
    "Adam": optimizer("Adam"),
    "AMSGrad": optimizer("Adam", amsgrad=True),
    "AdamW": optimizer("AdamW"),
    "Adamax": optimizer("Adamax"),
    "Nadam": optimizer("Nadam"),
    "Lion": optimizer("Lion"),
    "Ftrl": optimizer("Ftrl", learning_rate=0.01),
    "Ftrl with all": optimizer(
        "Ftrl",
        learning_rate=0.01,
        l1_regularization_strength=1e-3,
        l2_regularization_strength=1e-3,
        l2_shrinkage_regularization_strength=1e-3,
        beta=0.1,
    ),
    "schedule": optimizer("Adam", learning_rate=SCHEDULE),
    "clipvalue": optimizer("Adam", clipvalue=0.01),
    "clipnorm": optimizer("Adam", clipnorm=0.1),
    "global_clipnorm": optimizer("Adam", global_clipnorm=0.1),
    "weight decay": optimizer("Adam", weight_decay=0.01),
    "average": optimizer("Adam", use_ema=True, ema_momentum=0.9),
    "average that overwrites": optimizer("Adam", use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
    "accumulation": optimizer("Adam", gradient_accumulation_steps=3),
    "loss scale": optimizer("Adam", loss_scale_factor=1024.0),
    "loss scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=2.0**14),
    "several": optimizer(
        "AdamW", learning_rate=SCHEDULE, global_clipnorm=0.1, weight_decay=0.01, gradient_accumulation_steps=2
    ),
}
# TensorFlow divides by a root by multiplying with its own reciprocal root.
CLOSE: dict[str, Build] = {
    "RMSprop": optimizer("RMSprop"),
    "RMSprop centered": optimizer("RMSprop", centered=True, momentum=0.9),
    "Adagrad": optimizer("Adagrad", learning_rate=0.01),
    "Adadelta": optimizer("Adadelta", learning_rate=1.0),
}


# Those that a quick one has within it, here or in test_remote_options.py.
LONG = {
    *("SGD", "SGD momentum", "Nadam", "Lion", "Ftrl", "schedule", "global_clipnorm", "weight decay"),
    *("average", "average that overwrites", "loss scale", "RMSprop", "accumulation", "clipnorm", "Adagrad", "Adamax"),
    *("Adam", "AdamW", "SGD Nesterov", "clipvalue", "RMSprop centered", "loss scaling", "AMSGrad"),
}


def cases(builds: dict[str, Build]) -> list[ParameterSet]:
    """Names of those that this Keras has slots of as it should."""
    newer = pytest.mark.skipif(KERAS_3_8, reason="Keras 3.8 creates these slots without naming their variable")
    marks = {
        name: [newer] * name.startswith(("Ftrl", "Adagrad")) + [pytest.mark.long] * (name in LONG) for name in builds
    }
    return [pytest.param(name, marks=marks[name]) for name in builds]


@pytest.mark.parametrize("name", cases(BITWISE))
def test_these_rules_end_bitwise_equal_to_plain_keras(here: tfps.Strategy, name: str) -> None:
    assert training.train(here, BITWISE[name]) == training.train(None, BITWISE[name])


@pytest.mark.parametrize("name", cases(CLOSE))
def test_weights_of_the_others_are_within_a_millionth_after_50_steps(here: tfps.Strategy, name: str) -> None:
    options: Options = {"epochs": 10}  # of 5 steps
    ends, expected = (training.train(each, CLOSE[name], **options) for each in (here, None))
    assert len(ends) == len(expected)
    for mine, plain in zip(ends[:6], expected[:6], strict=True):  # the weights
        one, other = (np.frombuffer(each, np.float32) for each in (mine, plain))
        assert np.abs(one - other).max() <= 1e-6 * np.abs(other).max(), name


@pytest.mark.parametrize(
    "build",
    [
        training.batch_normalization,
        *(pytest.param(each, marks=pytest.mark.long) for each in (training.embedding_dense, training.lstm)),
    ],
)
def test_models_with_statistics_loops_and_dense_embeddings_end_bitwise_equal(
    served: tfps.Strategy, build: training.Build
) -> None:
    assert training.train(served, BITWISE["Adam"], build) == training.train(None, BITWISE["Adam"], build)


@pytest.mark.parametrize(
    "name", ["SGD Nesterov", *(pytest.param(name, marks=pytest.mark.long) for name in ("SGD", "Lion"))]
)
def test_sparse_gradients_travel_densely(here: tfps.Strategy, name: str) -> None:
    ends = training.train(here, BITWISE[name], training.embedding_sparse)
    expected = training.train(None, BITWISE[name], training.embedding_sparse)
    for mine, plain in zip(ends[:3], expected[:3], strict=True):  # rows that occur twice are added in another order
        one, other = (np.frombuffer(each, np.float32) for each in (mine, plain))
        assert np.abs(one - other).max() <= 2e-6 * np.abs(other).max()


def test_sparse_gradients_whose_rows_a_rule_squares_are_refused(here: tfps.Strategy) -> None:
    with pytest.raises(UnsupportedError, match=r"'.*embeddings.*' has a sparse gradient .* use update='worker'"):
        training.train(here, BITWISE["Adam"], training.embedding_sparse)


def test_sparse_gradients_of_a_lookup_that_takes_each_id_once_are_not_refused(here: tfps.Strategy) -> None:
    ends, expected = (training.train(each, BITWISE["Adam"], training.embedding_unique) for each in (here, None))
    for mine, plain in zip(ends[:3], expected[:3], strict=True):
        one, other = (np.frombuffer(each, np.float32) for each in (mine, plain))
        assert np.abs(one - other).max() <= 2e-6 * np.abs(other).max()


@pytest.mark.long
@pytest.mark.parametrize("name", ["several", "Adam", "average that overwrites"])
def test_eager_steps_and_several_per_execution_end_bitwise_equal(served: tfps.Strategy, name: str) -> None:
    for options in ({"run_eagerly": True, "epochs": 1}, {"steps_per_execution": 3}):
        settings: Options = {"jit_compile": False, **options}
        assert training.train(served, BITWISE[name], **settings) == training.train(None, BITWISE[name], **settings)


def test_slots_are_on_pservers_and_look_as_always(served: tfps.Strategy) -> None:
    model, x, y = compiled(served, optimizer("Adam"))
    plain = keras.optimizers.Adam()
    plain.build(training.mlp()[0].trainable_variables)
    slots = model.optimizer.variables[2:]
    assert [slot.name.rpartition("_")[2] for slot in slots] == [
        each.name.rpartition("_")[2] for each in plain.variables[2:]
    ]
    assert all(isinstance(slot, RemoteVariable) for slot in slots)
    assert not any(isinstance(vars(slot).get("_value"), tf.Variable) for slot in slots)
    assert not any(slot.numpy().any() for slot in slots)
    model.fit(x, y, batch_size=64, verbose=0)
    assert all(slot.numpy().any() for slot in slots)
    assert slots[0].value.shape == slots[0].shape


def compiled(strategy: tf.distribute.Strategy | None, build: Build, seed: int = 1) -> tuple[Model, Array, Array]:
    keras.utils.set_random_seed(seed)
    with strategy.scope() if strategy else tf.device(None):
        model, x, y = training.mlp()
        model.compile(build(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.optimizer.build(model.trainable_variables)
    return model, x, y


def ends(model: Model) -> list[bytes]:
    return [np.asarray(each.numpy()).tobytes() for each in [*model.weights, *model.optimizer.variables]]


def assigned(strategy: tf.distribute.Strategy | None) -> list[bytes]:
    """Trains, and between fits assigns weights, slots, and a learning rate in several ways."""
    model, x, y = compiled(strategy, optimizer("Adam"))
    fit: Options = {"batch_size": 64, "verbose": 0, "shuffle": False}
    model.fit(x, y, **fit)
    model.layers[0].kernel.assign(model.layers[0].kernel * 2.0)
    model.optimizer.variables[3].assign(np.full(model.optimizer.variables[3].shape, 0.25, np.float32))
    model.fit(x, y, **fit)
    model.set_weights([weight * 0.5 for weight in model.get_weights()])
    model.optimizer.learning_rate = 0.02
    model.fit(x, y, **fit)
    model.layers[1].bias.assign_add(np.ones(32, np.float32))
    model.optimizer.set_weights([each.numpy() for each in model.optimizer.variables])
    model.fit(x, y, **fit)
    return ends(model)


def test_what_the_program_assigns_between_steps_counts(served: tfps.Strategy) -> None:
    assert assigned(served) == assigned(None)


def in_turn(strategy: tf.distribute.Strategy | None) -> list[bytes]:
    """Several optimizers, other sets of variables, other settings: state moves with the variables."""
    model, x, y = compiled(strategy, optimizer("Adam"))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fit: Options = {"batch_size": 64, "verbose": 0, "shuffle": False}
    model.fit(x, y, **fit)
    first = model.optimizer
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
    model.fit(x, y, **fit)
    model.layers[0].trainable = False
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
    model.fit(x, y, **fit)
    model.layers[0].trainable = True
    first.beta_1 = 0.8
    model.compile(first, loss)
    model.fit(x, y, **fit)
    return ends(model)


@pytest.mark.long
def test_optimizers_in_turn_and_frozen_layers_end_bitwise_equal(served: tfps.Strategy) -> None:
    assert in_turn(served) == in_turn(None)


def files(strategy: tf.distribute.Strategy | None, folder: Path) -> list[bytes]:
    """Saves in every way, goes on from each, and ends with all that came out."""
    found: list[bytes] = []
    fit: Options = {"batch_size": 64, "verbose": 0, "shuffle": False}
    model, x, y = compiled(strategy, optimizer("Adam"))
    model.fit(x, y, **fit)
    model.save(folder / "model.keras")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(str(folder / "checkpoint"))
    model.fit(x, y, **fit)
    found += ends(model)
    checkpoint.restore(path).assert_consumed()
    model.fit(x, y, **fit)
    assert ends(model) == found
    with strategy.scope() if strategy else tf.device(None):
        loaded = keras.models.load_model(folder / "model.keras")
    loaded.fit(x, y, **fit)
    assert ends(loaded) == found
    other, _, _ = compiled(strategy, optimizer("Adam"), seed=5)
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path).assert_existing_objects_matched()
    other.fit(x, y, **fit)
    assert ends(other)[:6] == found[:6]
    return found


@pytest.mark.long
def test_saving_collects_and_restoring_puts_back(served: tfps.Strategy, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "served").mkdir()
    assert files(served, tmp_path / "served") == files(None, tmp_path / "plain")


@pytest.mark.long
def test_a_model_goes_on_with_another_number_of_pservers(tmp_path: Path) -> None:
    def steps(pservers: int, epochs: int, load: Path | None = None) -> tuple[list[bytes], Path]:
        servers = [ParameterServer("127.0.0.1", 0, workers=1) for _ in range(pservers)]
        strategy = tfps.Strategy([server.address for server in servers] or None, config=SERVER)
        try:
            model, x, y = compiled(strategy, optimizer("AdamW"))
            if load is not None:
                with strategy.scope():
                    model = keras.models.load_model(load)
            model.fit(x, y, epochs=epochs, batch_size=64, verbose=0, shuffle=False)
            model.save(path := tmp_path / f"{pservers}.keras")
            return ends(model), path
        finally:
            strategy.close()
            for server in servers:
                server.stop()

    whole, _ = steps(1, 3)
    _, path = steps(2, 1)
    _, path = steps(3, 1, path)
    assert steps(0, 1, path)[0] == whole


def own_loop(strategy: tf.distribute.Strategy | None) -> list[bytes]:
    """A training loop with `optimizer.apply`, in a function."""
    model, x, y = compiled(strategy, optimizer("SGD", learning_rate=0.1, momentum=0.9))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(images: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            value = loss(labels, model(images))
        model.optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

    @tf.function
    def run(images: tf.Tensor, labels: tf.Tensor) -> None:
        if strategy is None:
            step(images, labels)
        else:
            strategy.run(step, (images, labels))

    for begin in range(0, 320, 64):
        run(tf.constant(x[begin : begin + 64]), tf.constant(y[begin : begin + 64]))
    return ends(model)


def test_a_loop_of_ones_own_ends_bitwise_equal(served: tfps.Strategy) -> None:
    assert own_loop(served) == own_loop(None)


def swapped(strategy: tf.distribute.Strategy | None) -> list[Array]:
    """Evaluates averages after each epoch."""
    model, x, y = compiled(strategy, optimizer("SGD", learning_rate=0.1, use_ema=True, ema_momentum=0.5))
    fit = model.fit(
        *(x, y, 64, 3, 0),
        callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
        validation_data=(x, y),
        shuffle=False,
    )
    return [np.array(fit.history["val_loss"]), *(weight.numpy() for weight in model.weights)]


def test_averages_are_swapped_for_evaluation(served: tfps.Strategy) -> None:
    for mine, plain in zip(swapped(served), swapped(None), strict=True):  # Keras swaps by adding, which rounds
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6)


class Mine(keras.optimizers.SGD):
    """Does something else, maybe."""


REFUSED: dict[str, tuple[Build, str]] = {
    **({"Muon": (optimizer("Muon"), "not of keras.*Muon")} if hasattr(keras.optimizers, "Muon") else {}),
    "Lamb": (optimizer("Lamb"), "not of keras.*Lamb"),
    "Adafactor": (optimizer("Adafactor"), "not of keras.*Adafactor"),
    "Ftrl with another power": (optimizer("Ftrl", learning_rate_power=-0.4), "with learning_rate_power=-0.5"),
    "derived": (lambda: Mine(), r"not of .*\.Mine"),
    "average and accumulation": (
        optimizer("Adam", use_ema=True, gradient_accumulation_steps=2),
        "does not go with both use_ema and gradient_accumulation_steps",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_pservers_cannot_be_are_refused_when_they_are_built(here: tfps.Strategy, name: str) -> None:
    build, message = REFUSED[name]
    model, _, _ = training.compiled(here, build())
    with pytest.raises(UnsupportedError, match=f"{message}.*use update='worker'"):
        model.optimizer.build(model.trainable_variables)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "has dtype float16, and pservers update float32"),
        ({"kernel_constraint": keras.constraints.MaxNorm(0.5)}, "has a constraint"),
    ],
)
def test_variables_that_pservers_cannot_update_are_refused(
    here: tfps.Strategy, options: dict[str, Argument], message: str
) -> None:
    with here.scope():
        model, _, _ = training.mlp(**options)
        model.compile("sgd", "mse")
    with pytest.raises(UnsupportedError, match=f"variable '.*/kernel' {message}.*use update='worker'"):
        model.optimizer.build(model.trainable_variables)


class Assigns(keras.layers.Layer):
    """Assigns its weight in each forward pass."""

    def build(self, shape: Argument) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, inputs: Argument) -> Argument:
        self.scale.assign(self.scale * 0.5)
        return inputs * self.scale


def test_a_function_that_assigns_what_pservers_hold_is_refused(here: tfps.Strategy) -> None:
    with here.scope():
        model = keras.Sequential([keras.layers.Input((4,)), Assigns()])
        model.compile("sgd", "mse")
    with pytest.raises(UnsupportedError, match=r"variable '.*scale.*' is assigned within a function"):
        model.fit(np.ones((8, 4)), np.ones((8, 4)), verbose=0)


def test_slots_are_not_for_functions(here: tfps.Strategy) -> None:
    model, x, y = training.compiled(here)
    model.fit(x, y, batch_size=64, verbose=0)
    slot = model.optimizer.variables[2]
    with pytest.raises(UnsupportedError, match=r"slot .* is read within a function"):
        tf.function(lambda: slot.value + 1, autograph=False)()
    with pytest.raises(UnsupportedError, match=r"slot .* is assigned within a function"):
        tf.function(lambda: slot.assign(tf.zeros(slot.shape)), autograph=False)()


def test_gradients_are_applied_in_replica_functions_only(here: tfps.Strategy) -> None:
    model, _, _ = compiled(here, optimizer("SGD"))
    zeros = [tf.zeros(each.shape) for each in model.trainable_variables]
    with pytest.raises(UnsupportedError, match=r"within strategy\.run"):
        model.optimizer.apply(zeros, model.trainable_variables)
