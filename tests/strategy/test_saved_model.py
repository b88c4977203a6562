"""SavedModels, with every kind of signature, load where there is no tfps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf
import training

import tfps
from tfps.types import Function, Value

ROWS = tf.TensorSpec([None, 64], tf.float32, name="rows")
LOAD = """
import sys
import numpy as np
import tensorflow as tf
rows = tf.constant(np.load(sys.argv[1]))
for path in sys.argv[2:]:
    tf.saved_model.load(path)
    loaded = tf.saved_model.load(path)  # twice: no state is shared that one could take from the other
    results = [loaded(rows)] if callable(loaded) else []
    for signature in loaded.signatures.values():
        (name,) = signature.structured_input_signature[1]
        results += [each for _ in range(10) for each in signature(**{name: rows}).values()]
    np.save(path + ".npy", np.stack(results))
assert "tfps" not in sys.modules
"""


class Holder(tf.Module):
    """Has a model and functions that use it."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        self.model = model

    @tf.function(input_signature=[ROWS])
    def __call__(self, rows: Value) -> Value:
        return self.model(rows)

    @tf.function(input_signature=[ROWS])
    def named(self, rows: Value) -> dict[str, Value]:
        return {"logits": self.model(rows, training=False)}


@pytest.mark.long
def test_every_kind_of_signature_is_saved_and_loads_without_tfps(strategy: tfps.Strategy, tmp_path: Path) -> None:
    model, x, y = training.compiled(strategy)
    model.fit(x, y, batch_size=64, verbose=0)
    function = tf.function(lambda rows: {"logits": model(rows)})
    concrete, holder, save = function.get_concrete_function(ROWS), Holder(model), tf.saved_model.save
    ways: dict[str, Function] = {
        "concrete": lambda path: save(model, path, signatures=concrete),
        "several": lambda path: save(model, path, signatures={"serving_default": concrete, "other": concrete}),
        "default": lambda path: save(model, path),
        "module": lambda path: save(holder, path),
        "function": lambda path: save(holder, path, signatures=holder.named),
        "functions": lambda path: save(holder, path, signatures={"a": holder.named, "b": concrete}),
        "module concrete": lambda path: save(holder, path, signatures=holder.named.get_concrete_function()),
        "export": lambda path: model.export(path, verbose=False),
    }
    paths = [str(tmp_path / name) for name in ways]
    for path, way in zip(paths, ways.values(), strict=True):
        way(path)
    np.save(tmp_path / "rows.npy", x[:20])
    environment = {**os.environ, "PYTHONPATH": ""}
    command = [sys.executable, "-c", LOAD, str(tmp_path / "rows.npy"), *paths]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, cwd=tmp_path)
    assert not ended.returncode, ended.stderr
    expected = model.predict(x[:20], verbose=0)
    for path in paths:
        results = np.load(f"{path}.npy")
        assert len(results), path
        assert all(result.tobytes() == expected.tobytes() for result in results), path
    model.fit(x, y, batch_size=64, verbose=0)  # saved gates are not those of the program
