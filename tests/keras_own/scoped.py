"""A pytest plugin for Keras' own tests: runs each in the scope of a strategy, entered when `setUp` is over.

`setUp` clears the session, which would end a scope that was entered before.

KERAS_OWN_STRATEGY is what tests run in: "tfps", of one worker; "mirrored"; "plain", no scope. KERAS_OWN_RESULTS is the
file that gets what became of each, as JSON: {"module::class::test": "" or its error}; KERAS_OWN_WITHOUT names such that
are not run, a JSON list.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
import unittest
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

METHOD = "_callTestMethod"  # of unittest: called between setUp and tearDown
OUTCOMES: dict[str, str] = {}


def pytest_configure(config: pytest.Config) -> None:
    import tensorflow as tf

    import tfps

    kind = os.environ["KERAS_OWN_STRATEGY"]
    if kind == "plain":
        return
    if kind == "tfps":
        strategy = tfps.Strategy(devices=["CPU:0"])
        config.add_cleanup(strategy.close)
    else:
        strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    call = getattr(unittest.TestCase, METHOD)

    def in_scope(self: unittest.TestCase, method: Callable[[], None]) -> None:
        with strategy.scope():
            call(self, method)

    setattr(unittest.TestCase, METHOD, in_scope)


def pytest_collection(session: pytest.Session) -> None:
    """Some modules import JAX at their top, for tests that are skipped with TensorFlow."""
    if importlib.util.find_spec("jax") is None:
        sys.modules["jax"] = types.ModuleType("jax")


def pytest_collection_finish(session: pytest.Session) -> None:
    if getattr(sys.modules.get("jax"), "__spec__", None) is None:
        sys.modules.pop("jax", None)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    without = json.loads(os.environ.get("KERAS_OWN_WITHOUT", "[]"))
    items[:] = [item for item in items if name_of(item) not in without]


def name_of(item: pytest.Function) -> str:
    module = item.module.__name__.removeprefix("keras.src.")
    return f"{module}::{item.cls.__name__ if item.cls else ''}::{item.name}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and not report.skipped:
        OUTCOMES[name_of(item)] = ""
    if report.failed and call.excinfo is not None:
        OUTCOMES[name_of(item)] = f"{call.excinfo.typename}: {call.excinfo.value}"
    if call.excinfo is not None and call.excinfo.errisinstance(ModuleNotFoundError):  # JAX, PyTorch, grain
        OUTCOMES.pop(name_of(item), None)
    return report


def pytest_sessionfinish() -> None:
    Path(os.environ["KERAS_OWN_RESULTS"]).write_text(json.dumps(OUTCOMES), encoding="utf-8")
