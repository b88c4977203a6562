"""What a worker tells while it compiles: only if that takes long, and until it is over."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from jobs import DEADLINE_S, poll

from tfps.errors import ClosedError
from tfps.runtime import first_runs
from tfps.runtime.first_runs import Compiling, FirstRuns


def message(runs: FirstRuns, run: int, sizes: tuple[int, ...] = (), times: tuple[float, ...] = ()) -> None:
    data = tf.constant(np.array(sizes, np.int64).view(np.uint8))
    runs.collect(tf.constant(run, tf.int64), data, tf.constant([], tf.uint8), tf.constant(times, tf.float64))


def test_what_takes_long_is_told_once_and_that_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_runs, "SHORT_S", 0.01)
    told: list[bool] = []
    compiling = Compiling(told.append, DEADLINE_S)
    for run in (1, 2):
        compiling.began(run)
    poll(lambda: told == [True])
    compiling.ended(1)
    assert told == [True]
    compiling.ended(2)
    poll(lambda: told == [True, False])
    compiling.began(3)
    poll(lambda: told == [True, False, True])
    compiling.ended(3)
    poll(lambda: compiling._thread is None)


def test_what_is_short_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_runs, "SHORT_S", DEADLINE_S)
    told: list[bool] = []
    compiling = Compiling(told.append, DEADLINE_S)
    compiling.began(1)
    compiling.ended(1)
    poll(lambda: compiling._thread is None)
    assert told == []


def test_a_run_that_fails_is_over_after_the_limit_and_a_job_that_has_ended_is_no_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_runs, "SHORT_S", 0.01)
    told: list[bool] = []

    def tell(now: bool) -> None:
        told.append(now)
        raise ClosedError("the job has ended")

    Compiling(tell, limit_s=0.01).began(1)
    poll(lambda: told == [True, False])
    assert "Traceback" not in capfd.readouterr().err


def test_first_runs_are_those_with_new_sizes_and_parts_that_run_at_the_same_time_count_once() -> None:
    news: list[int] = []
    runs = FirstRuns(Compiling(lambda now: None, 1.0), lambda: news.append(len(runs.sizes)))
    message(runs, 7, (1, 32, 4))
    message(runs, 7, times=(100.0, 102.0, 101.0, 104.0))
    message(runs, 8, (1, 16, 4))
    message(runs, 9, (1, 32, 4))  # known: only other than in the last run
    message(runs, 9, times=(300.0, 301.0, 300.0, 301.0))
    assert (runs.sizes, news) == ([(1, 32, 4), (1, 16, 4)], [1, 2])
    assert (runs.seconds, runs.seconds_of(0), runs.seconds_of(1)) == (4.0, 2.0, 3.0)
    message(runs, 8, times=(200.0, 200.5, 201.0, 200.0))  # a clock that is set back counts as nothing
    assert (runs.seconds, runs.seconds_of(0), runs.seconds_of(1)) == (4.5, 2.5, 3.0)
