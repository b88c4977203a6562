"""Metrics: those of Keras, which all add up over replicas, and those that do not; see program.py."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from program import Job, Results
from programs_whole import states as states

from tfps.errors import UnsupportedError
from tfps.types import Argument, Library, Structure, Value

M: Library = keras.metrics
ROWS, BATCH = 29, 7


class Largest(M.Metric):
    """A running maximum."""

    def __init__(self, **options: Argument) -> None:
        super().__init__(name="largest")
        self.most = self.add_variable((), "zeros", name="most", **options)

    def update_state(self, y_true: Value, y_pred: Value, sample_weight: Value = None) -> None:
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_pred)))

    def result(self) -> Value:
        return self.most


class Hidden(M.Metric):
    """Adds what it gets in a function of its own, and only of some rows."""

    def __init__(self) -> None:
        super().__init__(name="hidden")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true: Value, y_pred: Value, sample_weight: Value = None) -> None:
        some = tf.cond(tf.reduce_sum(y_pred) > 0, lambda: tf.reduce_sum(y_pred), lambda: tf.zeros([]))
        self.total.assign(keras.ops.where(some > 0, self.total + some, self.total))

    def result(self) -> Value:
        return self.total


def built_in() -> list[list[Structure]]:
    """By what they take: probabilities of classes and one-hot targets, their numbers, yes or no, numbers."""
    return [
        [
            *(M.CategoricalAccuracy(), M.CategoricalCrossentropy(), M.TopKCategoricalAccuracy(k=2), M.F1Score("macro")),
            *(M.FBetaScore(), M.KLDivergence(), M.CosineSimilarity(), M.CategoricalHinge(), M.OneHotMeanIoU(4)),
            *(M.OneHotIoU(4, [0, 2]), M.Poisson()),
        ],
        [
            *(M.SparseCategoricalAccuracy(), M.SparseCategoricalCrossentropy(), M.SparseTopKCategoricalAccuracy(k=2)),
        ],
        [
            *(M.BinaryAccuracy(), M.BinaryCrossentropy(), M.AUC(), M.AUC(curve="PR"), M.Precision(), M.Recall()),
            *(M.TruePositives(), M.FalsePositives(), M.TrueNegatives(), M.FalseNegatives(), M.BinaryIoU()),
            *(M.PrecisionAtRecall(0.5), M.RecallAtPrecision(0.5), M.SensitivityAtSpecificity(0.5), M.Hinge()),
            *(M.SpecificityAtSensitivity(0.5), M.SquaredHinge(), M.Accuracy()),
        ],
        [
            *(M.MeanSquaredError(), M.RootMeanSquaredError(), M.MeanAbsoluteError(), M.R2Score(), M.LogCoshError()),
            *(M.MeanAbsolutePercentageError(), M.MeanSquaredLogarithmicError(), M.PearsonCorrelation(axis=-1)),
            *(M.ConcordanceCorrelation(axis=-1), Hidden()),
        ],
    ]


def built_in_metrics(job: Job) -> Results:
    """In evaluation, whose batches do not divide and of whose last one a replica has no row."""
    random = np.random.default_rng(5)
    classes = random.integers(0, 4, ROWS)
    raw = random.random((ROWS, 4)).astype(np.float32)
    x = raw / raw.sum(-1, keepdims=True)
    targets = [np.eye(4, dtype=np.float32)[classes], classes, (raw[:, :1] > 0.4).astype(np.float32), raw**2 + 0.1]
    inputs = [x, x, raw[:, 1:2], raw]
    results: Results = {}
    for kind, (given, wanted) in enumerate(zip(inputs, targets, strict=True)):
        with job.scope():
            model = keras.Sequential([keras.layers.Input(given.shape[1:]), keras.layers.Identity()])
            metrics = built_in()[kind]
            model.compile(loss="mse" if kind != 1 else "sparse_categorical_crossentropy", metrics=metrics)
        evaluated = model.evaluate(given, wanted, batch_size=BATCH, verbose=0, return_dict=True)
        results.update({f"{kind}/{name}": np.asarray(value) for name, value in evaluated.items()})
    return results


def metrics_that_do_not_add_up(job: Job) -> Results:
    """Are refused by name, but where the program says how replicas are joined."""
    x = np.linspace(0.1, 0.9, 12, dtype=np.float32).reshape(12, 1)
    told: list[str] = []
    for options in ({}, {"aggregation": "mean"}):
        with job.scope():
            model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Identity()])
            model.compile(loss="mse", metrics=[Largest(**options)])
        try:
            model.evaluate(x, x, batch_size=6, verbose=0)
        except UnsupportedError as error:
            told.append("most" if "most" in str(error) and "aggregation" in str(error) else str(error))
    assert told == (["most"] if job.strategy else []), told
    return {}
