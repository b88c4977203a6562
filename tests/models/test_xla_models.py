"""The models of test_small_models.py with `jit_compile=True`: one worker ends with the weights of plain Keras with XLA.

Optimizers are SGD with momentum, as Adam would make large steps of rounding where gradients are small.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import keras
import numpy as np
import pytest
import small_models
from program import Job, Results
from test_small_models import MODELS, needs

import tfps
from tfps.types import Argument, Callback, Model

SAME = 1e-6  # of the largest weight
# This makes 8e-5 of a rounding of its first weights in plain Keras alone: that times this is the limit.
GROWING = {"retinanet": 10.0}
# mobilenet makes 0.2 of it: batch normalization, where pictures have come down to one point. The others are built
# alike, and were not measured.
WITHOUT = {"mobilenet", "efficientnet", "densenet", "nasnet", "efficientnet_v2"}


def trained(name: str, folder: Path, strategy: tfps.Strategy | None = None) -> Results:
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    folder.mkdir()
    job = Job(folder)
    job.strategy = strategy
    results: Results = getattr(small_models, name)(job)
    return {key.removeprefix("ranks "): value for key, value in results.items()}


def difference(one: Results, other: Results) -> float:
    """Of the weights, over the largest of them."""
    names = [key for key in other if key.startswith("weights") and np.size(other[key])]
    largest = max(float(np.abs(other[key]).max()) for key in names)
    return max(float(np.abs(np.asarray(one[key], "float64") - other[key]).max()) for key in names) / largest


def shake(model: Model) -> None:
    """Changes weights to the next number that there is."""
    model.set_weights([np.nextafter(each, np.float32(9)) for each in model.get_weights()])


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("library", "name"),
    [
        pytest.param(library, name, marks=needs(library), id=name)
        for library, names in MODELS.items()
        for name in names
        if name not in WITHOUT
    ],
)
def test_models_of_libraries_end_as_in_plain_keras_with_xla(
    library: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_models, "JIT_COMPILE", True)
    importlib.import_module(library)  # which draws random numbers
    # One size of batches, as XLA compiles for each, and no batch of one row, whose normalization is of rounding.
    monkeypatch.setattr(small_models, "ROWS", 12)
    monkeypatch.setattr(small_models, "BATCH", 6)
    monkeypatch.setitem(small_models.OPTIONS, "batch_size", 6)
    strategy = tfps.Strategy(config=tfps.Config(xla_part_bytes=2048))
    own, plain = trained(name, tmp_path / "own", strategy), trained(name, tmp_path / "plain")
    parts = [len(each.parts) for each in strategy.extended.compiled.made if each.trains]
    strategy.close()
    assert max(parts) > 1
    limit = SAME
    if name in GROWING:
        fit = keras.Model.fit

        def fit_shaken(model: Model, *args: Argument, **options: Argument) -> Callback:
            shake(model)
            return fit(model, *args, **options)

        monkeypatch.setattr(keras.Model, "fit", fit_shaken)
        limit = GROWING[name] * difference(trained(name, tmp_path / "shaken"), plain)
    print(f"{name}: {difference(own, plain):.1e} of {limit:.1e}, {max(parts)} parts")
    assert difference(own, plain) < limit
