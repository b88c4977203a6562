"""`tfps.layers.DistributedEmbedding`: results, updates, requests, configs; beside keras_rs, if it is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_versions import KERAS_3_8

import tfps
from tfps.embeddings.variable import TableVariable
from tfps.errors import UnsupportedError
from tfps.layers import DistributedEmbedding, FeatureConfig, TableConfig
from tfps.types import Argument, Array, Layer, Model, Optimizer, Options, Structure, Value

ROWS, WIDTH, IDS, DIM = 5, 4, 20, 6
COMBINERS = ("mean", "sum", "sqrtn")
NEEDS_KERAS_RS = pytest.mark.skipif(
    importlib.util.find_spec("keras_rs") is None, reason="needs keras_rs: pip install -e '.[models]'"
)


def feature(name: str, table: object, *ids: int | None, batch: int | None = None) -> FeatureConfig:
    dim = table.embedding_dim  # type: ignore[attr-defined]
    return FeatureConfig(name, table, (batch, *ids), (batch, dim))  # type: ignore[arg-type]


def every_kind(combiner: Argument = "mean", make: Argument = None, **options: Argument) -> Structure:
    """Features of all kinds of ids, nested, of which four share a table; `make` has the configs' classes."""
    make = make or tfps.layers
    films = make.TableConfig("films", IDS, DIM, combiner=combiner, **options)
    users = make.TableConfig("users", IDS + 3, DIM + 1, combiner=combiner, **options)
    other = [
        make.FeatureConfig("wide", films, (None, WIDTH), (None, DIM)),
        make.FeatureConfig("others", users, (ROWS, WIDTH), (ROWS, DIM + 1)),
        (
            make.FeatureConfig("ragged", films, (None, 3), (None, DIM)),
            make.FeatureConfig("sparse", films, (None, 7), (None, DIM)),
        ),
    ]
    return {"one": make.FeatureConfig("one", films, (None,), (None, DIM)), "others": other}


def ids_of_every_kind(rng: np.random.Generator) -> Structure:
    ragged = tf.ragged.constant([[1, 2], [], [3], [4, 4, 4], [0]], dtype=tf.int64)
    sparse = tf.SparseTensor([[0, 1], [0, 3], [2, 0], [4, 6]], [3, 5, 3, 19], [ROWS, 7])
    wide = [rng.integers(0, IDS, (ROWS, WIDTH)) for _ in range(2)]
    return {"one": tf.constant(rng.integers(0, IDS, ROWS)), "others": [*map(tf.constant, wide), (ragged, sparse)]}


def weights_of_every_kind(ids: Structure, rng: np.random.Generator) -> Structure:
    """Also negative, and of one feature none, which Keras 3.8 does not know."""
    one, (wide, others, (ragged, sparse)) = ids["one"], ids["others"]

    def drawn(values: Value) -> Value:
        return tf.constant(rng.normal(size=values.shape), tf.float32)

    of_sparse = tf.SparseTensor(sparse.indices, drawn(sparse.values), sparse.dense_shape)
    return {
        "one": drawn(one),
        "others": [
            drawn(wide),
            drawn(others) if KERAS_3_8 else None,
            (ragged.with_values(drawn(ragged.values)), of_sparse),
        ],
    }


def examples(ids: Value, weights: Value) -> list[tuple[Array, Array]]:
    """The ids and the weights of each example."""
    if isinstance(ids, tf.SparseTensor):
        count = int(ids.dense_shape[0])
        places = ids.indices.numpy()[:, 0]
        parts = [ids.values.numpy()[places == row] for row in range(count)]
        given = None if weights is None else [weights.values.numpy()[places == row] for row in range(count)]
    else:
        parts = [np.atleast_1d(ids[row].numpy()) for row in range(ids.shape[0])]
        given = None if weights is None else [np.atleast_1d(weights[row].numpy()) for row in range(ids.shape[0])]
    given = given or [np.ones(len(part)) for part in parts]
    return [(part, each.astype(np.float64)) for part, each in zip(parts, given, strict=True)]


def reduced(rows: Array, combiner: str, ids: Value, weights: Value) -> Array:
    """By the definition of a combiner, float64."""
    found = []
    for part, each in examples(ids, weights):
        if ids.shape.rank == 1 and combiner != "sum":  # a mean of one, whatever it weighs
            each = np.ones(1)
        total = (rows.astype(np.float64)[part] * each[:, None]).sum(0)
        by = {"sum": 1.0, "mean": each.sum(), "sqrtn": np.sqrt((each**2).sum())}[combiner] if len(part) else 0.0
        found.append(total / by if by else np.zeros(rows.shape[1]))
    return np.array(found)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiner", COMBINERS)
