"""`tfps.layers.Embedding` by itself: what it returns, makes and refuses; beside Keras' layer and NumPy."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence

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
from tfps.types import Argument, Array, Library, Options, Value

L: Library = keras.layers
LARGEST = np.iinfo(np.int64)


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


def _reduced(rows: Array, ids: Array, weights: Array, combiner: str, mask_zero: bool) -> Array:
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


# What makes rows, and what does not


def test_evaluation_and_prediction_make_no_rows() -> None:
    layer, (x, y) = embedding(None), data()
    model = model_of(layer)
    model.compile("adam", loss(), jit_compile=False)
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    layer(x)
    assert stats(layer).rows == 0
    model.fit(x[:2], y[:2], validation_data=(x, y), verbose=0)
    made = len(np.unique(x[:2]))
    assert stats(layer).rows == made < len(np.unique(x))
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    assert stats(layer).rows == made


def test_a_table_that_is_not_trained_stays_as_it_is() -> None:
    layer, (x, y) = embedding(ROWS, trainable=False), data()
    model, _ = trained(layer, keras.optimizers.SGD(0.5), x, y)
    assert stats(layer).rows == 0
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
    masked = embedding(ROWS, mask_zero=True, optimizer="adam")
    clone = keras.models.clone_model(keras.Sequential([L.Input((WORDS,), dtype="int64"), masked, L.LSTM(3)]))
    assert (clone.layers[0].input_dim, clone.layers[0].mask_zero) == (ROWS, True)
    assert isinstance(clone.layers[0].optimizer, keras.optimizers.Adam)


def test_numbers_of_numpy_are_numbers() -> None:
    layer = tfps.layers.Embedding(np.int64(5), np.int32(DIM))  # type: ignore[arg-type]
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


@pytest.mark.parametrize("wrong", [ROWS, pytest.param(-1, marks=pytest.mark.long)])
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


@pytest.mark.parametrize(
    "options",
    [
        {"input_dim": 0},
        {"input_dim": True},
        {"output_dim": 1.5},
        {"combiner": "max"},
        {"admit_after": 0, "input_dim": None},
        {"max_rows": 3},
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused(options: Options) -> None:
    name = next(iter(options))
    _fails(lambda: tfps.layers.Embedding(**{"input_dim": 5, "output_dim": DIM, **options}), ValueError, name)


@pytest.mark.parametrize("name", ["embeddings_regularizer", "embeddings_constraint", "weights", "input_length"])
def test_what_keras_layer_has_beyond_it_is_refused_with_what_to_do(name: str) -> None:
    options: Options = {name: "l2"}
    _fails(lambda: embedding(ROWS, **options), UnsupportedError, f"no {name}: ")


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
