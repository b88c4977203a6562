"""Mode "async" with one worker is mode "sync"; with several, tests/integration/test_async.py."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import training

import tfps
from tfps.pserver.server import ParameterServer
from tfps.types import Options

CONFIG = tfps.Config(
    update="server", mode="async", staleness=0, delay_compensation=0.5, slice_bytes=4096, window_bytes=16384
)
BUILDS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize(("name", "pservers"), [("SGD", 2), ("Adam", 0)])
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
