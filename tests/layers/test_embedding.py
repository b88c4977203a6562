"""`tfps.layers.Embedding` in one process, by itself and with `tfps.Strategy`: beside Keras' layer, NumPy, dense tables.

tests/integration/test_tables.py has several workers.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf
from tables import DIM, DenseTable, embedding, initial, stats

import tfps
from tfps.errors import UnsupportedError
from tfps.types import Argument, Array, Layer, Model, Optimizer, Structure, Value

L = keras.layers
ROWS, WORDS, BATCH = 40, 6, 8
LARGEST = np.iinfo(np.int64)
Build = Callable[[], Optimizer]


def data(rows: int = 36) -> tuple[Array, Array]:
    """Words that come several times in a batch, and labels."""
    words = np.minimum(np.random.default_rng(0).geometric(0.1, (rows, WORDS)), ROWS - 2)
    return words, words.sum(1) % 10


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model_of(layer: Layer, words: int = WORDS) -> Model:
    """A layer after `layer`, which begins alike in all models."""
    head = L.Dense(10, kernel_initializer=keras.initializers.RandomUniform(-0.5, 0.5, seed=7))
    return keras.Sequential([L.Input((words,), dtype="int64"), layer, L.Flatten(), head])


def trained(
    layer: Layer, optimizer: Optimizer, x: Array, y: Array, *, epochs: int = 2, **options: Argument
) -> tuple[Model, list[float]]:
    model = model_of(layer, x.shape[1])
    model.compile(optimizer, loss(), jit_compile=False, **options)
    fit = model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    return model, fit.history["loss"]


def check(layer: Layer, reference: Layer, tolerance: float = 1e-5) -> None:
    ids = np.arange(ROWS)
    np.testing.assert_allclose(layer.read_rows(ids), reference.read_rows(ids), rtol=0, atol=tolerance)


# Results


@pytest.mark.parametrize("rows", [ROWS, None])
def test_ids_of_any_integer_dtype_and_shape_give_their_rows(rows: int | None) -> None:
    layer, expected = embedding(rows), initial(ROWS)
    called = tf.function(layer)
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"):
        for shape in [(3,), (0, 3), (2, 3), (2, 3, 5)]:
            ids = np.random.default_rng(0).integers(0, ROWS, shape).astype(dtype)
            assert layer.compute_output_shape(shape) == (*shape, DIM)
            for call in (layer, called) if dtype == "int32" else (layer,):
                found = call(tf.constant(ids))
                assert found.dtype == tf.float32
                np.testing.assert_array_equal(found, expected[ids.astype("int64")])
        assert layer(tf.constant(7, dtype)).shape == (DIM,)


def test_without_input_dim_every_int64_is_an_id() -> None:
    layer, ids = embedding(None), np.array([[LARGEST.min, LARGEST.max], [-1, 0]])
    before = layer(ids).numpy()
    assert len(np.unique(before)) == before.size
    trained(layer, keras.optimizers.SGD(1.0), ids, np.array([1, 2]), epochs=1)
    after = layer(ids).numpy()
    assert (before != after).all()
    np.testing.assert_array_equal(layer.read_rows(ids).reshape(after.shape), after)
    assert stats(layer).rows == 4


def _reduced(rows: Array, ids: Sequence[int], weights: Sequence[float], combiner: str, mask_zero: bool) -> Array:
    """By NumPy, of one example."""
    kept = np.array([0.0 if mask_zero and id_ == 0 else weight for id_, weight in zip(ids, weights, strict=True)])
    total = (rows[np.array(ids, int)] * kept[:, None]).sum(0)
    by = {"sum": 1.0, "mean": kept.sum(), "sqrtn": np.sqrt((kept**2).sum())}[combiner]
    return total / by if by else np.zeros(DIM)


@pytest.mark.parametrize("mask_zero", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_combiners_reduce_dense_ragged_and_sparse_ids_as_numpy_does(
    combiner: str, weighted: bool, mask_zero: bool
) -> None:
    layer, rows = embedding(ROWS, combiner=combiner, mask_zero=mask_zero), initial(ROWS)
    random = np.random.default_rng(0)
    dense = random.integers(0, 4, (3, 2, 5))
    weights = random.uniform(0.5, 2, dense.shape).astype("float32") if weighted else np.ones(dense.shape, "float32")
    dense[1, 1] = 0  # all padding
    examples = list(zip(dense.reshape(-1, 5), weights.reshape(-1, 5), strict=True))

    def check(found: Value, pairs: Sequence[tuple[Array, Array]]) -> None:
        expected = [_reduced(rows, *pair, combiner, mask_zero) for pair in pairs]
        np.testing.assert_allclose(np.asarray(found).reshape(-1, DIM), expected, rtol=0, atol=1e-6)

    def given(values: Value) -> Value:
        return values if weighted else None

    check(layer(dense, given(weights)), examples)
    lengths = [0, 1, 5, 2, 4, 3]
    short = [(ids[:size], own[:size]) for (ids, own), size in zip(examples, lengths, strict=True)]
    ragged, own = (tf.RaggedTensor.from_row_lengths(np.concatenate(each), lengths) for each in zip(*short, strict=True))
    check(layer(ragged, given(own)), short)
    nested = layer(tf.RaggedTensor.from_row_lengths(ragged, [2, 0, 4]), given(own.from_row_lengths(own, [2, 0, 4])))
    assert nested.shape == (3, None, DIM)
    check(nested.values, short)
    sparse, own = (each.with_values(each.values).to_sparse() for each in (ragged, own))
    check(layer(sparse, given(own)), short)
    deep, own = (tf.sparse.reshape(each, [3, 2, -1]) for each in (sparse, own))
    assert layer(deep, given(own)).shape == (3, 2, DIM)
    check(layer(deep, given(own)), short)


def test_ragged_ids_without_a_combiner_stay_ragged() -> None:
    ids = tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int32)
    found = embedding(ROWS)(ids)
    assert found.row_lengths().numpy().tolist() == [2, 0, 1]
    np.testing.assert_array_equal(found.values, initial(ROWS)[[1, 2, 3]])


def test_the_mask_of_padding_reaches_later_layers() -> None:
    words = data()[0]
    words[:, 3:] = 0
    reference = L.Embedding(ROWS, DIM, mask_zero=True, weights=initial(ROWS))
    following = L.LSTM(3, kernel_initializer=keras.initializers.GlorotUniform(seed=1))
    layer = embedding(ROWS, mask_zero=True)
    np.testing.assert_array_equal(layer.compute_mask(words), words != 0)
    np.testing.assert_array_equal(following(layer(words)), following(reference(words)))
    assert (following(layer(words)).numpy() != following(embedding(ROWS)(words)).numpy()).any()
    assert embedding(ROWS).compute_mask(words) is None
    assert embedding(ROWS, mask_zero=True, combiner="sum").compute_mask(words) is None


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
QUICK = ("SGD", "Adam", "Adagrad", "Ftrl")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in RULES]
)
def test_rows_that_are_each_once_in_every_batch_train_bitwise_as_keras_does(name: str) -> None:
    random = np.random.default_rng(0)
    x = np.concatenate([random.permutation(BATCH * WORDS).reshape(BATCH, WORDS) for _ in range(4)])
    y, count = x.sum(1) % 10, BATCH * WORDS
    reference = L.Embedding(count, DIM, weights=initial(count))
    layers = [embedding(count), embedding(None)][: 1 if name in QUICK[1:] else 2]
    (expected, *models) = [trained(each, RULES[name](), x, y)[0] for each in (reference, *layers)]
    assert (reference.get_weights()[0] != initial(count)).any(1).all()
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


@pytest.mark.parametrize("name", LOOPS)
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


@pytest.mark.parametrize("name", ["map", "rnn", "recomputed", "loss"])
def test_gradients_without_ids_are_refused_with_what_to_do(name: str) -> None:
    layer, (x, y) = embedding(ROWS, 10, name="users"), data()
    layer.build()

    class Cell(L.Layer):
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

    _fails(step, UnsupportedError, "'users/rows' must be tf.IndexedSlices", "look rows up before")


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


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
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


# What makes rows, and what does not


def test_evaluation_and_prediction_make_no_rows() -> None:
    layer, (x, y) = embedding(None), data()
    model = model_of(layer)
    model.compile("adam", loss(), jit_compile=False)
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    layer(x)
    assert stats(layer) is None
    model.fit(x[:2], y[:2], validation_data=(x, y), verbose=0)
    made = len(np.unique(x[:2]))
    assert stats(layer).rows == made < len(np.unique(x))
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    assert stats(layer).rows == made


def test_a_table_that_is_not_trained_stays_as_it_is() -> None:
    layer, (x, y) = embedding(ROWS, trainable=False), data()
    model, _ = trained(layer, keras.optimizers.SGD(0.5), x, y)
    assert stats(layer) is None
    np.testing.assert_array_equal(layer.read_rows(np.arange(ROWS)), initial(ROWS))
    for trainable in (True, False):
        before = layer.read_rows(np.arange(ROWS))
        layer.trainable = trainable
        model.compile(keras.optimizers.SGD(0.5), loss(), jit_compile=False)
        model.fit(x, y, verbose=0)
        assert (layer.read_rows(np.arange(ROWS)) != before).any() == trainable


# What users of Keras do


def test_a_config_makes_the_same_layer() -> None:
    layer = tfps.layers.Embedding(
        None,
        DIM,
        optimizer=keras.optimizers.Adagrad(0.5),
        combiner="mean",
        mask_zero=True,
        admit_after=2,
        expire_after=50,
        max_rows=7,
        embeddings_initializer=keras.initializers.RandomNormal(0.0, 2.0, seed=3),
        name="users",
        dtype="float16",
        trainable=False,
    )
    config = layer.get_config()
    again = tfps.layers.Embedding.from_config(copy.deepcopy(config))  # Keras writes into it
    assert again.get_config() == config
    assert (again.read_rows([1, 2]) == layer.read_rows([1, 2])).all()
    assert keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer)).get_config() == config
    clone = keras.models.clone_model(model_of(embedding(ROWS, mask_zero=True, optimizer="adam")))
    assert (clone.layers[0].input_dim, clone.layers[0].mask_zero) == (ROWS, True)
    assert isinstance(clone.layers[0].optimizer, keras.optimizers.Adam)


def test_numbers_of_numpy_are_numbers() -> None:
    layer = tfps.layers.Embedding(np.int64(5), np.int32(DIM))
    assert (layer.input_dim, layer.output_dim) == (5, DIM)
    layer.get_config()


def test_time_distributed_and_maps_of_datasets_look_rows_up() -> None:
    layer, x = embedding(ROWS), data()[0]
    np.testing.assert_array_equal(
        L.TimeDistributed(layer)(x.reshape(6, 6, WORDS)), initial(ROWS)[x].reshape(6, 6, -1, 4)
    )
    trained(layer, keras.optimizers.SGD(0.5), *data())
    mapped = np.concatenate(list(tf.data.Dataset.from_tensor_slices(x).batch(BATCH).map(layer)))
    np.testing.assert_array_equal(mapped, layer(x))
    assert (mapped != initial(ROWS)[x]).any()


def test_rows_that_were_trained_elsewhere_are_loaded_and_trained_on() -> None:
    known = np.random.default_rng(1).normal(size=(ROWS, DIM)).astype("float32")
    reference = L.Embedding(ROWS, DIM, weights=known.copy())
    layers = embedding(ROWS), embedding(None)
    for layer in layers:
        layer.load_rows(np.arange(ROWS), known)
        np.testing.assert_array_equal(layer(np.arange(ROWS)), known)
    for layer in (reference, *layers):
        trained(layer, keras.optimizers.SGD(0.5), *data())
    for layer in layers:
        np.testing.assert_allclose(layer.read_rows(np.arange(ROWS)), reference.get_weights()[0], rtol=0, atol=1e-5)


# Bad input


def _fails(call: Callable[[], object], error: type[Exception], *texts: str) -> None:
    with pytest.raises(error) as found:
        call()
    for text in texts:
        assert text in str(found.value), found.value


@pytest.mark.parametrize("ids", [[[1.5]], [["a"]], np.array([[1]], "uint64"), [[True]]], ids=str)
def test_ids_that_are_no_integers_are_refused_with_the_layers_name(ids: Argument) -> None:
    _fails(lambda: embedding(None, name="users")(tf.constant(ids)), ValueError, "layer 'users': ids must be integers")


def test_float_ids_are_taken_as_far_as_they_are_exact() -> None:
    """Keras makes float32 of what a Sequential model without an Input is given."""
    largest, ids = 2**24, np.array([[1, 2**24 - 1]])
    layer = embedding(largest)
    model = keras.Sequential([layer, L.Flatten(), L.Dense(10)])
    model.compile("sgd", loss(), jit_compile=False)
    before = layer.read_rows(ids)
    model.fit(ids, np.array([1]), verbose=0)
    assert (layer.read_rows(ids) != before).all()
    _fails(
        lambda: keras.Sequential([L.Input((3,)), embedding(largest + 1, name="users")]),
        ValueError,
        "layer 'users': ids must be integers",
        "keras.Input(dtype='int64')",
    )


@pytest.mark.parametrize("wrong", [ROWS, -1])
def test_an_id_that_a_table_has_not_is_named_with_its_layer(wrong: int) -> None:
    layer, (x, y) = embedding(ROWS, name="users"), data()
    texts = f"layer 'users': an id must be from 0 to {ROWS - 1}, got", str(wrong)
    x[5, 1] = wrong
    error = tf.errors.InvalidArgumentError
    _fails(lambda: layer(x), error, *texts)
    said = [text.replace("'", "\\'") for text in texts]  # as in graphs
    _fails(lambda: trained(layer, keras.optimizers.SGD(0.1), x, y), error, *said)
    _fails(lambda: model_of(layer).predict(x, verbose=0), error, *said)
    _fails(lambda: layer.read_rows(x), ValueError, *texts)
    _fails(lambda: layer.load_rows([wrong], np.zeros((1, DIM))), ValueError, *texts)
    trained(layer, keras.optimizers.SGD(0.1), *data())  # nothing is left of it


def test_arguments_out_of_range_are_refused() -> None:
    for name, options in (
        ("input_dim", {"input_dim": 0}),
        ("input_dim", {"input_dim": True}),
        ("output_dim", {"output_dim": 1.5}),
        ("combiner", {"combiner": "max"}),
        ("admit_after", {"input_dim": None, "admit_after": 0}),
        ("max_rows", {"input_dim": 5, "max_rows": 3}),
    ):
        _fails(lambda options=options: embedding(**{"rows": 5, **_named(options)}), ValueError, name)


def _named(options: dict[str, Argument]) -> dict[str, Argument]:
    """As arguments of `embedding`."""
    names = {"input_dim": "rows", "output_dim": "dim"}
    return {names.get(name, name): value for name, value in options.items()}


@pytest.mark.parametrize("name", ["embeddings_regularizer", "embeddings_constraint", "weights", "input_length"])
def test_what_keras_layer_has_beyond_it_is_refused_with_what_to_do(name: str) -> None:
    _fails(lambda: embedding(ROWS, **{name: "l2"}), UnsupportedError, f"no {name}: ")


def test_weights_and_sparse_ids_need_a_combiner() -> None:
    ids = tf.constant([[1, 2]])
    _fails(lambda: embedding(ROWS)(ids, tf.ones([1, 2])), ValueError, "weights need a combiner")
    _fails(lambda: embedding(ROWS)(tf.sparse.from_dense(ids)), ValueError, "sparse ids need a combiner")


def test_rows_to_load_must_have_the_tables_shape() -> None:
    layer = embedding(ROWS, name="users")
    _fails(lambda: layer.load_rows([1, 2], np.zeros((2, DIM + 1))), ValueError, "layer 'users'", "(2, 5)")
    _fails(lambda: layer.load_rows([1, 1], np.zeros((2, DIM))), ValueError, "1 different ids")


def test_what_xla_compiles_cannot_look_rows_up() -> None:
    layer, (x, y) = embedding(ROWS, name="users"), data()
    _fails(lambda: tf.function(layer, jit_compile=True)(x), UnsupportedError, "'users/rows'", "jit_compile=False")
    model = model_of(layer)
    with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
        model.compile("sgd", loss(), jit_compile=True)
    model.fit(x, y, verbose=0)


def test_a_strategy_of_several_hosts_is_refused() -> None:
    def build() -> None:
        with tf.distribute.MultiWorkerMirroredStrategy().scope():
            embedding(ROWS).build()

    _fails(build, UnsupportedError, "CollectiveAllReduceStrategy", "rows of their own")


# Under strategies of one worker


def _all_of(model: Model, layer: Layer, losses: list[float]) -> list[bytes]:
    own = [layer.optimizer.iterations.numpy()] if layer.optimizer else []
    values = [layer.read_rows(np.arange(ROWS)), *model.layers[-1].get_weights(), losses, *own]
    return [np.asarray(value).tobytes() for value in values]


@pytest.mark.parametrize(
    "options",
    [
        {"rows": ROWS},
        {"rows": None, "optimizer": "adagrad"},
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
    for options in ({}, {"mode": "async", "update": "server"}):
        strategy = tfps.Strategy(config=tfps.Config(**options))
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
