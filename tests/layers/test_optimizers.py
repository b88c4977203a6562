"""How optimizers update tables of rows: which, when, by what, and what they refuse."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf
from dense_tables import embedding, initial, stats
from keras_versions import KERAS_3_8

from tfps.errors import UnsupportedError
from tfps.types import Argument, Array, Layer, Library, Model, Optimizer, Value

L: Library = keras.layers
O: Library = keras.optimizers  # noqa: E741  # as short as L
ROWS, WORDS, BATCH, STEPS = 30, 4, 8, 4
ALL = np.arange(ROWS)
Build = Callable[[], Optimizer]


def data() -> tuple[Array, Array]:
    words = np.random.default_rng(0).integers(0, ROWS, (BATCH * STEPS, WORDS))
    return words, words.sum(1) % 10


def model_of(*tables: Layer) -> Model:
    words = keras.Input((WORDS,), dtype="int64")
    found = [L.Flatten()(table(words)) for table in tables]
    head = L.Dense(10, kernel_initializer=keras.initializers.RandomUniform(seed=7))
    return keras.Model(words, head(L.Concatenate()(found) if len(found) > 1 else found[0]))


def trained(optimizer: Optimizer, *tables: Layer, epochs: int = 1, **options: Argument) -> Model:
    model = model_of(*tables)
    fitted(model, optimizer, epochs=epochs, **options)
    return model


def fitted(model: Model, optimizer: Optimizer, epochs: int = 1, **options: Argument) -> None:
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False, **options)
    model.fit(*data(), batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)


def rows(*tables: Layer) -> list[Array]:
    return [table.read_rows(ALL) for table in tables]


def same(one: list[Array], other: list[Array]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


# Whose optimizer, and how it counts


def test_a_table_with_its_own_optimizer_trains_as_if_it_were_the_models() -> None:
    """With a schedule; the model's has a limit, which tables must not have."""
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    own = O.Adam(decay)
    first, second = embedding(ROWS, optimizer=own), embedding(ROWS)
    model = trained(O.SGD(0.0, global_clipnorm=1.0), first, epochs=2)
    other = model_of(second)
    other.layers[-1].trainable = False
    fitted(other, O.Adam(decay), epochs=2)
    assert same(rows(first), rows(second))
    assert (own.iterations.numpy(), model.optimizer.iterations.numpy()) == (2 * STEPS, 2 * STEPS)


def test_an_optimizer_of_several_tables_or_of_the_model_too_counts_each_step_once() -> None:
    """As Adam's rule depends on the number of the step, each table is as one with its own."""
    shared, alone = O.Adam(0.1), [embedding(ROWS, optimizer=O.Adam(0.1)) for _ in range(3)]
    together = [embedding(ROWS, optimizer=shared), embedding(ROWS, optimizer=shared), embedding(ROWS)]
    trained(O.Adam(0.1), *alone)
    trained(shared, *together)
    assert shared.iterations.numpy() == STEPS
    assert same(rows(*together), rows(*alone))


@pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.long), True])
def test_weight_decay_leaves_alone_what_an_optimizer_excludes(own: bool) -> None:
    """By the name that the variable has in Keras' layer, or the variable itself."""

    def decayed(decay: float, *names: str, variable: bool = False) -> list[Array]:
        optimizer = O.AdamW(0.01, weight_decay=decay)
        layer = embedding(ROWS, **({"optimizer": optimizer} if own else {}))
        model = model_of(layer)
        model.layers[-1].trainable = False
        if names or variable:
            optimizer.exclude_from_weight_decay(layer.weights if variable else None, list(names))
        fitted(model, O.SGD(0.1) if own else optimizer)
        return rows(layer)

    plain = decayed(0.0)
    assert not same(decayed(0.5, "kernel"), plain)
    for found in (decayed(0.5, "embedding"), decayed(0.5, "bias", "embeddings"), decayed(0.5, variable=True)):
        assert same(found, plain)