def test_ids_of_every_kind_become_what_the_combiner_says(combiner: str, weighted: bool) -> None:
    rng = np.random.default_rng(0)
    layer, ids = DistributedEmbedding(every_kind(combiner)), ids_of_every_kind(rng)
    weights = weights_of_every_kind(ids, rng) if weighted else None
    found = layer(ids, weights)
    keras.tree.assert_same_structure(ids, found)
    tables = layer.get_embedding_tables()
    flat = [None] * 5 if weights is None else keras.tree.flatten(weights)
    given = zip(keras.tree.flatten(every_kind()), keras.tree.flatten(ids), flat, keras.tree.flatten(found), strict=True)
    for config, each, weight, output in given:
        expected = reduced(tables[config.table.name].numpy(), combiner, each, weight)
        np.testing.assert_allclose(output, expected, rtol=2e-5, atol=1e-6, err_msg=config.name)
        assert output.shape == expected.shape


@NEEDS_KERAS_RS
@pytest.mark.parametrize("combiner", COMBINERS)
def test_outputs_are_bitwise_those_of_keras_rs_for_the_same_rows(combiner: str) -> None:
    import keras_rs

    rng = np.random.default_rng(1)
    ids = ids_of_every_kind(rng)
    configs = every_kind(combiner, keras_rs.layers)  # its classes
    ours, theirs = DistributedEmbedding(configs), keras_rs.layers.DistributedEmbedding(configs)
    for weights in (None, weights_of_every_kind(ids, rng)):
        theirs(ids)
        found = ours(ids, weights)
        for layer in theirs._flatten_layers(include_self=False):
            layer.embeddings.assign(ours.get_embedding_tables()[layer.name])
        expected = theirs(ids, weights)
        keras.tree.assert_same_structure(found, expected)
        for one, other in zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        by_preprocessing = ours(theirs.preprocess(ids, weights))
        np.testing.assert_array_equal(by_preprocessing["one"], found["one"])
    shapes = keras.tree.map_structure(lambda each: tuple(each.shape), ids)
    known = keras.tree.map_structure_up_to(configs, lambda shape: (ROWS, shape[1]), theirs.compute_output_shape(shapes))
    assert ours.compute_output_shape(shapes) == known
    again = DistributedEmbedding.from_config(theirs.get_config())
    assert again.compute_output_shape(shapes) == known


# What a step does


class Dense(keras.layers.Layer):
    """The same with matrices, trained as all weights are: the reference."""

    def __init__(self, rows: Array, other: Array) -> None:
        super().__init__()
        self.rows, self.other = (self.add_weight(shape=each.shape) for each in (rows, other))
        self.rows.assign(rows)
        self.other.assign(other)

    def call(self, inputs: Structure) -> Structure:
        def found(rows: Value, ids: Value) -> Value:
            return keras.ops.mean(keras.ops.matmul(keras.ops.one_hot(ids, rows.shape[0]), rows), axis=1)

        return [found(self.rows, inputs[0]), found(self.rows, inputs[1]), found(self.other, inputs[2])]


def model_of(layer: Layer) -> Model:
    inputs = [keras.Input((WIDTH,), dtype="int64") for _ in range(3)]
    return keras.Model(
        inputs, keras.layers.Dense(1, kernel_initializer="ones")(keras.layers.Concatenate()(layer(inputs)))
    )


def shared_and_other(one: Argument, other: Argument) -> list[FeatureConfig]:
    films, users = TableConfig("films", IDS, DIM, optimizer=one), TableConfig("users", IDS, DIM, optimizer=other)
    return [feature("a", films, WIDTH), feature("b", films, WIDTH), feature("c", users, WIDTH)]


def steps(model: Model, optimize: Callable[[list[Value]], None], x: list[Array], y: Array) -> list[float]:
    def step(x: list[Value], y: Value) -> Value:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        optimize(tape.gradient(loss, model.trainable_variables))
        return loss

    batches = [slice(begin, begin + 8) for begin in range(0, len(y), 8)]
    return [float(step([tf.constant(each[part]) for each in x], tf.constant(y[part]))) for part in batches]


