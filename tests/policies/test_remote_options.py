"""Update on the server: options of optimizers end where plain Keras ends, with each rule.

Those with Adam are in test_remote_bucket.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf
import training
from _pytest.mark import ParameterSet
from keras_versions import KERAS_3_8

import tfps
from tfps.types import Argument, Options

SERVER = tfps.Config(update="server", slice_bytes=4096, window_bytes=16384)
SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)
AVERAGE = {"use_ema": True, "ema_momentum": 0.9}
OPTIONS: dict[str, dict[str, Argument]] = {
    "accumulated": {
        "gradient_accumulation_steps": 2,
        "global_clipnorm": 0.1,
        "weight_decay": 0.01,
        "learning_rate": SCHEDULE,
        "loss_scale_factor": 1024.0,
    },
    "averaged": {
        **AVERAGE,
        "ema_overwrite_frequency": 3,
        "clipnorm": 0.1,
        "weight_decay": 0.01,
        "learning_rate": SCHEDULE,
    },
    "weight_decay": {"weight_decay": 0.01},
    "average": AVERAGE,
    "schedule": {"learning_rate": SCHEDULE},
    "clipvalue": {"clipvalue": 0.01},
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "accumulation": {"gradient_accumulation_steps": 3},
    "loss_scale": {"loss_scale_factor": 1024.0},
}
BITWISE = ("SGD", "Nadam", "Ftrl", "Lion", "Adamax")
CLOSE = ("RMSprop", "Adagrad", "Adadelta")
# Their options have all of the others, and each kind of rule is in one of them; what remains is long.
QUICK = (("Nadam", "averaged"),)


def reordered(name: str, options: str) -> bool:
    """Whether plain Keras has products with the learning rate in one graph, which TensorFlow reorders there.

    Not with Ftrl, whose rule has the order that TensorFlow makes, and whose decay has the same bits in either one here.
    """
    clipped = options in ("accumulated", "global_clipnorm", "accumulation")
    return name != "Ftrl" and ("weight_decay" in OPTIONS[options] or (name == "SGD" and clipped))


def cases(names: tuple[str, ...]) -> list[ParameterSet]:
    newer = pytest.mark.skipif(KERAS_3_8, reason="Keras 3.8 creates these slots without naming their variable")
    marks = {
        (name, options): [
            *([newer] if name in ("Ftrl", "Adagrad") else []),
            *([] if (name, options) in QUICK else [pytest.mark.long]),
        ]
        for name in names
        for options in OPTIONS
    }
    return [pytest.param(*case, marks=found) for case, found in marks.items()]


@pytest.fixture
def here() -> Iterator[tfps.Strategy]:
    strategy = tfps.Strategy(config=SERVER)
    yield strategy
    strategy.close()


@pytest.fixture
def as_written() -> Iterator[None]:
    """TensorFlow computes products in the order in which the program has them."""
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    yield
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": True})


def built(name: str, options: str) -> Callable[[], keras.optimizers.Optimizer]:
    return lambda: getattr(keras.optimizers, name)(**OPTIONS[options])


@pytest.mark.parametrize(("name", "options"), cases(BITWISE))
def test_options_end_bitwise_equal_to_plain_keras(
    request: pytest.FixtureRequest, here: tfps.Strategy, name: str, options: str
) -> None:
    if reordered(name, options):
        request.getfixturevalue("as_written")
    assert training.train(here, built(name, options)) == training.train(None, built(name, options))


def check_close(ends: list[bytes], expected: list[bytes]) -> None:
    """The weights, which come first, are within a millionth."""
    for mine, plain in zip(ends[:6], expected[:6], strict=True):
        one, other = (np.frombuffer(each, np.float32) for each in (mine, plain))
        assert np.abs(one - other).max() <= 1e-6 * np.abs(other).max()


@pytest.mark.parametrize(("name", "options"), cases(CLOSE))
def test_options_are_within_a_millionth_after_50_steps(here: tfps.Strategy, name: str, options: str) -> None:
    epochs: Options = {"epochs": 10}  # of 5 steps
    check_close(*(training.train(each, built(name, options), **epochs) for each in (here, None)))


def decaying(name: str, *excluded: str) -> Callable[[], keras.optimizers.Optimizer]:
    def build() -> keras.optimizers.Optimizer:
        made = getattr(keras.optimizers, name)(weight_decay=0.1, learning_rate=SCHEDULE)
        if excluded:
            made.exclude_from_weight_decay(var_names=list(excluded))
        return made

    return build


NAMES = ["AdamW", *(pytest.param(each, marks=pytest.mark.long) for each in ("SGD", "Nadam", "Lion"))]


@pytest.mark.parametrize("name", NAMES)
def test_variables_that_do_not_decay_end_bitwise_equal_to_plain_keras(
    as_written: None, here: tfps.Strategy, name: str
) -> None:
    ends = training.train(here, decaying(name, "bias"))
    assert ends == training.train(None, decaying(name, "bias"))
    assert ends != training.train(None, decaying(name))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_decay_whose_factors_tensorflow_reorders_is_within_a_millionth(here: tfps.Strategy, name: str) -> None:
    check_close(training.train(here, decaying(name)), training.train(None, decaying(name)))