def test_the_learning_rate_may_change_between_steps() -> None:
    layer, own = embedding(None), O.SGD(0.5)
    layer.optimizer = own
    model, (x, y) = model_of(layer), data()
    model.compile(O.SGD(0.0), "sparse_categorical_crossentropy", jit_compile=False)
    moved = []
    for rate in (0.5, 0.0, 1.0):
        own.learning_rate = rate
        layer.load_rows(ALL, initial(ROWS))
        model.train_on_batch(x, y)
        moved.append(layer.read_rows(ALL) - initial(ROWS))
    assert not moved[1].any()
    np.testing.assert_allclose(moved[2], 2 * moved[0], rtol=0, atol=1e-6)
    assert moved[0].any()


def test_another_optimizer_goes_on_with_the_rows_and_with_slots_of_its_own() -> None:
    layer, reference = embedding(ROWS), embedding(ROWS)
    model = trained(O.Adam(0.1), layer)
    between = rows(layer)
    reference.load_rows(ALL, between[0])
    other = model_of(reference)
    other.layers[-1].set_weights(model.layers[-1].get_weights())
    for each in (model, other):
        fitted(each, O.SGD(0.5, momentum=0.9))
    assert same(rows(layer), rows(reference))
    assert not same(rows(layer), between)


@pytest.mark.skipif(KERAS_3_8, reason="Keras 3.8 has no MultiOptimizer")
def test_a_multi_optimizer_gives_each_variable_its_own() -> None:
    single = [embedding(ROWS, optimizer=O.Adagrad(0.3)), embedding(None, optimizer=O.Adam(0.1))]
    trained(O.SGD(0.1), *single)
    tables = [embedding(ROWS, name="users"), embedding(None, name="items")]
    rules = O.OptimizerMap(O.SGD(0.1), {"users/.*": O.Adagrad(0.3), "items/.*": O.Adam(0.1)})
    model = trained(O.MultiOptimizer(rules), *tables)
    assert same(rows(*tables), rows(*single))
    assert [each.iterations.numpy() for each in model.optimizer.optimizers] == [STEPS] * 3


# Gradients that there are not, or that are scaled


def test_a_table_without_a_gradient_stays_as_it_is() -> None:
    """Its lookups are not a part of the loss; or nothing but a table is."""
    unused, used, head = embedding(ROWS), embedding(ROWS, 10), L.Dense(3)
    for layer in (unused, used):
        layer.build()
    head.build((None, 4))
    variables = [unused._rows, *head.trainable_variables, used._rows]
    optimizer, (x, y) = O.Adam(0.1), data()
    for step in (0, 1):
        with tf.GradientTape() as tape:
            unused(x)
            value = keras.losses.sparse_categorical_crossentropy(y, used(x[:, 0]), from_logits=True)
        optimizer.apply(tape.gradient(value, variables), variables if step == 0 else None)
    assert stats(unused).rows == 0
    assert stats(used).rows == len(np.unique(x[:, 0]))
    assert optimizer.iterations.numpy() == 2
    assert same(rows(unused), [initial(ROWS)])


SCALED: dict[str, Build] = {
    "factor": lambda: O.SGD(0.5, loss_scale_factor=1024.0),
    "dynamic": lambda: O.LossScaleOptimizer(O.SGD(0.5), initial_scale=1024.0, dynamic_growth_steps=3),
}


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.long)], ids=["graph", "eager"])
@pytest.mark.parametrize("name", SCALED)
def test_scaled_gradients_are_divided(name: str, eager: bool) -> None:
    """By powers of two, so that not a bit may differ; also those of a table with its own optimizer."""
    plain, scaled = ([embedding(ROWS), embedding(None, optimizer=O.SGD(0.5))] for _ in range(2))
    trained(O.SGD(0.5), *plain)
    model = trained(SCALED[name](), *scaled, run_eagerly=eager)
    assert same(rows(*scaled), rows(*plain))
    if name == "dynamic":
        assert model.optimizer.dynamic_scale.numpy() == 2048.0


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.long)], ids=["graph", "eager"])
def test_a_step_that_overflows_is_left_out(eager: bool) -> None:
    own = O.SGD(0.5)
    tables = [embedding(ROWS), embedding(None, optimizer=own)]
    optimizer = O.LossScaleOptimizer(O.SGD(0.5), initial_scale=1024.0)
    model, (x, y) = model_of(*tables), data()
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False, run_eagerly=eager)
    weights = np.ones(len(x), "float32")
    model.train_on_batch(x, y, sample_weight=weights)
    before = rows(*tables)
    model.train_on_batch(x, y, sample_weight=weights * np.inf)
    assert same(rows(*tables), before)
    assert (optimizer.dynamic_scale.numpy(), optimizer.iterations.numpy(), own.iterations.numpy()) == (512.0, 1, 1)
    model.train_on_batch(x, y, sample_weight=weights)
    assert not same(rows(*tables), before)
    assert (optimizer.iterations.numpy(), own.iterations.numpy()) == (2, 2)


