"""One worker ends with the bits that plain Keras ends with, whatever the program uses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf
import training

import tfps
from tfps.types import Argument, Options, Value

OPTIMIZERS = sorted(
    name
    for name, value in vars(keras.optimizers).items()
    if isinstance(value, type)
    and issubclass(value, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
)
# A statistic, and a sparse gradient.
TELLING = (training.batch_normalization, training.embedding_sparse)


def optimizer(name: str, **options: Argument) -> Callable[[], keras.optimizers.Optimizer]:
    return lambda: getattr(keras.optimizers, name)(**options)


# Those that do something of their own: ScheduleFreeAdamW copies first
# values, Adafactor's slots have other shapes. Others update all slots item by item, or are in tests below.
QUICK = (("SGD", True), ("ScheduleFreeAdamW", False), ("Adafactor", False))


@pytest.mark.parametrize(
    ("name", "eager"),
    [
        pytest.param(
            *(name, eager),
            marks=() if (name, eager) in QUICK else pytest.mark.long,
            id=f"{'eager' if eager else 'graph'}-{name}",
        )
        for name in OPTIMIZERS
        for eager in (False, True)
    ],
)
def test_every_optimizer_ends_bitwise_equal_to_plain_keras(strategy: tfps.Strategy, name: str, eager: bool) -> None:
    options: Options = {"run_eagerly": eager, "epochs": 1 if eager else 2, "jit_compile": False}
    assert training.train(strategy, optimizer(name), **options) == training.train(None, optimizer(name), **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.long
def test_every_optimizer_updates_kernels_of_rank_3_bitwise_as_plain_keras(strategy: tfps.Strategy, name: str) -> None:
    # Muon scales by products of constants, which TensorFlow folds only in functions that have a result.
    distributed = training.train(strategy, optimizer(name), training.attention)
    assert distributed == training.train(None, optimizer(name), training.attention)


class UsesSlots(keras.Sequential):
    """Reads and writes a slot before its update, behind it, and in a function that may run at either time."""

    def train_step(self, data: Value) -> dict[str, Value]:
        x, y = data
        slot = next(each for each in self.optimizer.variables if each.shape == (4, 3))
        total = tf.function(lambda: tf.reduce_sum(slot.value))
        read, large = {"before": total()}, tf.fill((900, 900), tf.reduce_mean(x))
        one = tf.sign(1 + tf.reduce_max(tf.linalg.matmul(large, large)) ** 2)
        slot.assign(slot.value + one)  # long after gradients could have left
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables))
        read |= {"behind": tf.reduce_sum(slot.value), "within": total()}
        slot.assign(slot.value * 0.5)
        return {**read, "last": total()}


@pytest.mark.parametrize("steps", [1, 3])
def test_a_step_that_uses_slots_itself_ends_bitwise_equal_to_plain_keras(strategy: tfps.Strategy, steps: int) -> None:
    x, y = np.random.default_rng(1).normal(size=(24, 4)), np.ones((24, 2))

    def ends(strategy: tfps.Strategy | None) -> list[bytes]:
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = UsesSlots([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
            model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False, steps_per_execution=steps)
            model.optimizer.build(model.trainable_variables)
        history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        values = [*history.values(), *(each.numpy() for each in [*model.variables, *model.optimizer.variables])]
        return [np.asarray(each).tobytes() for each in values]

    assert ends(strategy) == ends(None)


MOMENTUM: dict[str, Argument] = {"learning_rate": 0.05, "momentum": 0.9}
THROUGH_PSERVERS: dict[str, dict[str, Argument]] = {
    "SGD": {},
    "Adam": {"global_clipnorm": 10.0},
    "Nadam": {},
    "Adafactor": {},
}
QUICK_THROUGH_PSERVERS = (("Adam", training.batch_normalization), ("Adam", training.embedding_sparse))


@pytest.mark.parametrize(
    ("name", "options", "build"),
    [
        pytest.param("SGD", MOMENTUM, training.mlp, id="SGD-momentum-mlp", marks=pytest.mark.long),
        *(
            pytest.param(
                *(name, options, build),
                marks=() if (name, build) in QUICK_THROUGH_PSERVERS else pytest.mark.long,
                id=f"{name}-{build.__name__}",
            )
            for name, options in THROUGH_PSERVERS.items()
            for build in (training.mlp, training.embedding_sparse, training.batch_normalization)
        ),
    ],
)
def test_training_through_pservers_ends_bitwise_equal_to_plain_keras(
    remote: tfps.Strategy, name: str, options: dict[str, Argument], build: training.Build
) -> None:
    build_optimizer = optimizer(name, **options)
    distributed = training.train(remote, build_optimizer, build, jit_compile=False)
    assert distributed == training.train(None, build_optimizer, build, jit_compile=False)


OPTIONS: dict[str, dict[str, Argument]] = {
    "clipnorm": {"clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.01},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "weight_decay": {"weight_decay": 0.01},
    "ema": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3},
    "accumulation": {"gradient_accumulation_steps": 3},
    "several": {
        "gradient_accumulation_steps": 2,
        "global_clipnorm": 0.1,
        "weight_decay": 0.01,
        "learning_rate": keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5),
    },
}


@pytest.fixture
def as_written() -> Iterator[None]:
    """TensorFlow computes products in the order in which the program has them."""
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    yield
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": True})


# Those that join things with one optimizer with slots and one without, all at once with the unusual ones.
OF_OPTIONS = {
    "SGD": ["accumulation"],
    "Adam": ["several"],
}
COMBINATIONS = [
    pytest.param(name, options, marks=() if options in OF_OPTIONS.get(name, ()) else pytest.mark.long)
    for name in OPTIMIZERS
    for options in OPTIONS
]


@pytest.mark.parametrize(("name", "options"), COMBINATIONS)
def test_optimizer_options_end_bitwise_equal_to_plain_keras(
    request: pytest.FixtureRequest, strategy: tfps.Strategy, name: str, options: str
) -> None:
    if name == "SGD" and options in ("global_clipnorm", "accumulation", "several"):
        # Where (gradient * scale) * learning_rate stands in one graph TensorFlow turns it into gradient * (scale *
        # learning_rate); here the sum over workers lies between the two products.
        request.getfixturevalue("as_written")
    build = optimizer(name, **OPTIONS[options])
    assert training.train(strategy, build) == training.train(None, build)


@pytest.mark.long  # a schedule is among the several options above
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_learning_rate_schedule_is_read_as_of_the_step(strategy: tfps.Strategy, name: str) -> None:
    build = optimizer(name, learning_rate=keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5))
    assert training.train(strategy, build) == training.train(None, build)


@pytest.mark.parametrize("name", ["SGD", *(pytest.param(name, marks=pytest.mark.long) for name in ("Adam", "Nadam"))])
def test_constraints_apply_after_the_update(strategy: tfps.Strategy, name: str) -> None:
    def constrained() -> Value:
        return training.mlp(kernel_constraint=keras.constraints.MaxNorm(0.5), bias_constraint="non_neg")

    assert training.train(strategy, optimizer(name), constrained) == training.train(None, optimizer(name), constrained)


# Optimizer, eager or not, and the models that are quick; others are long.
IN_GRAPHS = (*TELLING, training.normalized_shared_layer)
KINDS = (("SGD", False, ()), ("SGD", True, ()), ("Adam", False, IN_GRAPHS), ("Adam", True, TELLING))


@pytest.mark.parametrize(
    ("name", "eager", "build"),
    [
        pytest.param(
            *(name, eager, build),
            marks=() if build in few else pytest.mark.long,
            id=f"{'eager' if eager else 'graph'}-{name}-{build.__name__}",
        )
        for name, eager, few in KINDS
        for build in training.MODELS
    ],
)
def test_every_kind_of_model_ends_bitwise_equal_to_plain_keras(
    strategy: tfps.Strategy, name: str, eager: bool, build: training.Build
) -> None:
    options: Options = {"run_eagerly": eager, "epochs": 1 if eager else 2, "jit_compile": False}
    distributed = training.train(strategy, optimizer(name), build, **options)
    assert distributed == training.train(None, optimizer(name), build, **options)


def shuffled() -> list[bytes]:
    model, x, y = training.mlp()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(tf.data.Dataset.from_tensor_slices((x, y)).shuffle(320, seed=1).batch(64), epochs=2, verbose=0)
    return [weight.tobytes() for weight in model.get_weights()]


@pytest.mark.parametrize("depth", ["0", "2"])
def test_a_shuffled_dataset_has_the_order_of_plain_keras(depth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFPS_STAGING_DEPTH", depth)
    keras.utils.set_random_seed(1)
    plain = shuffled()
    keras.utils.set_random_seed(1)
    own = tfps.Strategy()
    with own.scope():
        assert shuffled() == plain
    own.close()


def nesterov(strategy: tf.distribute.Strategy | None, steps: int) -> list[bytes]:
    build = optimizer("SGD", learning_rate=0.05, momentum=0.9, nesterov=True)
    return training.train(strategy, build, training.normalized_shared_layer, steps_per_execution=steps)


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_gradient_that_is_a_product_differs_from_plain_keras_by_the_order_of_its_factors_alone(
    strategy: tfps.Strategy, request: pytest.FixtureRequest, steps: int
) -> None:
    # Batch normalization's scale has such a gradient, and momentum adds its product with the learning rate.
    for mine, plain in zip(nesterov(strategy, steps), nesterov(None, steps), strict=True):
        if mine != plain:
            values, expected = (np.frombuffer(each, np.float32) for each in (mine, plain))
            np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
    request.getfixturevalue("as_written")
    assert nesterov(strategy, steps) == nesterov(None, steps)


def several_steps(strategy: tf.distribute.Strategy | None, build: training.Build, name: str = "SGD") -> list[bytes]:
    return training.train(
        strategy, optimizer(name, learning_rate=0.01), build, steps_per_execution=5, jit_compile=False
    )


@pytest.mark.parametrize(
    ("name", "build"),
    [
        pytest.param(
            *(name, build),
            marks=() if name == "Adam" and build is training.batch_normalization else pytest.mark.long,
            id=f"{name}-{build.__name__}",
        )
        for name in ("SGD", "Adam")
        for build in (training.mlp, *training.MODELS)
    ],
)
def test_several_steps_per_execution_end_bitwise_equal_to_plain_keras(
    strategy: tfps.Strategy, name: str, build: training.Build
) -> None:
    assert several_steps(strategy, build, name) == several_steps(None, build, name)


@pytest.mark.long
def test_without_staging_several_steps_end_as_under_tensorflows_strategies_which_forget_the_size_of_a_batch() -> None:
    # TensorFlow's distributed iterator has batches of unknown size in `get_next_as_optional`, which is what the loop
    # over steps takes. Grappler then cannot fold the divisions of batch normalization by that size into constants. It
    # depends on the processor whether that shows: on some plain Keras ends with other bits, on others with the same.
    unstaged = tfps.Strategy(config=tfps.Config(staging_depth=0))
    one_device = tf.distribute.OneDeviceStrategy("CPU:0")
    for build in (training.mlp, training.batch_normalization):
        assert several_steps(unstaged, build) == several_steps(one_device, build)
    tf.config.optimizer.set_experimental_options({"constant_folding": False})
    try:
        expected = several_steps(None, training.batch_normalization)
        assert several_steps(unstaged, training.batch_normalization) == expected
    finally:
        tf.config.optimizer.set_experimental_options({"constant_folding": True})
    unstaged.close()
