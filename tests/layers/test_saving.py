"""Models with tables, saved and loaded in one process; with several workers: test_tables_saving.py."""

from __future__ import annotations

import copy
import pickle
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from jobs import Cluster

import tfps
from tfps.errors import ConfigError, UnsupportedError
from tfps.types import Array, Layer, Model

DIM = 4
IDS = np.random.default_rng(0).integers(-(2**62), 2**62, 50)


def data() -> tuple[Array, Array]:
    random = np.random.default_rng(1)
    return random.choice(IDS, (64, 6)), random.integers(0, 3, 64)


def model_of(rows: int | None = None) -> Model:
    layers = [keras.layers.Input((6,), dtype="int64"), tfps.layers.Embedding(rows, DIM, name="user")]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model


def trained(rows: int | None = None) -> tuple[Model, Layer]:
    model = model_of(rows)
    x, y = data()
    model.fit(x if rows is None else np.abs(x) % rows, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return model, model.layers[0]


def test_a_loaded_model_has_the_rows_and_trains_on_like_the_one_that_was_saved(tmp_path: Path) -> None:
    model, user = trained()
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.layers[0].read_rows(IDS), user.read_rows(IDS))
    for each in (model, loaded):
        each.fit(*data(), batch_size=16, shuffle=False, verbose=0)
    np.testing.assert_array_equal(loaded.layers[0].read_rows(IDS), user.read_rows(IDS))


@pytest.mark.parametrize(
    "order", ["RCL", *(pytest.param(each, marks=pytest.mark.long) for each in ("LC", "RLC", "CRL", "CL"))]
)
def test_slots_come_back_whenever_the_optimizer_gets_known(order: str, tmp_path: Path) -> None:
    """Weights are loaded, rows assigned before that, and the model is compiled."""

    def made() -> Model:
        model = model_of()
        model.layers[-1].trainable = False  # its slots are not in a file of weights
        return keras.Model(model.inputs, model.outputs)

    def compiled(model: Model) -> None:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adagrad(0.5), loss, jit_compile=False)

    def fitted(model: Model) -> Array:
        model.fit(*data(), batch_size=16, shuffle=False, verbose=0)
        rows: Array = model.layers[1].read_rows(IDS)
        return rows

    model, path = made(), tmp_path / "model.weights.h5"
    compiled(model)
    fitted(model)
    model.save_weights(path)
    expected, again = fitted(model), made()
    steps = {
        "R": lambda: again.layers[1].load_rows(IDS, np.ones((len(IDS), DIM))),
        "C": lambda: compiled(again),
        "L": lambda: again.load_weights(path),
    }
    for step in order:
        steps[step]()
    np.testing.assert_array_equal(fitted(again), expected)


def test_a_model_that_was_never_trained_needs_no_folder(tmp_path: Path) -> None:
    model = model_of()
    model.save(tmp_path / "model.keras")
    assert [each.name for each in tmp_path.iterdir()] == ["model.keras"]
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.layers[0].read_rows(IDS), model.layers[0].read_rows(IDS))
    initial = model.layers[0].read_rows(IDS)
    model.save_weights(tmp_path / "model.weights.h5")
    other, _ = trained()
    other.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(other.layers[0].read_rows(IDS), initial)


def test_a_file_holds_a_reference_and_names_the_folder_that_is_missing(tmp_path: Path) -> None:
    model, _ = trained()
    model.save_weights(tmp_path / "model.weights.h5")
    small = (tmp_path / "model.weights.h5").stat().st_size
    model.layers[0].load_rows(np.arange(20_000), np.ones((20_000, DIM)))
    model.save_weights(tmp_path / "model.weights.h5")
    assert (tmp_path / "model.weights.h5").stat().st_size == small
    (tmp_path / "moved").mkdir()
    (tmp_path / "model.weights.h5").rename(tmp_path / "moved" / "model.weights.h5")
    with pytest.raises(ConfigError, match=r"model\.weights\.h5\.tables"):
        model.load_weights(tmp_path / "moved" / "model.weights.h5")
    with pytest.raises(ConfigError, match="tables"):  # never a silent initial value
        model.predict(data()[0], verbose=0)
    (tmp_path / "model.weights.h5.tables").rename(tmp_path / "moved" / "model.weights.h5.tables")
    model.load_weights(tmp_path / "moved" / "model.weights.h5")
    np.testing.assert_array_equal(model.layers[0].read_rows(np.array([7])), np.ones((1, DIM)))