# What is refused


class Derived(keras.optimizers.SGD):
    pass


def _changed() -> Optimizer:
    optimizer = O.SGD()
    optimizer.update_step = lambda gradient, variable, learning_rate: None
    return optimizer


REFUSED: dict[str, Build] = {
    "Nadam": O.Nadam,
    "Lamb": O.Lamb,
    "Derived": Derived,
    "keras.src.optimizers.sgd.SGD": _changed,
    "clipnorm=1.0": lambda: O.SGD(clipnorm=1.0),
    "global_clipnorm=1.0": lambda: O.SGD(global_clipnorm=1.0),
    "clipvalue=1.0": lambda: O.SGD(clipvalue=1.0),
    "use_ema=True": lambda: O.SGD(use_ema=True),
    "gradient_accumulation_steps=2": lambda: O.SGD(gradient_accumulation_steps=2),
    "learning_rate_power=-0.5": lambda: O.Ftrl(learning_rate_power=-0.7),
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_without_a_rule_by_row_are_refused_as_the_tables_own_at_once(name: str) -> None:
    with pytest.raises(UnsupportedError) as found:
        embedding(ROWS, optimizer=REFUSED[name]()).build()
    assert name in str(found.value)


def test_they_are_refused_as_the_models_before_anything_is_updated() -> None:
    """In steps that run eagerly, after a table that has its own."""
    first, second = embedding(None, optimizer=O.SGD(0.5)), embedding(None)
    model, (x, y) = model_of(first, second), data()
    before = model.layers[-1].get_weights()
    for optimizer in (O.Nadam(), O.SGD(clipnorm=1.0)):
        with tf.GradientTape() as tape:
            value = keras.losses.sparse_categorical_crossentropy(y, model(x))
        with pytest.raises(UnsupportedError, match="give the layer an optimizer of its own"):
            optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        assert same([*rows(first, second), *model.layers[-1].get_weights()], [initial(ROWS)] * 2 + before)
        with pytest.raises(UnsupportedError, match="give the layer an optimizer of its own"):
            fitted(model, type(optimizer).from_config(optimizer.get_config()))


def test_moving_averages_of_a_model_with_tables_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"'adam\w*' keeps moving averages of variables \(use_ema\).*'\w+/rows'"):
        trained(O.Adam(use_ema=True), embedding(ROWS, optimizer="sgd"))


def test_gradients_of_tables_may_be_clipped_by_the_program() -> None:
    """Their norm is that of the rows of the batch."""
    layer, (x, y) = embedding(ROWS), data()
    model, optimizer = model_of(layer), O.SGD(1.0)

    @tf.function
    def step() -> Value:
        with tf.GradientTape() as tape:
            value = keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
        gradients, norm = tf.clip_by_global_norm(tape.gradient(value, model.trainable_variables), 0.1)
        optimizer.apply(gradients, model.trainable_variables)
        return norm

    before = [*rows(layer), *model.layers[-1].get_weights()]
    assert step() > 1.0
    after = [*rows(layer), *model.layers[-1].get_weights()]
    moved = np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(after, before, strict=True)))
    assert moved == pytest.approx(0.1, rel=1e-3)
