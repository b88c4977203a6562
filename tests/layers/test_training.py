"""How tables of rows train in one process, by itself and with strategies: beside Keras' layer, dense tables, NumPy.

tests/integration/test_tables.py has several workers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf
from dense_tables import (
    BATCH,
    DIM,
    ROWS,
    WORDS,
    DenseTable,
    check,
    data,
    embedding,
    initial,
    loss,
    model_of,
    stats,
    trained,
)

import tfps
from tfps.errors import UnsupportedError
from tfps.types import Argument, Array, Layer, Library, Model, Optimizer, Structure, Value

L: Library = keras.layers
LARGEST = np.iinfo(np.int64)
Build = Callable[[], Optimizer]


def marked(names: Iterable[str], *quick: str) -> list[object]:
    """Parameters, of which others than the `quick` ones are long."""
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.long]) for name in names]


# Training


RULES: dict[str, Build] = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.7), amsgrad=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1, l1_regularization_strength=1e-3, beta=0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01),
    "RMSprop centered": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "Adamax": lambda: keras.optimizers.Adamax(0.1),
    "Adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "Lion": lambda: keras.optimizers.Lion(0.01),
}
# TensorFlow divides by a root by multiplying with its own reciprocal root.
CLOSE = ("Adagrad", "RMSprop", "RMSprop centered", "Adadelta")
QUICK = ("SGD", "Adam")


@pytest.mark.parametrize("name", marked(RULES, *QUICK))
def test_rows_that_are_each_once_in_every_batch_train_bitwise_as_keras_does(name: str) -> None:
    random = np.random.default_rng(0)
    x = np.concatenate([random.permutation(BATCH * WORDS).reshape(BATCH, WORDS) for _ in range(4)])
    y, count = x.sum(1) % 10, BATCH * WORDS
    reference = L.Embedding(count, DIM, weights=initial(count))
    layers = [embedding(count), embedding(None)][: 1 if name in QUICK[1:] else 2]
    (expected, *models) = [trained(each, RULES[name](), x, y)[0] for each in (reference, *layers)]
    moved = (reference.get_weights()[0] != initial(count)).any(1)
    assert moved.all() or (name == "Lion" and moved.mean() > 0.9)  # its steps, all of one size, may take a row back
    for layer, model in zip(layers, models, strict=True):
        found = [layer.read_rows(np.arange(count)), *model.layers[-1].get_weights()]
        for mine, its in zip(found, [*reference.get_weights(), *expected.layers[-1].get_weights()], strict=True):
            np.testing.assert_allclose(mine, its, rtol=0, atol=1e-6 if name in CLOSE else 0)


def test_ids_that_come_several_times_train_as_a_dense_table_does() -> None:
    for optimizer in (lambda: keras.optimizers.SGD(0.5), lambda: keras.optimizers.Adagrad(0.2)):
        reference = DenseTable(ROWS)
        losses = trained(reference, optimizer(), *data())[1]
        for rows in (ROWS, None):
            layer = embedding(rows)
            assert trained(layer, optimizer(), *data())[1] == pytest.approx(losses, abs=1e-5)
            check(layer, reference)


def test_rows_that_are_not_in_a_batch_stay_as_they_are() -> None:
    """With an optimizer that would move them: its rule is a lazy one."""
    layer, x, y = embedding(ROWS), *data(BATCH)
    trained(layer, keras.optimizers.Adam(0.1), x, y, epochs=1)
    once = layer.read_rows(np.arange(ROWS))
    model = model_of(layer)
    model.compile(keras.optimizers.Adam(0.1), loss(), jit_compile=False)
    model.train_on_batch(np.full_like(x, 3), y)
    moved = np.flatnonzero((layer.read_rows(np.arange(ROWS)) != once).any(1))
    assert moved.tolist() == [3]


STEPS: dict[str, Argument] = {"several": {"steps_per_execution": 3}, "eager": {"run_eagerly": True}}


@pytest.mark.parametrize("name", STEPS)
def test_however_steps_are_run_they_do_the_same(name: str) -> None:
    reference, layer = DenseTable(ROWS), embedding(ROWS)
    trained(reference, keras.optimizers.SGD(0.5), *data())
    trained(layer, keras.optimizers.SGD(0.5), *data(), **STEPS[name])
    check(layer, reference)


Loop = Callable[[Model, Optimizer, Array, Array], object]


def _step(model: Model, optimizer: Optimizer, *, names: bool = True) -> Callable[[Value, Value], Value]:
    def step(x: Value, y: Value) -> Value:
        with tf.GradientTape() as tape:
            value = loss()(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        if names:
            optimizer.apply(gradients, model.trainable_variables)
        else:
            optimizer.apply(gradients)
        return value

    return step


def _batches(x: Array, y: Array) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat(2)


def _by_function(model: Model, optimizer: Optimizer, x: Array, y: Array) -> None:
    step = tf.function(_step(model, optimizer), reduce_retracing=True)
    for batch in _batches(x, y):
        step(*batch)


def _eagerly(model: Model, optimizer: Optimizer, x: Array, y: Array) -> None:
    step = _step(model, optimizer)
    for batch in _batches(x, y):
        step(*batch)


def _without_names(model: Model, optimizer: Optimizer, x: Array, y: Array) -> None:
    optimizer.build(model.trainable_variables)
    step = tf.function(_step(model, optimizer, names=False), reduce_retracing=True)
    for batch in _batches(x, y):
        step(*batch)


def _mixed(model: Model, optimizer: Optimizer, x: Array, y: Array) -> None:
    """Eagerly and in functions by turns; at first with names, then without."""
    steps = [_step(model, optimizer), tf.function(_step(model, optimizer, names=False), reduce_retracing=True)]
    for number, batch in enumerate(_batches(x, y)):
        steps[number % 2](*batch)


def _in_one_function(model: Model, optimizer: Optimizer, x: Array, y: Array) -> None:
    step, batches = _step(model, optimizer), _batches(x, y)
    optimizer.build(model.trainable_variables)

    @tf.function
    def train() -> None:
        for batch in batches:
            step(*batch)

    train()


def _looked_up_within(model: Model, optimizer: Optimizer, x: Array, y: Array) -> None:
    """In a function of its own, a column at a time."""
    layer, _, head = model.layers

    @tf.function(reduce_retracing=True)
    def called(x: Value) -> Value:
        return head(tf.concat([layer(x[:, word]) for word in range(WORDS)], 1))

    class Called:
        trainable_variables = model.trainable_variables

        def __call__(self, x: Value, training: bool) -> Value:
            return called(x)

    _by_function(Called(), optimizer, x, y)


LOOPS: dict[str, Loop] = {
    each.__name__.strip("_"): each
    for each in (_by_function, _eagerly, _without_names, _mixed, _in_one_function, _looked_up_within)
}


@pytest.mark.parametrize("name", marked(LOOPS, "mixed", "in_one_function", "looked_up_within"))
def test_loops_of_ones_own_train_as_fit_does(name: str) -> None:
    reference, layer = DenseTable(ROWS), embedding(None)
    trained(reference, keras.optimizers.Adagrad(0.2), *data())
    optimizer = keras.optimizers.Adagrad(0.2)
    LOOPS[name](model_of(layer), optimizer, *data())
    check(layer, reference)
    assert optimizer.iterations.numpy() == 10


def test_a_branch_that_is_not_taken_updates_no_row() -> None:
    """TensorFlow makes a gradient of zeros for the first row of what it takes for the variable."""
    layer, optimizer = embedding(None), keras.optimizers.Adam(0.1)
    layer.build()
    optimizer.build(layer.trainable_variables)

    @tf.function
    def step(looks: Value, ids: Value) -> None:
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(tf.cond(looks, lambda: tf.reduce_sum(layer(ids)), lambda: 0.0))
        optimizer.apply(tape.gradient(value, layer.trainable_variables), layer.trainable_variables)

    for looks, ids, made in ((False, [0, 1], 0), (True, [LARGEST.min, 0], 2), (False, [5, 6], 2)):
        before = layer.read_rows([0])
        step(tf.constant(looks), tf.constant(ids, tf.int64))
        assert stats(layer).rows == made
        assert (layer.read_rows([0]) != before).all() == looks


@pytest.mark.parametrize("name", marked(["map", "rnn", "recomputed", "loss"], "rnn"))
def test_gradients_without_ids_are_refused_with_what_to_do(name: str) -> None:
    layer, (x, y) = embedding(ROWS, 10, name="users"), data()
    layer.build()

    class Cell(keras.layers.Layer):
        state_size = 10

        def call(self, inputs: Value, states: Sequence[Value]) -> Structure:
            found = layer(inputs[:, 0]) + states[0]
            return found, [found]

    lookups: dict[str, Callable[[Value], Value]] = {
        "map": lambda ids: tf.map_fn(layer, ids[:, :1], fn_output_signature=tf.float32)[:, 0],
        "rnn": lambda ids: L.RNN(Cell())(ids[..., None]),
        "recomputed": tf.recompute_grad(lambda ids: layer(ids[:, 0])),
        "loss": lambda ids: layer(ids[:, 0]) + tf.nn.l2_loss(tf.convert_to_tensor(layer.trainable_variables[0])),
    }

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            value = loss()(y, lookups[name](tf.constant(x)))
        keras.optimizers.SGD(0.1).apply(tape.gradient(value, layer.trainable_variables), layer.trainable_variables)

    why = "are on pservers.* out of losses" if name == "loss" else "must be tf.IndexedSlices.* look rows up before"
    with pytest.raises(UnsupportedError, match=f"'users/rows' {why}"):
        step()


def test_features_that_share_a_table_add_their_gradients() -> None:
    def build(layer: Layer) -> Model:
        first, second = keras.Input((WORDS,), dtype="int32"), keras.Input((2,), dtype="int64")
        both = L.Concatenate()([L.Flatten()(layer(first)), L.Flatten()(layer(second))])
        head = L.Dense(10, kernel_initializer=keras.initializers.RandomUniform(seed=7))
        return keras.Model([first, second], head(both))

    x, y = data()
    layers = DenseTable(ROWS), embedding(ROWS), embedding(None)
    for layer in layers:
        model = build(layer)
        model.compile(keras.optimizers.SGD(0.5), loss(), jit_compile=False)
        model.fit([x, x[:, :2]], y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        assert len(model.trainable_variables) == 3
    check(layers[1], layers[0])
    check(layers[2], layers[0])


class Subclassed(keras.Model):
    """Gets its variables in the first call."""

    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.tables = layers
        self.head = L.Dense(10, kernel_initializer=keras.initializers.RandomUniform(seed=7))

    def call(self, inputs: Value) -> Value:
        return self.head(keras.ops.concatenate([keras.ops.mean(table(inputs), 1) for table in self.tables], -1))


def test_a_subclassed_model_trains_several_tables() -> None:
    references, layers = [DenseTable(ROWS), DenseTable(ROWS)], [embedding(ROWS), embedding(None)]
    for tables in (references, layers):
        model = Subclassed(*tables)
        model.compile(keras.optimizers.SGD(0.5), loss(), jit_compile=False)
        model.fit(*data(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    for layer, reference in zip(layers, references, strict=True):
        check(layer, reference)


@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_combined_ids_train_as_a_dense_table_does(kind: str) -> None:
    """By one step of SGD, of which NumPy knows the gradient; padding gets none."""
    ids = np.array([[1, 2, 2], [3, 0, 0], [5, 1, 0]])
    weights = np.array([[1, 2, 3], [1, 1, 1], [0.5, 2, 1]], "float32")
    layer = embedding(ROWS, combiner="sum", mask_zero=True)
    made = {
        "dense": tf.constant,
        "ragged": tf.RaggedTensor.from_tensor,
        "sparse": lambda each: tf.RaggedTensor.from_tensor(each).to_sparse(),
    }[kind]
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(layer(made(ids), made(weights)) * tf.constant([[1.0], [2.0], [3.0]]))
    keras.optimizers.SGD(1.0).apply(tape.gradient(value, layer.trainable_variables), layer.trainable_variables)
    expected = initial(ROWS)
    for id_, gradient in {1: 1 + 2 * 3, 2: 2 + 3, 3: 2, 5: 0.5 * 3}.items():
        expected[id_] -= gradient
    np.testing.assert_allclose(layer.read_rows(np.arange(ROWS)), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("policy", marked(["mixed_float16", "mixed_bfloat16"], "mixed_float16"))
def test_mixed_precision_keeps_rows_in_float32(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    try:
        layer, reference = embedding(ROWS), DenseTable(ROWS)
        assert layer(data()[0]).dtype == keras.mixed_precision.global_policy().compute_dtype
        for each in (layer, reference):
            model, _ = trained(each, keras.optimizers.SGD(0.1), *data())
    finally:
        keras.config.set_dtype_policy("float32")
    assert layer.read_rows(np.arange(3)).dtype == np.float32
    check(layer, reference, 2e-3)
    assert np.abs(layer.read_rows(np.arange(ROWS)) - initial(ROWS)).max() > 1e-2
    assert model.optimizer.iterations.numpy() == 10


# Under strategies of one worker


def _all_of(model: Model, layer: Layer, losses: list[float]) -> list[bytes]:
    own = [layer.optimizer.iterations.numpy()] if layer.optimizer else []
    values = [layer.read_rows(np.arange(ROWS)), *model.layers[-1].get_weights(), losses, *own]
    return [np.asarray(value).tobytes() for value in values]


@pytest.mark.parametrize(
    "options",
    [
        {"rows": None, "optimizer": "adagrad"},
        pytest.param({"rows": ROWS}, marks=pytest.mark.long),
        pytest.param({"rows": ROWS, "steps_per_execution": 3}, marks=pytest.mark.long),
        pytest.param({"rows": None, "run_eagerly": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_one_worker_does_bitwise_what_a_process_without_a_strategy_does(
    options: dict[str, Argument], strategy: tfps.Strategy
) -> None:
    compiling = {name: options[name] for name in options if name not in ("rows", "optimizer")}
    ends = []
    for scope in (contextlib.nullcontext(), strategy.scope(), tf.distribute.OneDeviceStrategy("CPU:0").scope()):
        with scope:
            layer = embedding(options["rows"], optimizer=options.get("optimizer"))
            model, losses = trained(layer, keras.optimizers.Adam(0.05), *data(), **compiling)
        ends.append(_all_of(model, layer, losses))
    assert ends[1] == ends[0]
    assert ends[2] == ends[0]


def test_in_mode_async_one_worker_does_what_it_does_in_mode_sync() -> None:
    ends = []
    for config in (tfps.Config(), tfps.Config(mode="async", update="server")):
        strategy = tfps.Strategy(config=config)
        with strategy.scope():
            layer = embedding(None)
            model, losses = trained(layer, keras.optimizers.SGD(0.5), *data())
        ends.append(_all_of(model, layer, losses))
        strategy.close()
    assert ends[0] == ends[1]


def test_a_loop_in_run_trains_as_one_without_a_strategy(strategy: tfps.Strategy) -> None:
    ends: list[Structure] = []
    for own in (None, strategy):
        with own.scope() if own else contextlib.nullcontext():
            layer = embedding(None, optimizer=keras.optimizers.Adam(0.1))
            model, optimizer = model_of(layer), keras.optimizers.SGD(0.5)
        step = _step(model, optimizer)
        run = tf.function(lambda x, y, own=own, step=step: own.run(step, (x, y)) if own else step(x, y))
        for batch in _batches(*data(32)):
            run(*batch)
        ends.append(_all_of(model, layer, []))
    assert ends[0] == ends[1]
