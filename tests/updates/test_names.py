"""Which numbers in names of variables are Keras' own."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest

from tfps.updates import names


@pytest.mark.parametrize(
    ("name", "common"),
    [
        ("dense/kernel", "dense/kernel"),
        ("sequential_1/dense_4/kernel", "sequential/dense/kernel"),
        ("adam_2/iteration", "adam/iteration"),
        ("seed_generator_3/seed_generator_3_state", "seed_generator/seed_generator_state"),
        ("two/variable_12", "two/variable"),
        ("mean_squared_error_1/total", "mean_squared_error/total"),
        ("Variable", "Variable"),
        # Names that only a user can have given.
        ("hidden_2/kernel", "hidden_2/kernel"),
        ("my_dense_7/kernel", "my_dense_7/kernel"),
        ("dense_7_b/kernel_1", "dense_7_b/kernel_1"),
        ("dense_/kernel", "dense_/kernel"),
        ("_1/kernel", "_1/kernel"),
    ],
)
def test_numbers_that_keras_gives_are_left_out_and_no_others(name: str, common: str) -> None:
    assert names.unnumbered(name) == common


def test_a_class_of_the_user_has_numbers_like_those_of_keras() -> None:
    class MyRNNCell2D(keras.layers.Layer):
        pass

    for _ in range(2):
        assert names.unnumbered(MyRNNCell2D().name) == names._snake("MyRNNCell2D")


def test_classes_are_written_as_keras_writes_them() -> None:
    made = [keras.layers.BatchNormalization(), keras.layers.LSTMCell(1), keras.layers.Conv2DTranspose(1, 1)]
    made += [keras.layers.ReLU(), keras.layers.GlobalAveragePooling1D(), keras.metrics.AUC()]
    if keras.optimizers.AdamW().name != keras.optimizers.AdamW().name:  # Keras 3.8 does not number optimizers
        made.append(keras.optimizers.AdamW())
    for each in made:
        given = type(each)().name if type(each) in (keras.metrics.AUC, keras.layers.ReLU) else each.name
        assert names.unnumbered(given) == names._snake(type(each).__name__)
