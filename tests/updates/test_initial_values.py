"""Rank 0's values on their way: in batches, with a line of progress on rank 0 where that takes long."""

from __future__ import annotations

import logging
import math
import os
import threading

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import companion
import jobs
import numpy as np
import pytest
import tensorflow as tf

import tfps
from tfps.exchange.interface import BucketSpec
from tfps.types import Variable
from tfps.updates import initial_values
from tfps.worker import client

MB = 10**6


def test_rank_0_says_how_far_its_values_are_and_whom_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(initial_values, "_LINE_AFTER_S", math.inf)
    monkeypatch.setattr(client, "PATIENCE_S", 0.3)
    monkeypatch.setattr(initial_values, "_BATCH_BYTES", MB)
    config = tfps.Config(slice_bytes=2**16, window_bytes=2**18, connect_timeout_s=jobs.DEADLINE_S)
    rows = np.arange(250_000, dtype=np.float32)
    with (
        caplog.at_level(logging.INFO, "tfps"),
        companion.strategy_with_companion(monkeypatch, config) as (strategy, other),
    ):
        with strategy.scope():
            variables = [tf.Variable(rows * factor) for factor in (1, 2, 3)]  # 1 MB each: a batch

        def holds(spec: BucketSpec) -> bool:
            second = spec.name == "initial values" and [s.name for s in other.specs].count(spec.name) == 2
            if second:
                monkeypatch.setattr(initial_values, "_LINE_AFTER_S", 0.3)  # however long the first has taken
            return second

        def waits() -> bool:
            lines = [record.getMessage() for record in caplog.records]
            return any(line.startswith("tfps: waits for rank 1 (") and "of initial values" in line for line in lines)

        other.holds = holds
        running = threading.Thread(target=lambda: strategy.run(lambda: None))
        running.start()
        jobs.poll(lambda: "MB" in caplog.text and waits())
        assert other.wait_held()
        other.release()
        running.join(jobs.DEADLINE_S)
        assert not running.is_alive()
        for variable, factor in zip(variables, (1, 2, 3), strict=True):
            np.testing.assert_array_equal(variable.numpy(), rows * factor)
        others = ("batches", "random states")
        assert [spec.name for spec in other.specs if spec.name not in others] == ["initial values"] * 3
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(", about")[0] for line in lines if "MB" in line] == ["tfps: initial values: 1 of 3 MB"]


def test_the_work_grows_with_the_number_of_variables_and_not_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    nbytes = initial_values._nbytes

    def counted(variable: Variable) -> int:
        nonlocal calls
        calls += 1
        return nbytes(variable)

    monkeypatch.setattr(initial_values, "_nbytes", counted)
    config = tfps.Config(connect_timeout_s=jobs.DEADLINE_S)
    with companion.strategy_with_companion(monkeypatch, config) as (strategy, _):
        for count in (20, 80):
            with strategy.scope():
                variables = [tf.Variable(1.0) for _ in range(count)]
            calls = 0
            strategy.run(lambda: None)
            assert calls <= 5 * len(variables)
