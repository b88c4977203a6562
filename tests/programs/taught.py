"""What the programs of this folder share; they run as those of tests/integration/program.py do.

Rows divide neither by two nor by three workers, and the last batch has fewer rows than there are workers.
"""

from __future__ import annotations

import keras
import numpy as np
from program import Results, data, history, weights

from tfps.types import Argument, Callback, Library, Model, Options

L: Library = keras.layers
ROWS, BATCH = 29, 7
OPTIONS: Options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
TOLD = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
__all__ = ["BATCH", "OPTIONS", "ROWS", "TOLD", "L", "digits", "ends", "images", "noise", "roughly"]


def digits(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """[rows, 64] float32 from 0 to 1, and labels."""
    return data(rows)


def images(rows: int = ROWS) -> np.ndarray:
    return data(rows)[0].reshape(-1, 8, 8, 1)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    """The same in every process: passed as data, programs with noise can be compared."""
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def ends(*models: Model, fits: list[Callback] | None = None, **more: Argument) -> Results:
    """Weights and History, which have to be those of plain Keras."""
    return {**weights(*models), **history(*(fits or [])), **more}


def roughly(results: Results) -> Results:
    """Results that are not to be those of plain Keras: equal on all ranks, with losses near its."""
    return {f"ranks {name}": value for name, value in results.items()}
