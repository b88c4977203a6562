"""What is noted of tables on a worker: for reports, and for captures."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import spans
from table_jobs import DIM, declared

from tests.runtime.test_report import LAYERS, history
from tfps.exchange.codecs import codec_of
from tfps.exchange.interface import Link
from tfps.runtime.report import History, Report, Round, make_report
from tfps.runtime.step_spans import StepSpans
from tfps.runtime.table_history import TableHistory, TableRows
from tfps.trace.recorder import Recorder

STEPS, STEP_S = 8, 0.2
LINK = [Link("a:1", 20e6)]


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def table(
    name: str, begin_s: float, end_s: float, rows: int = 8000, dim: int = 64, codec: str = "none"
) -> TableHistory:
    """Its rows are waited for from `begin_s` to `end_s` of each step; a quarter of them has gradients at its end."""
    found = TableHistory(name, dim, codec_of(codec))
    for step in range(STEPS):
        found.looked_up(step, rows, ns(step * STEP_S + begin_s), ns(step * STEP_S + end_s))
        found.added(step, rows // 4, ns((step + 1) * STEP_S))
    return found


def dense(nbytes: int = 1000) -> list[History]:
    """One bucket, whose gradient is there 10 ms before the end of a step and has been exchanged a millisecond later."""
    ends = [(step + 1) * STEP_S for step in range(STEPS)]
    return [History("dense", 0, nbytes, [Round(end - 0.010, end - 0.009) for end in ends])]


def test_waiting_for_rows_is_waiting_and_their_bytes_count_for_the_limit() -> None:
    found = make_report(dense(), LINK, tables=[table("user", 0.02, 0.12)])
    assert found.step_s == pytest.approx(0.2)
    assert (found.rows_wait_s, found.exposed_wait_s) == pytest.approx((0.1, 0.101))
    assert found.compute_s == pytest.approx(0.099)
    assert found.limit == "this worker's link (160 Mbit/s to all pservers)"
    assert found.with_twice_the_bandwidth_s < 0.8 * found.step_s
    assert found.tables == (TableRows("user", 8000, 2000, 2_048_000, 512_000, found.rows_wait_s),)
    said = str(found)
    assert (
        "rows of user: 8000 asked for and 2000 with gradients a step, 2.05 and 0.512 MB; waited 0.1 s for them" in said
    )
    assert "waiting: 0.1 s for rows, 1.0 ms for dense parameters alone; 2.05 MB of rows and 0.512 MB of" in said
    without = make_report(dense(), LINK)
    assert (without.tables, without.rows_wait_s) == ((), 0.0)
    assert without.compute_s == pytest.approx(0.199)
    assert not re.search("rows|dense", str(without))


def test_tables_are_waited_for_at_the_same_time_as_each_other_and_as_dense_parameters() -> None:
    late = [History("dense", 0, 1000, [Round(each.ready_s, each.ready_s + 0.09) for each in dense()[0].rounds])]
    found = make_report(late, LINK, tables=[table("user", 0.02, 0.12), table("item", 0.05, 0.15)])
    assert found.rows_wait_s == pytest.approx(0.13)
    assert found.exposed_wait_s == pytest.approx(0.16)  # dense ones from 10 ms before a step to its 80th
    assert [each.wait_s for each in found.tables] == pytest.approx([0.1, 0.1])


def test_computing_takes_as_long_as_where_rows_are_not_waited_for() -> None:
    plain, user, wait_s = history(LAYERS, 1e12), TableHistory("user", 64, None), 0.1
    for step in range(STEPS):  # each begins when the first layer's gradients of the one before are there
        begin_s = (plain[0].rounds[step - 1].ready_s if step else 0.0) + step * wait_s
        user.looked_up(step, 1000, ns(begin_s), ns(begin_s + wait_s))
        user.added(step, 1000, ns(begin_s + 2 * wait_s))
    later = [
        dataclasses.replace(
            each,
            rounds=[
                Round(one.ready_s + (step + 1) * wait_s, one.done_s + (step + 1) * wait_s)
                for step, one in enumerate(each.rounds)
            ],
        )
        for each in plain
    ]
    expected, found = make_report(plain, LINK), make_report(later, LINK, tables=[user])
    assert (found.compute_s, found.rows_wait_s) == pytest.approx((expected.compute_s, wait_s), abs=1e-3)
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert (one.forward_s, one.backward_s) == pytest.approx((other.forward_s, other.backward_s), rel=0.01)


def test_compressing_makes_dense_gradients_smaller_but_not_rows() -> None:
    def gain(tables: list[TableHistory]) -> float:
        found = make_report(dense(2_000_000), LINK, tables=tables)
        return found.with_codec_s["int8"] / found.with_twice_the_bandwidth_s

    assert gain([table("user", 0.02, 0.12, rows=10)]) < 1 < gain([table("user", 0.02, 0.12)])
    (use,) = make_report(dense(), LINK, tables=[table("user", 0.02, 0.12, codec="int8")]).tables
    assert (use.received_bytes, use.sent_bytes < 200_000) == (2_048_000, True)


def test_a_model_that_has_nothing_but_tables_has_a_report() -> None:
    found = make_report([], LINK, tables=[table("user", 0.02, 0.12), table("item", 0.02, 0.12)])
    assert (found.step_s, found.exposed_wait_s) == pytest.approx((0.2, 0.1))
    assert found.step_bytes == 0
    assert found.limit.startswith("this worker's link")
    assert "waiting: 0.1 s for rows, 0.0 ms for dense" in str(found)


def test_figures_are_those_of_the_last_steps() -> None:
    found = TableHistory("user", 1, None)
    for step in range(100):
        for lookup in range(2):  # of one step
            found.looked_up(step, step, 1000 * step + 100 * lookup, 1000 * step + 100 * lookup + 150)
        if step < 99:
            found.added(step, 1, 1000 * step + 900)
    use = found.use()
    assert use is not None
    assert (use.rows, use.gradient_rows, use.wait_s) == (181, 1, 250e-9)  # steps 83 to 98, the last is not over
    assert len(found.ends_s()) == 16
    assert TableHistory("user", 1, None).use() is None


@given(
    waits=st.lists(st.tuples(st.floats(0, 2), st.floats(0, 0.3)), max_size=12),
    bytes_per_s=st.sampled_from([1e7, 1e8, 1e12]),
)
def test_no_times_are_negative_whenever_rows_are_waited_for(
    waits: list[tuple[float, float]], bytes_per_s: float
) -> None:
    user = TableHistory("user", 4, None)
    for step, (begin_s, took_s) in enumerate(waits):
        user.looked_up(step, 1000, ns(begin_s), ns(begin_s + took_s))
        user.added(step, 1000, ns(begin_s + took_s))
    found: Report = make_report(history(LAYERS, bytes_per_s), [Link("a:1", bytes_per_s)], tables=[user])
    assert found.compute_s + found.exposed_wait_s == pytest.approx(found.step_s)
    assert 0 <= found.rows_wait_s <= found.exposed_wait_s <= found.step_s
    assert 0 <= found.overlap <= 1
    assert found.with_twice_the_bandwidth_s <= found.step_s * 1.001
    assert found.without_schedule_s >= found.step_s
    assert all(layer.forward_s >= 0 and layer.backward_s >= 0 for layer in found.layers)
    assert str(found)


def test_steps_of_a_model_without_other_gradients_go_from_the_first_lookup_to_the_last_gradients() -> None:
    clock = iter(range(1000, 100_000, 1000))
    recorder = Recorder(clock=lambda: next(clock))
    recorder.start()
    noted, counted, expected = StepSpans(recorder, rank=0), list[int](), []
    noted.on_step = counted.append
    for step in range(4):
        if step == 3:
            noted.count()  # of a step with dense gradients: it is recorded elsewhere
        begin_ns = noted.now()
        for bucket in range(2):
            noted.looked_up(begin_ns, bucket, declared(f"{bucket}"), step, 10)
        for bucket in range(2):
            noted.added(bucket, declared(f"{bucket}"), step, 10)
        expected.append((step, begin_ns, begin_ns + 4000))
    noted.added(0, declared("0"), 9, 10, in_graph=False)
    for kind in ("step", "forward"):
        found = [(one.step, one.begin_ns, one.end_ns) for one in spans(recorder) if one.kind == kind]
        assert found == expected[:2]
    assert [number for number, _ in noted.steps] == [0, 1]
    assert counted == [1, 2, 3]


@pytest.mark.parametrize("records", [True, False])
def test_lookups_and_gradients_are_noted_whether_recorded_or_not(records: bool) -> None:
    clock = iter(range(1000, 100_000, 1000))
    recorder = Recorder(clock=lambda: next(clock))
    if records:
        recorder.start()
    noted, spec = StepSpans(recorder, rank=1), declared("user", priority=3)
    begin_ns = noted.now()
    noted.looked_up(begin_ns, 7, spec, 5, 10)
    noted.added(7, spec, 5, 4)
    noted.looked_up(noted.now(), 7, spec, 6, 99, trains=False)  # as `evaluate` does
    assert noted.tables[7].use() == TableRows("user", 10, 4, 40 * DIM, 16 * DIM, 1e-6)
    found = [(one.kind, one.step, one.bucket, one.priority, one.nbytes, one.rank) for one in spans(recorder)]
    expected = [("lookup", 5, 7, 3, 40 * DIM, 1), ("ready", 5, 7, 3, 16 * DIM, 1), ("lookup", 6, 7, 3, 396 * DIM, 1)]
    assert found == (expected if records else [])
    if records:
        assert (spans(recorder)[0].begin_ns, spans(recorder)[0].duration_ns) == (begin_ns, 1000)
