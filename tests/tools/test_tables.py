"""What the benchmark of tables measures, with tiny tables, and what it makes of it."""

from __future__ import annotations

import contextlib
import sys

import numpy as np
import pytest

from tfps.types import Json
from tools import bench
from tools.benchmarks import tables as benchmark
from tools.tables import engine, job, summary
from tools.tables.work import Work

TINY = Work(rows=1000, batch=16, features=3, unique=20, dim=4)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("rows", [1000, 10**8])
def test_batches_have_the_different_ids_that_they_should(rows: int, bounded: bool) -> None:
    work = Work(rows, bounded, batch=64, features=26, unique=500)
    x, y = work.examples(3, 5, workers=2)
    assert x.shape == (10 * 64, 26)
    assert y.shape == (10 * 64, 1)
    assert [len(np.unique(each)) for each in np.split(x, 10)] == [500] * 10
    assert bounded == (0 <= x.min() <= x.max() < rows)
    np.testing.assert_array_equal(x, work.examples(3, 5, workers=2)[0])


def test_every_row_has_an_id_of_its_own() -> None:
    numbers = np.arange(1000)
    for bounded in (True, False):
        assert len(np.unique(Work(1000, bounded).ids(numbers))) == 1000


def test_ids_follow_the_law_of_zipf() -> None:
    counts = np.bincount(Work(10**6, exponent=1.0).drawn(np.random.default_rng(0), 10**6), minlength=100)
    # A tenth as often as the numbers from 1 to 2 are those from 10 to 11.
    assert counts[0] / counts[9] == pytest.approx(np.log(2) / np.log(1.1), rel=0.05)


def test_a_table_is_measured_beside_numpy() -> None:
    runs = list(engine.measure(500, bounded=False, batches=(10, 50), rounds=2))
    assert len(runs) == 2 * len(engine.LAWS) * 2
    found = summary.headline([{"part": "engine", **run} for run in runs])
    assert found["engine_any_id_pull_m_per_s"] > 0
    assert 12 <= found["engine_any_id_overhead_bytes_per_row"] < 100  # an id and a step, and more in a small index


@pytest.mark.long
def test_a_job_says_what_its_steps_took() -> None:
    with contextlib.ExitStack() as stack:
        one = job.tfps_job(stack, TINY, 1, 3)
        first = one.round()
        filled = one.fill()
        found = one.round(Work(rows=1000, batch=16, features=3, unique=30, dim=4))
    assert (first["asked"], first["pushed"], found["pushed"]) == (20, 20, 30)
    assert filled["rows"] == 1000
    assert found["received_bytes"] > 30 * 4 * TINY.dim
    assert 0 < found["wait_s"] < found["step_s"]
    assert 0 <= found["early"] <= found["asked"]


def of_kind(part: str, kind: str, *steps_s: float, **more: Json) -> list[dict[str, Json]]:
    about = {"part": part, "kind": kind, "wait_s": 0.01, "cpu_s": 0.05, **more}
    return [{**about, "round": number, "step_s": step_s} for number, step_s in enumerate(steps_s)]


def test_ratios_are_those_of_the_same_round() -> None:
    runs = of_kind("keras", "keras", 0.1, 0.2, 0.4) + of_kind("keras", "tfps", 0.2, 0.1, 0.2)
    found = summary.headline(runs)
    assert found["keras_tfps_step_ratio"] == 0.5
    assert found["keras_tfps_step_s"] == 0.2
    (table,) = summary.tables(runs)
    assert table.rows[1] == ["tfps", "200.0", "0.50", "50.0"]
    assert table.text().splitlines()[-1].split() == list(table.rows[1])


def test_what_prefetching_hides_is_the_wait_that_is_gone() -> None:
    nbytes = {"dim": 16, "sleep_s": 0.0, "received_bytes": 1e6, "sent_bytes": 1e6, "asked": 100.0, "early": 60.0}
    runs = of_kind("network", "on", 0.1, **nbytes) + of_kind("network", "off", 0.2, **{**nbytes, "wait_s": 0.04})
    found = summary.headline(runs)
    assert found["network_16_hidden_share"] == 0.75
    assert found["network_16_early_share"] == 0.6
    assert found["network_16_step_ratio_to_no_prefetch"] == 0.5


def test_what_is_left_out_is_named_with_the_reason() -> None:
    runs: list[dict[str, Json]] = [{"part": "network", "kind": "hosts", "left_out": "no hosts: must be root"}]
    assert summary.left_out(runs) == ["network, hosts: not measured, no hosts: must be root"]
    assert summary.headline(runs) == {}
    (table,) = summary.tables(runs + of_kind("keras", "keras", 0.1))  # none of a part that has no runs
    assert list(table.rows[0]) == ["keras", "100.0", "1.00", "50.0"]


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFPS_PEERS_HOME", "/nowhere")
    assert job.absence("tfra_ps") == "not installed: tools/python -m tools.tables.job"
    assert job.absence("tf_ps") is None


def test_a_part_that_there_is_not_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"--part of tables must be one of engine, size, unique, .*, got 'sizes'"):
        benchmark.run(True, part="sizes")
    monkeypatch.setattr(sys, "argv", ["bench.py", "wire", "--part", "size"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "--part is for recovery and tables, got it with wire" in capsys.readouterr().err
