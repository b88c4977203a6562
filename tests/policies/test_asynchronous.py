"""Mode "async" with one worker is mode "sync"; with several, tests/integration/test_async.py."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import training

import tfps
from tfps.pserver.server import ParameterServer
from tfps.types import Array, Options

CONFIG = tfps.Config(
    update="server", mode="async", staleness=0, delay_compensation=0.5, slice_bytes=4096, window_bytes=16384
)
BUILDS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize(("name", "pservers"), [pytest.param("SGD", 2, marks=pytest.mark.long), ("Adam", 0)])
def test_one_worker_ends_bitwise_where_plain_keras_ends(name: str, pservers: int) -> None:
    servers = [ParameterServer("127.0.0.1", 0, workers=1) for _ in range(pservers)]
    strategy = tfps.Strategy([server.address for server in servers] or None, config=CONFIG)
    options: Options = {"steps_per_execution": 2, "jit_compile": False}
    try:
        assert training.train(strategy, BUILDS[name], **options) == training.train(None, BUILDS[name], **options)
        strategy.synchronize()  # there is nobody else
    finally:
        strategy.close()
        for server in servers:
            server.stop()


#: Codec -> how far weights may end from plain Keras, relative to the largest of the variable. "topk" and "onebit" are
#: late by some steps.
CODECS = {"bfloat16": 0.05, "int8": 0.05, "topk:0.25": 0.3, "onebit": 0.3}


def fitted(strategy: tfps.Strategy | None) -> keras.Model:
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model, x, y = training.mlp(128)  # large enough to be compressed
        model.compile(keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=64, epochs=2, shuffle=False, verbose=0)
    return model


@pytest.fixture(scope="module")
def plain() -> list[Array]:
    return [np.asarray(each) for each in fitted(None).get_weights()]


@pytest.mark.parametrize(
    "codec", [pytest.param(name, marks=[pytest.mark.long] * (name in ("int8", "onebit"))) for name in CODECS]
)
def test_one_worker_with_a_codec_has_the_parameters_of_its_pservers_and_ends_near_plain_keras(
    codec: str, plain: list[Array]
) -> None:
    """Only gradients are encoded: the reply has whole parameters, which replace those of the worker."""
    servers = [ParameterServer("127.0.0.1", 0, workers=1) for _ in range(2)]
    config = dataclasses.replace(CONFIG, compression=codec)
    strategy = tfps.Strategy([server.address for server in servers], config=config)
    try:
        model = fitted(strategy)
        for weight, expected in zip(model.trainable_variables, plain, strict=True):
            own, served = weight.numpy(), weight.value.remote
            kept = strategy.extended.exchange.state.read(served.holder, 0, served.begin, own.nbytes)
            assert kept.tobytes() == own.tobytes(), weight.path
            assert np.abs(own - expected).max() <= CODECS[codec] * np.abs(expected).max(), weight.path
        assert model.get_weights()[0].tobytes() != plain[0].tobytes(), "nothing was compressed"
    finally:
        strategy.close()
        for server in servers:
            server.stop()