def test_each_table_is_trained_by_its_own_optimizer_as_dense_weights_are() -> None:
    """SGD and Adagrad leave rows without a gradient as they are, as tables do."""
    rng = np.random.default_rng(2)
    x, y = [rng.integers(0, IDS, (40, WIDTH)) for _ in range(3)], rng.normal(size=(40, 1)).astype("float32")
    shared = keras.optimizers.Adagrad(0.3)
    layer = DistributedEmbedding(shared_and_other(shared, None))
    model, top = model_of(layer), keras.optimizers.SGD(0.2)
    before = layer.get_embedding_tables()
    reference = Dense(before["films"].numpy(), before["users"].numpy())
    plain, theirs = model_of(reference), (keras.optimizers.Adagrad(0.3), keras.optimizers.SGD(0.2))
    theirs[0].build([reference.rows])
    theirs[1].build(plain.trainable_variables[1:])

    def optimize(gradients: list[Value]) -> None:
        theirs[0].apply(gradients[:1], [reference.rows])
        theirs[1].apply(gradients[1:], plain.trainable_variables[1:])

    top.build(model.trainable_variables)
    losses = steps(model, lambda gradients: top.apply(gradients, model.trainable_variables), x, y)
    np.testing.assert_allclose(losses, steps(plain, optimize, x, y), rtol=1e-5)
    after = layer.get_embedding_tables()
    np.testing.assert_allclose(after["films"], reference.rows, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after["users"], reference.other, rtol=1e-5, atol=1e-6)
    assert not np.allclose(after["films"], before["films"])
    assert not np.allclose(after["users"], before["users"])
    assert not shared.built  # the layer has a copy
    assert int(shared.iterations) == 0


def test_a_row_is_asked_for_once_however_many_features_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[int]]] = []
    original = TableVariable.lookup

    def lookup(table: TableVariable, ids: tf.Tensor) -> tf.Tensor:
        asked.append((table.path.split("/")[-2], ids.numpy().tolist()))
        return original(table, ids)

    ids = ids_of_every_kind(np.random.default_rng(3))
    layer = DistributedEmbedding(every_kind())
    layer(ids)
    asked.clear()
    monkeypatch.setattr(TableVariable, "lookup", lookup)
    layer(ids)
    one, (wide, others, (ragged, sparse)) = ids["one"], ids["others"]
    of_films = np.concatenate([one, np.ravel(wide), ragged.values, sparse.values])
    assert [name for name, _ in asked] == ["films", "users"]
    assert sorted(asked[0][1]) == sorted(set(of_films.tolist()))
    assert sorted(asked[1][1]) == sorted(set(np.ravel(others).tolist()))


def test_tables_without_a_seed_begin_with_different_rows_though_they_share_an_initializer() -> None:
    shared = keras.initializers.RandomNormal()
    configs = [feature(name, TableConfig(name, IDS, DIM, shared), WIDTH) for name in ("a", "b")]
    layer = DistributedEmbedding(configs)
    rows = layer.get_embedding_tables()
    assert not np.allclose(rows["a"], rows["b"])
    again = DistributedEmbedding.from_config(layer.get_config()).get_embedding_tables()
    np.testing.assert_array_equal(again["a"], rows["a"])


def test_a_model_is_trained_saved_loaded_and_trained_on_under_a_strategy_as_without(
    strategy: tfps.Strategy, tmp_path: Path
) -> None:
    rng = np.random.default_rng(4)
    x, y = [rng.integers(0, IDS, (24, WIDTH)) for _ in range(3)], rng.normal(size=(24, 1))
    options: Options = {"batch_size": 8, "shuffle": False, "verbose": 0}

    def ends(scope: Callable[[], contextlib.AbstractContextManager[object]]) -> list[Value]:
        keras.utils.set_random_seed(5)
        with scope():
            model = model_of(DistributedEmbedding(shared_and_other("adam", None), name="embedding"))
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        losses = model.fit(x, y, epochs=2, **options).history["loss"]
        predicted = model.predict(x, verbose=0)
        model.save(tmp_path / "model.keras")
        with scope():
            loaded = keras.models.load_model(tmp_path / "model.keras")
        np.testing.assert_array_equal(loaded.predict(x, verbose=0), predicted)
        losses += loaded.fit(x, y, **options).history["loss"]
        return [losses, predicted, *loaded.get_layer("embedding").get_embedding_tables().values()]

    alone, under = ends(contextlib.nullcontext), ends(strategy.scope)
    assert alone[0][-1] < alone[0][0]
    for one, other in zip(alone, under, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


# Inputs, rows and configs


def test_what_preprocess_returns_is_an_input_like_the_ids_and_weights_themselves() -> None:
    rng = np.random.default_rng(6)
    ids = ids_of_every_kind(rng)
    weights = weights_of_every_kind(ids, rng)
    layer = DistributedEmbedding(every_kind())
    for given in (None, weights):
        prepared = layer.preprocess(ids, given, training=True)
        for one, other in zip(keras.tree.flatten(layer(prepared)), keras.tree.flatten(layer(ids, given)), strict=True):
            np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="give them to preprocess"):
        layer(prepared, weights)
    single = DistributedEmbedding(feature("single", TableConfig("films", IDS, DIM), WIDTH))
    inputs = keras.Input((WIDTH,), dtype="int32")
    outputs = single(single.preprocess(inputs))
    assert outputs.shape == (None, DIM)