def test_a_save_that_is_interrupted_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, user = trained()
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    before = user.read_rows(IDS)
    model.fit(*data(), verbose=0)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(keras.layers.Dense, "save_own_variables", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        model.save_weights(tmp_path / "other.weights.h5")
    model.load_weights(path)
    np.testing.assert_array_equal(user.read_rows(IDS), before)
    model.save_weights(path)
    assert len(list((tmp_path / "model.weights.h5.tables").iterdir())) == 1


def test_what_cannot_have_rows_beside_it_is_refused(tmp_path: Path) -> None:
    model, _ = trained()
    with pytest.raises(UnsupportedError, match=r"model\.save"):
        pickle.dumps(model)
    with pytest.raises(UnsupportedError, match=r"\.keras"):
        model.save(tmp_path / "model.h5")
    with pytest.raises(UnsupportedError, match="path"):
        model.save("gs://bucket/model.keras")
    with pytest.raises(UnsupportedError, match="to_embedding"):
        model.export(tmp_path / "exported")
    with pytest.raises(UnsupportedError, match="to_embedding"):
        tf.saved_model.save(model, str(tmp_path / "saved"))
    for copied in (copy.copy, copy.deepcopy):
        with pytest.raises(UnsupportedError, match=r"model\.save"):
            copied(model.layers[0])
    for saved in ({"model": model}, {"optimizer": model.optimizer}):
        with pytest.raises(UnsupportedError, match=r"user/rows'.*model\.save"):
            tf.train.Checkpoint(**saved).write(str(tmp_path / "checkpoint"))
    plain = keras.Sequential([keras.Input((6,), dtype="int64"), keras.layers.Embedding(9, DIM, name="user")])
    plain.save_weights(tmp_path / "plain.weights.h5")
    with pytest.raises(ValueError, match="load_rows"):
        keras.Sequential([keras.Input((6,), dtype="int64"), model.layers[0]]).load_weights(
            tmp_path / "plain.weights.h5"
        )
    model.compile(keras.optimizers.Adam(use_ema=True), model.loss, jit_compile=False)
    with pytest.raises(UnsupportedError, match="use_ema"):
        model.fit(*data(), verbose=0, callbacks=[keras.callbacks.SwapEMAWeights()])


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def test_tables_go_from_one_number_of_pservers_to_another(cluster: Cluster, tmp_path: Path) -> None:
    def build(pservers: int) -> tuple[tfps.Strategy, Model]:
        strategy = tfps.Strategy(cluster.pservers(pservers, 1))
        cluster.callback(strategy.close)
        with strategy.scope():
            return strategy, model_of()

    strategy, model = build(2)
    x, y = data()
    model.fit(x[:32], y[:32], batch_size=16, shuffle=False, verbose=0)
    strategy.save_tables(tmp_path)
    model.fit(x[:16], y[:16], batch_size=16, shuffle=False, verbose=0)
    strategy.save_tables(tmp_path, incremental=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["000001", "000002", "tables.json"]
    rows = model.layers[0].read_rows(IDS)
    model.save(tmp_path / "model.keras")
    for pservers in (1, 3):
        other, again = build(pservers)
        again.layers[0].optimizer = None
        other.restore_tables(tmp_path)
        np.testing.assert_array_equal(again.layers[0].read_rows(IDS), rows)
        with other.scope():
            loaded = keras.models.load_model(tmp_path / "model.keras")
        np.testing.assert_array_equal(loaded.layers[0].read_rows(IDS), rows)
    strategy.save_tables(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir() if each.name.isdigit()) == ["000003"]
    with pytest.raises(ConfigError, match=r"tables\.json"):
        strategy.restore_tables(tmp_path / "000003")


def test_rows_are_exported_for_other_programs(tmp_path: Path) -> None:
    _, user = trained()
    user.export_rows(tmp_path / "user.npz")
    with np.load(tmp_path / "user.npz") as found:
        ids, rows = found["ids"], found["rows"]
    np.testing.assert_array_equal(ids, np.unique(data()[0]))
    np.testing.assert_array_equal(rows, user.read_rows(ids))
    user.export_rows(tmp_path / "user.safetensors")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["user.npz", "user.safetensors"]
    with pytest.raises(ConfigError, match="npz"):
        user.export_rows(tmp_path / "user.csv")


def test_safetensors_reads_what_is_exported(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    _, user = trained()
    user.export_rows(tmp_path / "user.safetensors")
    found = library.load_file(tmp_path / "user.safetensors")
    np.testing.assert_array_equal(found["rows"], user.read_rows(found["ids"]))


def test_a_fixed_table_becomes_a_layer_of_keras(tmp_path: Path) -> None:
    model, user = trained(30)
    x = np.abs(data()[0]) % 30
    served = keras.Sequential([model.inputs[0], user.to_embedding(), *model.layers[1:]])
    np.testing.assert_array_equal(served.predict(x, verbose=0), model.predict(x, verbose=0))
    user.export_rows(tmp_path / "user.npz")
    with np.load(tmp_path / "user.npz") as found:
        np.testing.assert_array_equal(found["rows"], user.read_rows(np.arange(30)))
    with pytest.raises(ConfigError, match="any id"):
        trained()[1].to_embedding()


_LIMITED = """
import os, resource, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, numpy as np, tfps
strategy = tfps.Strategy([sys.argv[1]])
with strategy.scope():
    user = tfps.layers.Embedding(50_000_000, 16, optimizer=keras.optimizers.Adagrad(0.1))
    layers = [keras.layers.Input((8,), dtype="int64"), user, keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", jit_compile=False)
x, y = np.random.default_rng(0).integers(0, 50_000_000, (640, 8)), np.ones((640, 1))
model.fit(x[:64], y[:64], batch_size=64, verbose=0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model.fit(x, y, batch_size=64, epochs=2, verbose=0)
model.evaluate(x, y, verbose=0)
model.save(sys.argv[2])
keras.models.load_model(sys.argv[2]).predict(x, verbose=0)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.long
def test_nothing_of_the_size_of_a_table_is_on_a_worker_or_in_a_file(cluster: Cluster, tmp_path: Path) -> None:
    """The table has 3.2 GB of rows and as many of slots; most of them are never touched."""
    address, path = cluster.pserver(1, max_memory=2**40).address, tmp_path / "model.keras"
    command = [sys.executable, "-c", _LIMITED, address, str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert int(found.stdout.split()[-1]) < 300  # MB more; of the table there would be 3,000
    assert path.stat().st_size < 100_000
    assert sum(each.stat().st_size for each in tmp_path.rglob("*.npz")) < 5e6
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4e6  # this process has the pserver
