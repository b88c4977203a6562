"""Ranks compare what they have when they leave; what they find is in tests/integration/test_divergence.py."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import companion
import jobs
import keras
import pytest
import training

import tfps
from tfps.errors import MismatchError, TfpsError, WorkerLostError


@pytest.mark.parametrize("error", [MismatchError("no longer alike"), WorkerLostError("rank 1 left")])
def test_a_rank_that_leaves_raises_a_difference_that_another_one_has_found_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, error: TfpsError
) -> None:
    config = tfps.Config(step_timeout_s=jobs.DEADLINE_S)
    with companion.strategy_with_companion(monkeypatch, config, check_every=1000) as (strategy, other):
        with strategy.scope():
            variables = training.mlp()[0].trainable_variables
            optimizer = keras.optimizers.SGD(0.01)
        strategy.run(lambda: optimizer.apply([0 * each for each in variables], variables))
        other.holds = lambda spec: spec.name == "states of the ranks"

        def fail() -> None:
            assert other.wait_held()
            other.fail(error)

        closed, _ = jobs.attempt(strategy.close, fail)
    if isinstance(error, MismatchError):
        assert isinstance(closed, MismatchError)
        assert str(closed).endswith("no longer alike")
    else:
        assert closed is None