def test_shapes_are_those_of_the_configs_but_for_the_batch_of_a_replica() -> None:
    layer = DistributedEmbedding({"a": [feature("a", TableConfig("t", IDS, DIM), WIDTH, batch=64)]}, dtype="float16")
    assert layer.compute_output_shape({"a": [(8, WIDTH)]}) == {"a": [(8, DIM)]}
    spec = layer({"a": [keras.Input((WIDTH,), dtype="int32")]})["a"][0]
    assert (spec.shape, spec.dtype) == ((None, DIM), "float16")
    found = layer({"a": [np.zeros((8, WIDTH), "int8")]}, {"a": [np.full((8, WIDTH), 1e5)]})["a"][0]
    assert found.dtype == tf.float16
    np.testing.assert_array_equal(found, layer({"a": [np.zeros((8, WIDTH), "int8")]})["a"][0])  # no weight is infinite


def test_ids_of_a_rank_that_is_unknown_while_a_graph_is_made_are_looked_up() -> None:
    """Iterators over a replica's part of a batch do not know it of sparse tensors."""
    table = TableConfig("films", IDS, DIM)
    layer = DistributedEmbedding([feature("dense", table, WIDTH), feature("sparse", table, WIDTH)])
    ids = [tf.constant([[1, 2, 3, 4]]), tf.SparseTensor([[0, 2]], [5], [1, WIDTH])]
    expected = layer(ids)
    found = tf.function(layer, input_signature=[[tf.TensorSpec(None, tf.int32), tf.SparseTensorSpec(None, tf.int32)]])(
        ids
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_all_rows_are_a_tensor_with_gradients_in_graphs_and_out_of_them() -> None:
    """As weights that are tied to an output, and as candidates of a retrieval."""
    layer = tfps.layers.Embedding(IDS, DIM, optimizer=keras.optimizers.SGD(1.0))
    layer.build()
    before, optimizer = layer.embeddings.numpy(), keras.optimizers.SGD(0.1)
    np.testing.assert_array_equal(before, layer(np.arange(IDS)))

    @tf.function
    def step(query: Value) -> Value:
        with tf.GradientTape() as tape:
            scores = keras.ops.matmul(query, keras.ops.transpose(layer.embeddings))
            loss = tf.reduce_sum(tf.square(scores)) / 2
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return scores

    np.testing.assert_allclose(step(tf.ones((1, DIM))), before.sum(1)[None], rtol=1e-5, atol=1e-6)
    after = before - before.sum(1, keepdims=True)
    np.testing.assert_allclose(np.asarray(layer.embeddings), after, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="no tensor of all rows"):
        _ = tfps.layers.Embedding(None, DIM).embeddings


def test_a_table_of_any_ids_is_one_of_the_tables() -> None:
    table = TableConfig("any", None, DIM, max_rows=5, admit_after=2)
    layer = DistributedEmbedding(feature("a", table, WIDTH))
    assert layer(tf.constant([[-5, 2**40, 0, 1]])).shape == (1, DIM)
    assert DistributedEmbedding.from_config(layer.get_config()).get_config() == layer.get_config()
    with pytest.raises(ValueError, match="layer 'any': there is no tensor of all rows"):
        layer.get_embedding_tables()


def test_whole_numbers_that_keras_has_made_floats_are_ids_where_floats_are_exact() -> None:
    model = keras.Sequential([tfps.layers.Embedding(IDS, DIM), keras.layers.Flatten()])
    rows = model.layers[0].embeddings
    np.testing.assert_array_equal(model(np.array([[3, 19]])), np.asarray(rows)[[3, 19]].reshape(1, -1))
    with pytest.raises(ValueError, match="must be integers"):
        tfps.layers.Embedding(2**24 + 1, DIM)(tf.constant([1.0]))


def test_a_config_survives_json_with_its_structure_shared_tables_and_optimizers() -> None:
    configs = every_kind("sqrtn", optimizer=keras.optimizers.Ftrl(0.3))
    layer = DistributedEmbedding(configs, table_stacking=[["films", "users"]], name="mine")
    config, ids = layer.get_config(), ids_of_every_kind(np.random.default_rng(7))
    inputs = keras.tree.map_structure(lambda each: keras.Input(each.shape[1:], dtype="int64"), ids)
    inputs["one"] = keras.Input((), dtype="int64", name="one")
    model = keras.models.model_from_json(keras.Model(inputs, layer(inputs)).to_json())
    for each in (DistributedEmbedding.from_config(config), model.get_layer("mine")):
        assert json.dumps(each.get_config()) == json.dumps(config)
        assert len(keras.tree.flatten(each(ids))) == 5  # with tuples where files of Keras have lists
        assert list(each.get_embedding_tables()) == ["films", "users"]
    alone = FeatureConfig.from_config(configs["one"].get_config())
    assert (alone.name, alone.input_shape, alone.table.combiner) == ("one", (None,), "sqrtn")
    assert alone.table.optimizer.get_config()["learning_rate"] == pytest.approx(0.3)


def test_configs_are_known_by_their_attributes() -> None:
    table = SimpleNamespace(name="t", vocabulary_size=np.int64(IDS), embedding_dim=np.int32(DIM), optimizer="sgd")
    given = SimpleNamespace(name="f", table=table, input_shape=[None], output_shape=[None, DIM])
    layer = DistributedEmbedding([given, feature("g", table, WIDTH)])
    assert [each.shape for each in layer([tf.constant([1]), tf.constant([[1, 2, 3, 4]])])] == [(1, DIM), (1, DIM)]
    assert list(layer.get_embedding_tables()) == ["t"]


def test_each_table_is_a_layer_whose_rows_are_read_and_loaded() -> None:
    layer = DistributedEmbedding({"a": feature("a", TableConfig("films", IDS, DIM), WIDTH)})
    layer.tables["films"].load_rows([3, 5], np.array([[2.0] * DIM, [4.0] * DIM], np.float32))
    np.testing.assert_allclose(layer({"a": tf.constant([[3, 5, 5, 3]])})["a"], [[3.0] * DIM])
    np.testing.assert_array_equal(layer.tables["films"].read_rows([5]), layer.get_embedding_tables()["films"][5:6])


# What is refused


def of_table(**changes: Argument) -> DistributedEmbedding:
    fields = {"name": "t", "vocabulary_size": IDS, "embedding_dim": DIM, **changes}
    return DistributedEmbedding(feature("f", SimpleNamespace(**fields), WIDTH))


def built(**options: Argument) -> DistributedEmbedding:
    return DistributedEmbedding({"f": feature("f", TableConfig("t", IDS, DIM), WIDTH)}, **options)


def called(ids: Value, weights: Value = None, *width: int | None) -> object:
    return DistributedEmbedding(feature("f", TableConfig("t", IDS, DIM), *(width or (WIDTH,))))(ids, weights)


def clipped() -> Optimizer:
    return keras.optimizers.Adam(0.1, clipnorm=1.0)


WIDE = tf.zeros((2, WIDTH), tf.int32)
SPARSE = tf.sparse.from_dense(WIDE + 1)
RAGGED = tf.RaggedTensor.from_tensor(WIDE)
TWO = [TableConfig("t", IDS, DIM), TableConfig("t", IDS, DIM)]
REFUSED: list[tuple[str, type[Exception], Callable[[], object], str]] = [
    ("sparsecore", UnsupportedError, lambda: of_table(placement="sparsecore"), "placement of table 't' must be 'auto'"),
    ("placement", ValueError, lambda: of_table(placement="gpu"), "placement of table 't' must be one of"),
    ("combiner", ValueError, lambda: of_table(combiner="max"), "combiner of table 't' must be one of"),
    ("vocabulary", ValueError, lambda: of_table(vocabulary_size=0), "vocabulary_size of table 't' must be a positive"),
    ("dim", ValueError, lambda: DistributedEmbedding(SimpleNamespace(table=None)), "must be a TableConfig, got None"),
    ("name", ValueError, lambda: of_table(name="a/b"), "must be a text without '/', got 'a/b'"),
    ("any id", ValueError, lambda: of_table(max_rows=4), "table 't': admit_after, expire_after, max_rows are for"),
    ("optimizer", UnsupportedError, lambda: of_table(optimizer="nadam"), "table 't': .* not of .*Nadam"),
    ("clipping", UnsupportedError, lambda: of_table(optimizer=clipped()), "table 't': .*no clipnorm"),
    ("unknown", ValueError, lambda: of_table(optimizer="adma"), "table 't': "),
    ("initializer", UnsupportedError, lambda: of_table(initializer="orthogonal"), "table 't': rows .* one by one"),
    ("two tables", ValueError, lambda: DistributedEmbedding([feature("f", each) for each in TWO]), "different names"),
    ("none", ValueError, lambda: DistributedEmbedding({}), "must have a FeatureConfig"),
    ("no config", ValueError, lambda: DistributedEmbedding(["f"]), "must be a TableConfig, got None"),
    ("stacking", ValueError, lambda: built(table_stacking=["s"]), r"names among \['t'\], got \['s'\]"),
    ("statistics", ValueError, lambda: built(update_stats=True), "update_stats must be False"),
    ("option", ValueError, lambda: built(opt=1), "opt"),
    (
        "output shape",
        ValueError,
        lambda: FeatureConfig("f", TWO[0], (8, 3), (8, 3, DIM)),
        r"output_shape of feature 'f' must be \(8, 6\)",
    ),
    (
        "output dim",
        ValueError,
        lambda: FeatureConfig("f", TWO[0], (8, 3), (8, DIM + 1)),
        r"output_shape of feature 'f' must be \(8, 6\)",
    ),
    ("no shape", ValueError, lambda: FeatureConfig("f", TWO[0], (), (DIM,)), "input_shape of feature 'f' must be"),
    ("structure", ValueError, lambda: built()({"g": WIDE}), "inputs must have the structure of feature_configs"),
    ("weights", ValueError, lambda: built()({"f": WIDE}, {"g": WIDE}), "weights must have the structure of"),
    ("built so", ValueError, lambda: built().build({"f": ()}), "input shape of feature 'f' must be whole numbers"),
    ("rank", ValueError, lambda: called(tf.zeros(2, tf.int32)), r"input_shape of its config, \(None, 4\).*got \(2,\)"),
    ("width", ValueError, lambda: called(WIDE[:, :3]), r"input_shape of its config, \(None, 4\).*got \(2, 3\)"),
    ("too wide", ValueError, lambda: called(SPARSE, None, 3), r"input_shape of its config, \(None, 3\).*got \(2, 4\)"),
    ("strings", ValueError, lambda: called(tf.constant([["a"] * 4])), "feature 'f': .*ids must be integers"),
    ("kind", ValueError, lambda: called(RAGGED, tf.ones((2, 4)), None), "feature 'f': weights must be of the kind"),
    ("of rows", ValueError, lambda: called(WIDE, tf.ones(2)), r"feature 'f': weights must have the shape of their ids"),
    (
        "row lengths",
        tf.errors.InvalidArgumentError,
        lambda: called(tf.ragged.constant([[1, 2], [3]]), tf.RaggedTensor.from_row_splits(tf.ones(3), [0, 1, 3]), None),
        "row lengths of their ids",
    ),
    (
        "places",
        tf.errors.InvalidArgumentError,
        lambda: called(SPARSE, tf.SparseTensor(SPARSE.indices[::-1], tf.ones(8), [2, 4])),
        "indices of their ids",
    ),
    (
        "out of range",
        tf.errors.InvalidArgumentError,
        lambda: called(WIDE + IDS),
        "layer 't': an id must be from 0 to 19",
    ),
]


@pytest.mark.parametrize(("error", "do", "text"), [pytest.param(*rest, id=name) for name, *rest in REFUSED])
def test_what_would_be_wrong_is_refused_by_name(error: type[Exception], do: Callable[[], object], text: str) -> None:
    with pytest.raises(error, match=text):
        do()
