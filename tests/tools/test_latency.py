"""What the benchmark of short steps makes of what it measures, and how it counts switches of threads."""

from __future__ import annotations

import os
import threading

import pytest

from tfps.types import Json
from tools import children
from tools.benchmarks import latency as benchmark
from tools.benchmarks.latency import LOOKED, cases
from tools.peer_runs import PEERS, Place, measure
from tools.peer_workers.common import Work

STATUS = "Name:\tpython\nvoluntary_ctxt_switches:\t150\nnonvoluntary_ctxt_switches:\t7\n"


def test_switches_are_the_voluntary_ones() -> None:
    assert children.switches_in(STATUS) == 150
    with pytest.raises(ValueError, match="must have voluntary_ctxt_switches"):
        children.switches_in("Name:\tpython\nnonvoluntary_ctxt_switches:\t7\n")


def test_switches_of_a_new_thread_count_and_those_of_one_that_has_ended_do_not() -> None:
    assert children.switches_between({1: 100, 2: 50}, {1: 130, 3: 4}) == 34


def test_every_wait_of_a_thread_is_a_switch() -> None:
    before = children.switches(os.getpid())
    for _ in range(20):
        threading.Event().wait(1e-3)
    after = children.switches(os.getpid())
    own = threading.get_native_id()
    assert after[own] - before[own] >= 20


@pytest.mark.long
def test_a_model_that_is_one_table_is_trained_and_its_messages_are_counted() -> None:
    found = measure("tfps", Place(), Work(1, 3, batch=2, width=4, classes=5, rows=100))
    assert found["messages"] >= 4  # a lookup and an update, each asked and answered by one pserver at least
    assert found["switches"] > 0


def measured(peer: str, cpu_s: float, *periods_s: float, **more: Json) -> dict[str, Json]:
    """A result of two ranks, whose first steps are not to be counted."""
    of_rank = [9.0] * LOOKED + list(periods_s)
    return {"peer": peer, "load": 1.0, "cpu_s": cpu_s, "switches": 40.0, "periods_s": [of_rank, of_rank], **more}


def of_round(number: int, *results: dict[str, Json]) -> list[dict[str, Json]]:
    runs = [{"case": "12x64_2w", "round": number, **benchmark.figures(result)} for result in results]
    return benchmark.beside_horovod(runs)


def test_percentiles_are_those_of_all_ranks_without_the_first_steps() -> None:
    slow = measured("tfps", 0.01, *[0.004] * 100)
    slow["periods_s"][1] = [9.0] * LOOKED + [0.008] * 300
    found = benchmark.figures(slow)
    assert found["p50_ms"] == pytest.approx(8.0)
    assert found["cpu_ms"] == pytest.approx(10.0)
    assert "periods_s" not in found
    mixed = benchmark.figures(measured("tfps", 0.01, *[0.004] * 95, *[0.02] * 5))
    assert (mixed["p50_ms"], mixed["p99_ms"]) == (pytest.approx(4.0), pytest.approx(20.0))


def test_ratios_are_those_to_horovod_in_the_same_round() -> None:
    runs = of_round(0, measured("tfps", 0.02, 0.008), measured("horovod", 0.01, 0.004))
    runs += of_round(1, measured("tfps", 0.02, 0.004), measured("horovod", 0.04, 0.008))
    runs += of_round(2, measured("tfps", 0.02, 0.004), measured("horovod", 0.02, 0.004))
    found = benchmark.headline(runs)
    assert found["tfps_12x64_2w_p50_to_horovod"] == pytest.approx(1.0)
    assert found["tfps_12x64_2w_cpu_to_horovod"] == pytest.approx(1.0)
    assert found["horovod_12x64_2w_p50_to_horovod"] == 1.0


def test_a_round_without_horovod_has_figures_without_ratios() -> None:
    runs = of_round(0, measured("tfps", 0.02, 0.008), {"peer": "horovod", "left_out": "not installed"})
    assert benchmark.headline(runs) == {
        "tfps_12x64_2w_p50_ms": pytest.approx(8.0),
        "tfps_12x64_2w_p99_ms": pytest.approx(8.0),
        "tfps_12x64_2w_cpu_ms": pytest.approx(20.0),
        "tfps_12x64_2w_switches": 40.0,
    }
    assert "left out: not installed" in benchmark.describe(runs[1])


def test_a_table_has_a_row_for_each_system_that_was_measured() -> None:
    failed = {"peer": "mwms", "failed": "no"}
    runs = of_round(0, measured("tfps", 0.02, 0.008, messages=10.0), measured("horovod", 0.01, 0.004), failed)
    lines = benchmark.table(cases(quick=True)[0], runs).text().splitlines()
    assert lines[0] == "12x64, 2 workers, per step"
    assert lines[1].split("  ")[-1].strip() == "CPU / Horovod"
    assert [line.split() for line in lines[2:]] == [
        ["tfps", "8.00", "8.00", "1.00", "20.00", "40", "10.00", "2.00", "2.00"],
        ["horovod", "4.00", "4.00", "1.00", "10.00", "40", "1.00", "1.00"],
    ]


@pytest.mark.parametrize("quick", [True, False])
def test_every_case_has_systems_that_there_are_and_tables_are_tfps_own(quick: bool) -> None:
    found = cases(quick)
    assert len({case.key for case in found}) == len(found) == (6 if quick else 8)
    for case in found:
        assert set(case.peers) <= set(PEERS)
        assert bool(case.work.rows) == (case.peers == ("tfps",))
        assert bool(case.work.rows) == ("no tables" in case.what)
        assert case.key.endswith(f"{case.work.workers}w")
