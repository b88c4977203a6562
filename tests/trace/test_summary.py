"""The summary: cases computed by hand, and rules that hold for all captures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import captures
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfps.errors import TfpsError
from tfps.trace.capture import (
    FIRST_LOOKUP,
    Capture,
    CapturedBucket,
    CapturedPart,
    CapturedView,
    Kind,
    Process,
    Span,
    lane_of,
)
from tfps.trace.step_times import Intervals, clip, difference, intersection, total, union
from tfps.trace.summary import PartUse, Summary, TableUse, summarize
from tfps.types import Argument

MS = 1_000_000
BUCKETS = (CapturedBucket("a", ("a",), 0, 100), CapturedBucket("b, c", ("b", "c"), 1, 200))


def make(
    spans: list[Span], workers: int = 1, pservers: int = 1, hosts: Sequence[str] = (), **more: Argument
) -> Summary:
    processes = [Process("worker", rank) for rank in range(workers)]
    processes += [Process("pserver", number) for number in range(pservers)]
    processes = [replace(each, host=host) for each, host in zip(processes, hosts or [""] * len(processes), strict=True)]
    return summarize(Capture(tuple(processes), BUCKETS, tuple(spans), **more))


def span(kind: Kind, begin: int, end: int, process: int = 0, **fields: int) -> Span:
    lane = lane_of(kind, rank=fields.get("rank", 0), pserver=fields.get("pserver", 0))
    if fields.get("bucket", -1) >= 0:
        fields.setdefault("priority", fields["bucket"])
    return Span(kind, process, lane, begin, end, **{"rank": process, "pserver": 0, **fields})


def test_parts_that_xla_compiles_are_those_that_ran_within_steps() -> None:
    steps = [
        span("step", begin, begin + 100, process, step=1 + begin // 100) for begin in (0, 100) for process in (0, 1)
    ]
    ran = [span("part", begin, begin + took, at, slice=at) for at, begin, took in ((0, 10, 5), (0, 110, 7), (1, 20, 9))]
    after = span("part", 250, 300, slice=0)
    parts = CapturedPart("part 1: a", ("a",), (), 0.5), CapturedPart("part 2: b", (), ("b",)), CapturedPart("part 3")
    summary = make([*steps, *ran, after], workers=2, steps=(1,), parts=parts)
    assert summary.parts == (PartUse("part 1: a", ("a",), 5, 0.5), PartUse("part 2: b", (), 9, 0.0))


def test_a_step_computed_by_hand() -> None:
    summary = make(
        [
            span("step", 0, 1000, step=1),
            span("input", 0, 50, step=1),
            span("gate", 100, 300, bucket=0),
            span("forward", 50, 500),  # one span for all of it, the gate and 450 to 500 of input within
            span("input", 450, 500),
            span("backward", 500, 1000),
            span("queued", 600, 650, bucket=1, slice=0, step=1, nbytes=200),
            span("wire", 650, 700, bucket=1, slice=0, step=1, nbytes=200),
            span("aggregate", 700, 700, process=1, bucket=1, slice=0, step=1, rank=0),
            span("reply_wire", 750, 800, process=1, bucket=1, slice=0, step=1, rank=0, nbytes=200),
            span("wire", 50, 150, bucket=0, slice=0, step=0, nbytes=100),
            span("reply_wire", 150, 290, process=1, bucket=0, slice=0, step=0, rank=0, nbytes=100),
        ]
    )
    (step,) = summary.steps
    (worker,) = step.workers.values()
    assert (worker.duration_ns, worker.compute_ns, worker.exposed_ns, worker.input_ns) == (1000, 700, 200, 100)
    assert (worker.under_way_ns, worker.hidden_ns) == (240 + 200, 50 + 200)
    assert step.totals == summary.totals
    assert summary.totals.overlap == pytest.approx(250 / 440)
    (link,) = summary.totals.links
    assert (link.pushed_bytes, link.replied_bytes, link.push_busy_ns, link.reply_busy_ns) == (300, 300, 150, 190)
    assert [(cost.variable, cost.exposed_ns) for cost in summary.costs] == [("a", 200)]
    assert summary.totals.slowest is None
    assert summary.limit == "the network: messages of the waiting worker are on the wire, in 95% of the exposed wait"


def test_it_says_who_takes_part_and_what_changed_when() -> None:
    steps = [span("step", MS * begin, MS * (begin + 10), step=begin // 10) for begin in (20, 30, 40)]
    changes = [Span("change", 0, "view", MS * at, MS * at) for at in (35, 45)]
    views = (
        CapturedView(3, (0, 1, 2)),
        CapturedView(4, (0, 2), "rank 1 (b:7) died", "step 3 is the first that lacks pushes of rank 1"),
        CapturedView(5, (0,), "rank 2 (c:8) has left"),
    )
    hosts = ["a", "b", "c", "p:1", "p:2"]
    summary = make([*steps, *changes], workers=3, pservers=2, hosts=hosts, views=views)
    assert summary.view == "generation 3, with workers 0 to 2 and pservers p:1, p:2"
    assert summary.changes == (
        f"15 ms, in step 3: generation 4, with workers 0, 2: rank 1 (b:7) died; {views[1].note}",
        "25 ms, in step 4: generation 5, with worker 0: rank 2 (c:8) has left",
    )
    joined = make([*steps, changes[0]], workers=3, views=(views[2], replace(views[0], reason="rank 1 takes part")))
    (said,) = joined.changes
    assert said.endswith("with workers 0 to 2: rank 1 takes part; step 4 is the first that begins after it")
    assert (make(steps).view, make(steps).changes) == ("", ())


def test_times_outside_of_steps_and_messages_before_the_first_do_not_count() -> None:
    spans = [
        span("step", 1000, 2000, step=5),
        span("backward", 500, 1200),
        span("gate", 1900, 2500, bucket=0),
        span("wire", 900, 1100, bucket=0, slice=0, nbytes=7),  # begins before: its time counts, its bytes do not
        span("wire", 1999, 2300, bucket=0, slice=1, nbytes=8),
        span("wire", 2000, 2300, bucket=0, slice=2, nbytes=9),  # after backward, before the next step
    ]
    summary = make(spans)
    totals = summary.totals
    assert (totals.compute_ns, totals.exposed_ns, totals.links[0].pushed_bytes, totals.messages) == (200, 100, 17, 2)
    assert totals.links[0].push_busy_ns == 101
    later = [span("step", 5000, 6000, step=6), span("wire", 5000, 5100, bucket=0, slice=3, nbytes=5)]
    assert make([*spans, *later], steps=(5,)) == summary


def test_the_rank_that_all_wait_for_is_the_slowest() -> None:
    spans = [span("step", 0, 100, process=rank, step=1) for rank in range(3)]
    spans += [span("gate", 10, 60, process=rank, bucket=0) for rank in (0, 2)]
    # Two slices wait for rank 1 at the same time, which explains the same 40 ns of waiting reads.
    spans += [span("aggregate", 10, 50, process=3, bucket=0, slice=number, rank=1) for number in (0, 1)]
    spans += [span("aggregate", 70, 75, process=3, bucket=1, slice=0, rank=2)]
    summary = make(spans, workers=3)
    assert summary.totals.slowest == 1
    assert (summary.totals.waited_for, summary.totals.sums) == ({1: 80, 2: 5}, 3)
    assert summary.limit == "worker 1, which is later than the others, in 80% of the exposed wait"


def test_a_less_urgent_slice_before_a_waiting_urgent_one_is_an_inversion() -> None:
    def message(bucket: int, queued: int, sent: int, number: int = 0, pserver: int = 0) -> list[Span]:
        fields = {"bucket": bucket, "slice": number, "pserver": pserver}
        return [span("queued", queued, sent, **fields), span("wire", sent, sent + 10, **fields)]

    def inversions(*messages: list[Span]) -> int:
        every = [one for message in messages for one in message]
        return make([span("step", 0, 1000, step=1), *every], pservers=2).totals.inversions

    assert inversions(message(1, 0, 20), message(0, 10, 30)) == 1
    assert inversions(message(1, 0, 20), message(0, 20, 30)) == 0, "it came when the other was taken"
    assert inversions(message(0, 0, 20), message(1, 0, 30)) == 0
    assert inversions(message(0, 0, 20, 1), message(0, 0, 30, 0)) == 0, "equally urgent"
    assert inversions(message(1, 0, 20), message(0, 10, 30, pserver=1)) == 0, "another stream"
    assert inversions(message(1, 0, 20, 0), message(1, 0, 25, 1), message(0, 10, 30)) == 2
    both = [*message(1, 0, 20), *message(0, 10, 30)]
    replies = [
        one._replace(kind="reply_queued" if one.kind == "queued" else "reply_wire", process=1, rank=0) for one in both
    ]
    assert inversions(replies) == 1
    pair = make([span("step", 0, 1000, step=1), *both]).inversion
    assert pair is not None
    assert (pair.waiting, pair.sent, pair.times) == ("a", "b, c", 1)


def test_reads_that_wait_at_once_cost_their_time_once() -> None:
    gates = [
        span("gate", 0, 50, bucket=0, variable=0),
        span("gate", 20, 80, bucket=1, variable=1),
        span("gate", 70, 90, bucket=1, variable=0),
    ]
    summary = make([span("step", 0, 1000, step=1), *gates])
    assert {cost.variable: cost.exposed_ns for cost in summary.costs} == {"a": 50, "c": 30, "b": 10}
    assert summary.totals.exposed_ns == 90


@pytest.mark.parametrize(
    ("spans", "limit"),
    [
        ([("forward", 0, 990), ("gate", 990, 1000)], "computation: waiting is 1% of a step"),
        ([("input", 0, 400), ("gate", 400, 500)], "input: workers wait for batches in 40% of a step"),
        ([("gate", 0, 500), ("update", 100, 500)], "updates of variables, in 80% of the exposed wait"),
        ([("gate", 0, 500)], "pservers and queues, with nothing on the wire, in 100% of the exposed wait"),
    ],
)
def test_what_limits_is_said_in_words(spans: list[tuple[Kind, int, int]], limit: str) -> None:
    assert make([span("step", 0, 1000, step=1), *(span(*one) for one in spans)]).limit == limit


def test_rows_are_waited_for_as_variables_are_and_a_table_has_its_own_figures() -> None:
    adds = {"bucket": 0, "slice": 0, "step": 1, "rank": 0}
    asks = {**adds, "slice": FIRST_LOOKUP + 5}
    gate = span("gate", 300, 450, bucket=1, variable=1, step=0)
    spans = [
        span("step", 0, 1000, step=1),
        span("forward", 0, 500, step=1),
        span("lookup", 100, 400, bucket=0, step=1, nbytes=800),
        span("lookup", 200, 350, bucket=0, step=1, nbytes=80),
        gate,
        span("queued", 10, 20, **asks),  # before the lookup: its batch was known
        span("wire", 20, 40, nbytes=30, **asks),
        span("held", 40, 380, process=1, nbytes=800, **asks),
        span("reply_wire", 40, 60, process=1, nbytes=500, **asks),
        span("reply_wire", 380, 400, process=1, nbytes=300, **asks),
        span("wire", 600, 700, nbytes=850, **adds),
        span("aggregate", 700, 720, process=1, bucket=0, step=1, rank=0),
        span("reply_wire", 720, 730, process=1, nbytes=0, **adds),
        span("lookup", 1100, 1200, bucket=0, step=2),  # after all steps, as what belongs to it
        span("wire", 650, 700, **{**asks, "step": 2, "nbytes": 77}),
    ]
    summary = make(spans)
    times = summary.steps[0].workers[0]
    assert (times.compute_ns, times.exposed_ns) == (150, 350)
    assert times.under_way_ns == 50 + 20 + 130, "what is held back is not under way"
    assert times.hidden_ns == 50 + 130
    assert [(cost.variable, cost.exposed_ns) for cost in summary.costs] == [("a", 300), ("c", 50)]
    assert summary.tables == (TableUse("a", 300, 1, 340, 30, 800, 850),)
    assert summary.limit.startswith("pservers and queues, with nothing on the wire, in 94% of the exposed wait")
    assert summary.limit.endswith("; 86% of that wait is for rows of tables")
    assert "rows" not in make([spans[0], gate]).limit


def test_a_worker_whose_link_keeps_the_others_waiting_is_named() -> None:
    assert waiting_for(1).limit.endswith("worker 1 has the slowest way, and the others wait for it")


def test_a_worker_that_nobody_waits_for_is_not_said_to_keep_others_waiting() -> None:
    summary = waiting_for(0)
    assert summary.totals.slowest == 0
    assert "slowest way" not in summary.limit


@pytest.mark.parametrize(
    ("hosts", "is_one"),
    [(("a", "a", "127.0.0.1:1"), True), (("a", "a", "a:1"), False), (("a", "b", "10.0.0.1:1"), False)],
)
def test_on_one_host_nothing_is_said_of_a_network(hosts: tuple[str, ...], is_one: bool) -> None:
    limit = waiting_for(1, hosts).limit
    assert limit.startswith("the exchange on this one host: ") == is_one
    assert ("network" in limit and "way, and" in limit) != is_one


def waiting_for(rank: int, hosts: Sequence[str] = ("", "", "")) -> Summary:
    """Both workers wait while messages of rank 1 are on the wire; slices wait for `rank`."""
    spans = [span("step", 0, 1000, process=rank, step=1) for rank in (0, 1)]
    spans += [span("gate", 0, 500, process=rank) for rank in (0, 1)]
    spans += [
        span("wire", 0, 200, process=0, bucket=0, slice=0),
        span("aggregate", 200, 450, process=2, bucket=0, slice=0, rank=rank),
        span("wire", 0, 450, process=1, bucket=0, slice=0),
    ]
    return make(spans, workers=2, hosts=hosts)


def test_a_pserver_whose_link_stands_out_is_named() -> None:
    spans = [span("step", 0, 1000, step=1), span("gate", 0, 500, bucket=0)]
    spans += [span("wire", 0, 450, bucket=0, slice=0), span("wire", 0, 100, bucket=0, slice=1, pserver=1)]
    assert make(spans, pservers=2).limit.endswith("most of it to and from pserver 0")


def test_a_capture_without_steps_is_refused() -> None:
    with pytest.raises(TfpsError, match="at least one span of kind 'step'"):
        make([span("forward", 0, 10)])


def test_urgent_slices_first_shorten_the_steps_of_the_same_job() -> None:
    found = {policy: summarize(captures.capture(policy)) for policy in ("priority", "fifo")}
    for policy, summary in found.items():
        totals, steps = summary.totals, len(summary.steps)
        assert totals.compute_ns / steps == pytest.approx(captures.COMPUTE_S * 1e9, rel=0.1)
        assert totals.compute_ns + totals.exposed_ns == pytest.approx(totals.duration_ns, rel=1e-3)
        pushed = sum(link.pushed_bytes for link in totals.links) / steps
        assert pushed == pytest.approx(2 * captures.NBYTES, rel=0.1)
        assert (totals.inversions > 0.1 * totals.messages) == (policy == "fifo")
    assert found["priority"].totals.duration_ns < found["fifo"].totals.duration_ns


@st.composite
def any_captures(draw: st.DrawFn) -> Capture:
    """Two workers, two pservers, any spans that name them."""
    times = st.tuples(st.integers(0, 400), st.integers(0, 100))
    spans = []
    for rank in (0, 1):
        at = 0
        for step in range(draw(st.integers(1, 3))):
            begin = at + draw(st.integers(0, 20))
            at = begin + draw(st.integers(1, 150))
            spans.append(span("step", begin, at, process=rank, step=step))
    whole = st.integers(0, 1)
    for kind in ("forward", "backward", "gate", "lookup", "input", "update"):
        for (begin, took), rank, bucket in draw(st.lists(st.tuples(times, whole, whole), max_size=4)):
            variable = 0 if kind == "gate" else -1
            fields = {"bucket": bucket, "variable": variable, "step": 0 if kind == "lookup" else -1}
            spans.append(span(kind, begin, begin + took, process=rank, **fields))
    sliced: tuple[Kind, ...] = ("queued", "wire", "held", "aggregate", "reply_queued", "reply_wire")
    for kind in sliced:
        for (begin, took), rank, bucket, pserver in draw(st.lists(st.tuples(times, whole, whole, whole), max_size=6)):
            process = rank if kind in ("queued", "wire") else 2 + pserver
            index = FIRST_LOOKUP if kind == "held" else draw(st.sampled_from((0, FIRST_LOOKUP)))
            fields = {"rank": rank, "pserver": pserver, "bucket": bucket, "slice": index, "nbytes": 10, "step": 0}
            spans.append(span(kind, begin, begin + took, process=process, **fields))
    roles = (Process("worker", 0), Process("worker", 1), Process("pserver", 0), Process("pserver", 1))
    return Capture(roles, BUCKETS, tuple(spans))


@settings(max_examples=150)
@given(any_captures())
def test_rules_that_hold_for_every_capture(capture: Capture) -> None:
    summary = summarize(capture)
    totals = summary.totals
    for step in summary.steps:
        for one in step.workers.values():
            assert 0 <= one.compute_ns <= one.duration_ns - one.exposed_ns
            assert 0 <= one.hidden_ns <= one.under_way_ns <= one.duration_ns
            assert one.under_way_ns - one.hidden_ns <= one.exposed_ns <= one.duration_ns
    assert 0 <= totals.overlap <= 1
    assert sum(cost.exposed_ns for cost in summary.costs) == sum(
        one.exposed_ns for step in summary.steps for one in step.workers.values()
    )
    for name in ("inversions", "messages"):
        assert getattr(totals, name) == sum(getattr(step.totals, name) for step in summary.steps)
    for number, link in enumerate(totals.links):
        assert link.pushed_bytes == sum(step.totals.links[number].pushed_bytes for step in summary.steps)
        assert 0 <= link.push_busy_ns <= sum(step.end_ns - step.begin_ns for step in summary.steps)
    assert totals.inversions <= totals.messages
    exposed_ns = sum(one.exposed_ns for step in summary.steps for one in step.workers.values())
    assert [table.table for table in summary.tables] == [BUCKETS[bucket].name for bucket in sorted(capture.tables)]
    table_of = {bucket.name: number for number, bucket in enumerate(BUCKETS)}
    for table in summary.tables:
        assert 0 <= table.wait_ns <= exposed_ns
        pushed = [one.nbytes for one in capture.spans if one.kind == "wire" and one.bucket == table_of[table.table]]
        assert table.asked_bytes + table.gradient_bytes in (0, sum(pushed))
    assert summary.limit
    json.dumps(asdict(summary), allow_nan=False)


@settings(max_examples=100)
@given(any_captures(), st.integers(-(10**12), 10**12))
def test_only_differences_of_times_matter(capture: Capture, shift: int) -> None:
    moved = [one._replace(begin_ns=one.begin_ns + shift, end_ns=one.end_ns + shift) for one in capture.spans]
    shifted = summarize(Capture(capture.processes, capture.buckets, tuple(moved)))
    assert shifted.totals == summarize(capture).totals
    assert shifted.costs == summarize(capture).costs


pairs = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 15)).map(lambda one: (one[0], one[0] + one[1])), max_size=8
)


@given(pairs, pairs, st.integers(0, 60), st.integers(0, 60))
def test_arithmetic_of_intervals_is_that_of_sets(one: Intervals, other: Intervals, begin: int, end: int) -> None:
    def members(times: Intervals) -> set[int]:
        return {at for first, last in times for at in range(first, last)}

    first, second = union(one), union(other)
    assert members(first) == members(one)
    assert total(first) == len(members(one))
    for result, expected in (
        (intersection(first, second), members(one) & members(other)),
        (difference(first, second), members(one) - members(other)),
        (clip(first, begin, end), {at for at in members(one) if begin <= at < end}),
    ):
        assert members(result) == expected
        assert result == sorted(result)
        assert total(result) == len(expected), "without overlap"
