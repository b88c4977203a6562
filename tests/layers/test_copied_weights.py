"""Where Keras copies weights, rows come along as a dense layer's do, or what cannot have them is refused by name."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from jobs import Cluster

import tfps
from tfps.errors import UnsupportedError
from tfps.types import Argument, Array, Layer, Model

ROWS, DIM = 48, 4
X = np.tile(np.arange(ROWS).reshape(16, 3), (4, 1))  # each id once in each batch: lazy rules are Keras'
Y = (X.sum(1, keepdims=True) % 7).astype(np.float32)
OPTIONS = {"batch_size": 16, "shuffle": False, "verbose": 0}
KINDS: dict[str, Callable[[], Layer]] = {
    "keras": lambda: keras.layers.Embedding(ROWS, DIM, embeddings_initializer="ones", name="embedding"),
    "fixed": lambda: tfps.layers.Embedding(ROWS, DIM, embeddings_initializer="ones", name="embedding"),
    "any": lambda: tfps.layers.Embedding(None, DIM, embeddings_initializer="ones", name="embedding"),
}
KIND = pytest.mark.parametrize("kind", [pytest.param("fixed", marks=pytest.mark.long), "any"])


def built(kind: str) -> Model:
    inputs = keras.Input((3,), dtype="int64")
    dense = keras.layers.Dense(1, kernel_initializer=keras.initializers.RandomNormal(seed=1))
    model = keras.Model(inputs, dense(keras.layers.Flatten()(KINDS[kind]()(inputs))))
    model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)
    return model


def rows_of(model: Model) -> Array:
    (layer,) = (each for each in model.layers if "embedding" in each.name)
    is_table = isinstance(layer, tfps.layers.Embedding)
    found: Array = layer.read_rows(np.arange(ROWS)) if is_table else np.asarray(layer.embeddings)
    return found


def best_weights(model: Model) -> list[Array]:
    """Trains past the best epoch, goes back to that, and on from there: slots stay."""
    stop = keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True)
    model.fit(X, Y, epochs=12, validation_data=(X[:16], Y[:16] + 3), callbacks=[stop], **OPTIONS)
    assert stop.stopped_epoch > stop.best_epoch
    found = [rows_of(model), model.predict(X, verbose=0)]
    model.fit(X, Y, epochs=2, **OPTIONS)
    return [*found, rows_of(model), model.predict(X, verbose=0)]


def folds(model: Model) -> list[Array]:
    """Each fold begins with what was there at first; what each has come to is used once more in the end."""
    initial, found, ends = model.get_weights(), [], []
    for _ in range(2):
        model.set_weights(copy.deepcopy(initial))
        found.append(rows_of(model))
        model.fit(X, Y, epochs=2, **OPTIONS)
        ends.append([each.copy() for each in model.get_weights()])
    for weights in ends:
        model.set_weights(weights)
        found.append(rows_of(model))
    return found


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@contextlib.contextmanager
def on_pservers(cluster: Cluster) -> Iterator[None]:
    strategy = tfps.Strategy(cluster.pservers(2, 1))
    try:
        with strategy.scope():
            yield
    finally:
        strategy.close()


@KIND
@pytest.mark.parametrize("program", [best_weights, folds])
def test_weights_come_back_as_in_keras(kind: str, program: Callable[[Model], list[Array]], cluster: Cluster) -> None:
    expected = program(built("keras"))
    found = program(built(kind))
    with on_pservers(cluster):
        remote = program(built(kind))
    for plain, own, there in zip(expected, found, remote, strict=True):
        np.testing.assert_allclose(own, plain, rtol=0, atol=2e-6)
        np.testing.assert_allclose(there, plain, rtol=0, atol=2e-6)


def test_what_has_no_rows_is_not_assigned() -> None:
    model, other = built("any"), built("any")
    for each in (model, other):
        each.fit(X, Y, **OPTIONS)
    weights = model.get_weights()
    rows = rows_of(model)
    refused: dict[str, list[Argument]] = {
        "computed": [(a + b) / 2 for a, b in zip(weights, weights, strict=True)],
        "arrays": [np.array(each) for each in weights],
        "from a file": pickle.loads(pickle.dumps(weights)),
        "of another model": other.get_weights(),
    }
    for values in refused.values():
        with pytest.raises(UnsupportedError, match=r"'embedding.*/rows'.*save_weights\(\) and load_weights\(\)"):
            model.set_weights(values)
    (own, theirs) = (each.layers[1].weights[0] for each in (model, other))
    matrix = [np.ones((ROWS, DIM), np.float32)]
    for assign in (
        *(lambda: own.assign(theirs), lambda: own.assign_add(np.ones((1, DIM)))),
        lambda: model.layers[1].set_weights(matrix),
    ):
        with pytest.raises(UnsupportedError, match="load_rows"):
            assign()
    model.layers[1].set_weights(model.layers[1].get_weights())
    np.testing.assert_array_equal(rows_of(model), rows)


def test_no_program_reads_the_variable_of_a_table_as_if_it_had_rows(tmp_path: Path) -> None:
    model = built("fixed")
    model.fit(X, Y, **OPTIONS)
    variable = model.layers[1].trainable_variables[0]
    for read in (np.asarray, keras.ops.convert_to_numpy, tf.convert_to_tensor, tf.reduce_sum):
        with pytest.raises(UnsupportedError, match="read rows by embeddings"):
            read(variable)
    with pytest.raises(UnsupportedError, match="histogram_freq=0"):
        model.fit(X, Y, callbacks=[keras.callbacks.TensorBoard(tmp_path, histogram_freq=1)], **OPTIONS)


def test_parameters_are_those_of_rows(cluster: Cluster) -> None:
    """Of a table for any id those that there are."""
    plain, fixed = built("keras"), built("fixed")
    assert fixed.count_params() == plain.count_params()
    lines: list[str] = []
    fixed.summary(print_fn=lines.append)
    assert "205 (820.00 B)" in "".join(lines)
    assert [each.count_params() for each in fixed.layers] == [each.count_params() for each in plain.layers]
    with on_pservers(cluster):
        model = built("any")
        assert model.layers[1].count_params() == 0
        model.fit(X[:5], Y[:5], **OPTIONS)
        assert model.layers[1].count_params() == 15 * DIM
        assert model.count_params() == 15 * DIM + plain.layers[-1].count_params()


def test_pservers_forget_what_no_program_holds(cluster: Cluster) -> None:
    """At the latest where rows are looked up outside of a step."""
    pserver = cluster.pserver(1)
    strategy = tfps.Strategy([pserver.address])
    cluster.callback(strategy.close)
    with strategy.scope():
        model = built("any")
    model.fit(X, Y, **OPTIONS)

    def memory() -> int:
        (about,) = pserver.status().tables
        return int(about.memory_bytes)

    before = memory()
    weights = model.get_weights()
    model.fit(X, Y, **OPTIONS)
    assert memory() > before + ROWS * DIM * 4
    del weights
    model.fit(X, Y, **OPTIONS)
    assert memory() == before
