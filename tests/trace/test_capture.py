"""Captures: what is refused, and that files keep everything."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfps.errors import TfpsError
from tfps.trace.capture import (
    FIRST_LOOKUP,
    KINDS,
    Capture,
    CapturedBucket,
    CapturedPart,
    CapturedView,
    Kind,
    Process,
    Span,
    by_lane,
    lane_of,
    rows,
)
from tfps.trace.capture_file import chrome_path, read, read_columns, write_chrome
from tfps.types import Argument, Json
from tfps.worker import table_bucket

PROCESSES = (
    Process("worker", 0, "a"),
    Process("worker", 1, "b", clock_offset_ns=-3_000_000_000, clock_error_ns=40_000),
    Process("pserver", 0, "c:7070"),
)
START = b'[{"name":"tfps","ph":"M","pid":0,"tid":0,"args":'
BUCKETS = (CapturedBucket("dense/kernel", ("dense/kernel",), 0, 8), CapturedBucket("a, b", ("a", "b"), 1, 400))


def spans() -> st.SearchStrategy[Span]:
    """Any span that the processes and buckets above allow."""

    def make(kind: Kind, process: int, begin_ns: int, took_ns: int, bucket: int, rest: list[int]) -> Span:
        slice_number, rank, step = rest
        variable = 0 if bucket >= 0 and kind == "gate" else -1
        return Span(
            kind, process, lane_of(kind, rank=rank, pserver=0), begin_ns, begin_ns + took_ns, step,
            bucket, slice_number if bucket >= 0 else -1, variable, bucket, 10, rank, 0,
        )  # fmt: skip

    whole = st.integers(-1, 1)
    times = st.integers(-(10**12), 10**15), st.integers(0, 10**10)
    return st.builds(make, st.sampled_from(KINDS), st.integers(0, 2), *times, whole, st.tuples(whole, whole, whole))


def captured(spans: tuple[Span, ...], **more: Argument) -> Capture:
    """With a view for each change."""
    changes = sum(span.kind == "change" for span in spans)
    views = [CapturedView(2 + at, (0,), "it died", "step 3", {"a, b": (0, 1)}) for at in range(changes)]
    return Capture(spans=spans, views=(CapturedView(1, (0, 1)), *views), **more)


captures = st.builds(
    captured,
    processes=st.just(PROCESSES),
    buckets=st.just(BUCKETS),
    spans=st.lists(spans(), max_size=30).map(tuple),
    steps=st.just((3, 4)),
    settings=st.dictionaries(st.text(max_size=3), st.one_of(st.none(), st.booleans(), st.integers(), st.text())),
    name=st.text(max_size=5),
)


def chain(step: int = 3, begin_ns: int = 1000) -> list[Span]:
    """One slice of bucket 1 from its gradient to the gate, of both ranks; rank 1 is late."""
    found = []
    for rank in (0, 1):
        at = begin_ns + 5000 * rank
        common: dict[str, int] = {"step": step, "bucket": 1, "priority": 1, "rank": rank}
        sliced = {**common, "slice": 0, "nbytes": 400, "pserver": 0}
        found += [
            Span("ready", rank, "gradients", at, at, **common),
            Span("queued", rank, "queue", at, at + 100, **sliced),
            Span("wire", rank, "to pserver 0", at + 100, at + 1001, **sliced),
            Span("reply_queued", 2, "reply queue", begin_ns + 6001, begin_ns + 6101, **sliced),
            Span("reply_wire", 2, f"to worker {rank}", begin_ns + 6101, begin_ns + 7001, **sliced),
            Span("update", rank, "updates", begin_ns + 7001, begin_ns + 8001, **common),
            Span("gate", rank, "gates", begin_ns + 5500, begin_ns + 8001, variable=1, **common),
        ]
    return [*found, Span("aggregate", 2, "aggregate", begin_ns + 1001, begin_ns + 6001, **{**sliced, "rank": 1})]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(capture=captures)
def test_a_file_keeps_everything(capture: Capture, tmp_path: Path) -> None:
    path = chrome_path(tmp_path, "some run")
    write_chrome(capture, path)
    assert read(path) == capture
    assert path == tmp_path / "plugins" / "tfps" / "some run.trace.json.gz"
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(capture=captures)
def test_events_are_what_chrome_and_perfetto_read(capture: Capture, tmp_path: Path) -> None:
    write_chrome(capture, tmp_path / "t.gz")
    events = events_of(tmp_path / "t.gz")
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] in "Xi"} <= named
    queued = [span for span in capture.spans if span.kind in ("queued", "reply_queued")]
    assert sum(event["ph"] in "Xi" for event in events) == len(capture.spans) - len(queued)
    waiting: dict[tuple[int, str], list[int]] = {}
    for event in events:
        if event["ph"] == "C":
            waiting.setdefault((event["pid"], event["name"]), []).append(event["args"]["slices"])
    assert sum(map(len, waiting.values())) == 2 * len(queued)
    for counts in waiting.values():
        assert min(counts) == counts[-1] == 0 < counts[0]
    until: dict[tuple[int, int], float] = {}
    for event in events:  # complete events of one thread do not overlap
        if event["ph"] == "X" and event["dur"] > 0:
            thread = event["pid"], event["tid"]
            assert event["ts"] >= until.get(thread, 0) - 1e-6 * event["ts"]
            until[thread] = event["ts"] + event["dur"]


def events_of(path: Path) -> list[dict[str, Json]]:
    text = gzip.decompress(path.read_bytes())
    assert text.startswith(b'[{"'), "by this Perfetto knows the format"
    first, *events = json.loads(text)
    assert (first["ph"], first["name"], first["args"]["format"]) == ("M", "tfps", 1)
    return list(events)


@pytest.mark.parametrize("index", [0, -1])
def test_flows_lead_from_each_push_to_its_update(tmp_path: Path, index: int) -> None:
    made = [span._replace(slice=index) if span.kind == "aggregate" else span for span in chain()]  # -1: of a gather
    write_chrome(Capture(PROCESSES, BUCKETS, tuple(made)), tmp_path / "t.gz")
    events = events_of(tmp_path / "t.gz")
    shown = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    flows: dict[int, list[dict[str, Json]]] = {}
    for event in events:
        if event.get("cat") == "flow":
            flows.setdefault(event["id"], []).append(event)
    assert sorted([shown[e["pid"], e["tid"]] for e in flow] for flow in flows.values()) == [
        ["to pserver 0", "aggregate", "to worker 0", "updates"],
        ["to pserver 0", "aggregate", "to worker 1", "updates"],
    ]
    for flow in flows.values():
        assert [e["ph"] for e in flow] == ["s", "t", "t", "f"]
        assert [e.get("bp") for e in flow] == [None, None, None, "e"], "the last binds to the span around it"
        assert [e["ts"] for e in flow] == sorted(e["ts"] for e in flow)
    (late,) = [e for e in events if e.get("cat") == "aggregate"]
    if index < 0:
        return
    assert late["name"] == "aggregate a, b [0]"
    assert late["args"] == {
        "step": 3, "bucket": 1, "slice": 0, "priority": 1, "nbytes": 400, "rank": 1, "pserver": 0, "key": "1/0",
    }  # fmt: skip
    assert (late["ts"], late["dur"]) == (1.001, 5.0)
    waits = {e["cat"]: e["args"].get("queued_us") for e in events if e["ph"] == "X"}
    assert (waits["wire"], waits["reply_wire"], waits["update"]) == (0.1, 0.1, None)


def test_a_file_that_is_no_capture_is_named_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "x.trace.json.gz"
    with pytest.raises(TfpsError, match=r"cannot read the capture '.*x\.trace\.json\.gz': .*No such file"):
        read(path)
    path.write_bytes(b"{}")
    with pytest.raises(TfpsError, match="Not a gzipped file"):
        read(path)
    path.write_bytes(gzip.compress(b'{"traceEvents":[]}'))
    with pytest.raises(TfpsError, match="must be a capture of tfps, got another file"):
        read(path)
    path.write_bytes(gzip.compress(START + b'{"format":2}},\n'))
    with pytest.raises(TfpsError, match=r"must be of format 1, got .*newer tfps"):
        read(path)
    path.write_bytes(gzip.compress(START + b'{"format":1,"columns":{}}},\n'))
    with pytest.raises(TfpsError, match="its first line is damaged"):
        read(path)
    write_chrome(Capture(PROCESSES, BUCKETS, tuple(chain())), path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TfpsError, match="cannot read the capture"):
        read(path)


MB = 10**6


def write_bomb(path: Path, unit: bytes, count: int) -> None:
    """A file of about 400 KB whose first line repeats `unit`; noise after it makes it as large as that."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(START + b'{"format":1,"name":[')
        for _ in range(count // 1000):
            file.write(unit * 1000)
        file.write(b"0]}},\n" + random.Random(1).randbytes(400_000 - len(unit) * count // 200))


def peak_of(call: Callable[[], object]) -> int:
    """The most memory that it has at a time."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def refuse(path: Path, rule: str) -> None:
    with pytest.raises(TfpsError, match=rule):
        read(path)


@pytest.mark.parametrize(
    ("unit", "count", "rule"),
    [
        (b"x" * 1000, 40_000, r"must unpack to at most \d+ bytes, 25 times its size; got more: .* record the capture"),
        (b"0,", 2 * MB, r"must have at most \d+ of ',', as the file has \d+ bytes; got 20000\d\d: "),
        (b"[],", 2 * MB, r"got 20000\d\d: it was made to fill memory\. Do not use it"),
        (b"{},", 2 * MB, r"got 20000\d\d: it was made to fill memory"),
        (b'{"":[', 200_000, r"at most \d+ of '\[\{:\"', as the file has \d+ bytes; got 10000\d\d: "),
    ],
    ids=["text", "numbers", "lists", "objects", "nested"],
)
def test_a_file_that_was_made_to_fill_memory_is_refused_before_it_does(
    tmp_path: Path, unit: bytes, count: int, rule: str
) -> None:
    path = tmp_path / "bomb.trace.json.gz"
    write_bomb(path, unit, count)
    assert peak_of(lambda: refuse(path, rule)) < 40 * MB


@pytest.mark.parametrize(
    ("unit", "count"),
    [(b"12345,", 900_000), (b'"ab",', 250_000), (b"[0],", 500_000), (b"{},", 500_000), (b'{"":0},', 125_000)],
)
def test_a_file_of_400_kb_that_is_just_within_the_bounds_fills_some_tens_of_mb(
    tmp_path: Path, unit: bytes, count: int
) -> None:
    path = tmp_path / "bomb.trace.json.gz"
    write_bomb(path, unit, count)
    assert peak_of(lambda: refuse(path, "its first line is damaged: KeyError")) < 80 * MB


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_a_file_that_nests_deeply_is_refused(opening: bytes, tmp_path: Path) -> None:
    path = tmp_path / "deep.trace.json.gz"
    with gzip.open(path, "wb") as file:
        file.write(START + b'{"format":1,"name":' + opening * 30_000 + b"},\n")
    with pytest.raises(TfpsError, match="its first line is damaged: RecursionError"):
        read(path)


def test_a_capture_of_a_large_job_is_far_from_the_bounds(tmp_path: Path) -> None:
    """64 workers and 64 pservers, a model of 500 layers, times as clocks have them."""
    path, clock, hosts = tmp_path / "large.trace.json.gz", random.Random(1), range(64)
    processes = [Process("worker", rank, f"w{rank}") for rank in hosts]
    processes += [Process("pserver", number, f"p{number}:7070", clock.randrange(10**9)) for number in hosts]
    names = [tuple(f"block_{layer}/dense/{name}" for name in ("kernel", "bias")) for layer in range(500)]
    buckets = tuple(CapturedBucket(", ".join(both), both, at, 4 * 2**20) for at, both in enumerate(names))
    spans, at_ns = [], 10**15
    for number in range(20_000):
        at_ns += clock.randrange(100_000)
        rank, pserver, bucket = number % 64, number // 64 % 64, number % 500
        lane = lane_of("wire", pserver=pserver)
        end_ns = at_ns + clock.randrange(10**7)
        spans.append(Span("wire", rank, lane, at_ns, end_ns, 3, bucket, number % 4, -1, bucket, 2**20, rank, pserver))
    capture = Capture(tuple(processes), buckets, tuple(spans))
    write_chrome(capture, path)
    assert read(path) == capture
    size, line = path.stat().st_size, read_columns(path)
    assert len(line) < 25 * size / 10
    assert line.count(b",") < size / 2  # the bound is the size, and as much again as a small file needs
    assert sum(map(line.count, b'[{:"')) < size / 10


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"end_ns": 0}, "must not end before it begins"),
        ({"kind": "sleep"}, "kind of a span must be one of step, forward,"),
        ({"process": 3}, "one of 3 processes"),
        ({"bucket": 2}, "2 buckets"),
        ({"rank": 2}, "must be those of a process"),
        ({"pserver": 1}, "must be those of a process"),
        ({"variable": 2}, "variable of a span must be one of its bucket's"),
    ],
)
def test_spans_that_lead_nowhere_are_refused(change: dict[str, Argument], rule: str) -> None:
    with pytest.raises(TfpsError, match=rule):
        Capture(PROCESSES, BUCKETS, (chain()[1]._replace(**change),))


def test_every_change_has_a_view() -> None:
    change = Span("change", 0, "view", 5, 5, rank=1)
    lost = CapturedView(2, (0,), "rank 1 died")
    capture = Capture(PROCESSES, BUCKETS, (change,), views=(CapturedView(1, (0, 1)), lost))
    assert capture.changes == [(change, lost)]
    assert capture.title(change) == "generation 2: rank 1 died"
    with pytest.raises(TfpsError, match="must have a view for each change, got 0 for 1"):
        Capture(PROCESSES, BUCKETS, (change,))
    with pytest.raises(TfpsError, match="must have a view for each change, got 1 for 0"):
        Capture(PROCESSES, BUCKETS, (), views=(CapturedView(1, (0, 1)), lost))


def test_perfetto_draws_a_change_through_all_lanes(tmp_path: Path) -> None:
    change = Span("change", 0, "view", 6000, 6000, step=3, rank=1)
    views = CapturedView(1, (0, 1)), CapturedView(2, (0,), "rank 1 died", "step 3 lacks it", {"a, b": (0,)})
    write_chrome(Capture(PROCESSES, BUCKETS, (*chain(), change), views=views), tmp_path / "t.gz")
    (event,) = [event for event in events_of(tmp_path / "t.gz") if event.get("cat") == "change"]
    assert (event["ph"], event["s"], event["name"]) == ("i", "g", "generation 2: rank 1 died")
    assert event["args"] == {
        "step": 3, "rank": 1, "generation": 2, "ranks": [0], "reason": "rank 1 died", "note": "step 3 lacks it",
        "lacking": {"a, b": [0]},
    }  # fmt: skip


def of_table(step: int = 3) -> list[Span]:
    """A table, bucket 1, on one pserver: rank 0 asks for rows, in two answers, and adds gradients; rank 1 adds none."""
    common: dict[str, int] = {"step": step, "bucket": 1, "priority": 1, "rank": 0}
    asks = {**common, "slice": FIRST_LOOKUP + 7, "pserver": 0}
    adds = {**common, "slice": 0, "pserver": 0}
    return [
        Span("lookup", 0, "gates", 1000, 5000, **common),
        Span("queued", 0, "queue", 1000, 1100, **asks),
        Span("wire", 0, "to pserver 0", 1100, 2000, **asks),
        Span("held", 2, "rows", 2000, 4000, **asks),
        Span("reply_queued", 2, "reply queue", 2000, 2100, **asks),
        Span("reply_wire", 2, "to worker 0", 2100, 2500, **asks),
        Span("reply_wire", 2, "to worker 0", 4100, 4500, **asks),
        Span("ready", 0, "gradients", 6000, 6000, **common),
        Span("wire", 0, "to pserver 0", 6100, 7000, **adds),
        Span("aggregate", 2, "aggregate", 7000, 8000, **{**adds, "slice": -1}),
        Span("reply_wire", 2, "to worker 0", 8100, 9000, **adds),
    ]


def test_of_a_table_ids_rows_and_gradients_are_told_apart_and_arrows_do_not_mix_them(tmp_path: Path) -> None:
    assert Capture(PROCESSES, BUCKETS, tuple(chain())).tables == set()
    capture = Capture(PROCESSES, BUCKETS, tuple(of_table()))
    assert capture.tables == {1}
    assert [capture.title(span) for span in capture.spans] == [
        *("lookup a, b", "queued ids of a, b", "wire ids of a, b", "held a, b", "reply_queued rows of a, b"),
        *("reply_wire rows of a, b", "reply_wire rows of a, b", "ready gradients of a, b"),
        *("wire gradients of a, b", "aggregate gradients of a, b", "reply_wire gradients of a, b"),
    ]
    write_chrome(capture, tmp_path / "t.gz")
    events = events_of(tmp_path / "t.gz")
    (asked,) = [event for event in events if event["name"] == "wire ids of a, b"]
    assert asked["args"]["key"] == f"1/{FIRST_LOOKUP + 7}"
    flows: dict[int, list[float]] = {}
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event["ts"])
    assert list(flows.values()) == [[0.1, 1.0, 1.1, 3.1], [5.1, 6.0, 7.1]]
    worker, pserver = ([lane for where, lane in by_lane(capture.spans) if where == process] for process in (0, 2))
    assert (worker, pserver) == (
        ["gates", "gradients", "queue", "to pserver 0"], ["rows", "aggregate", "reply queue", "to worker 0"]
    )  # fmt: skip


def test_questions_for_rows_are_those_that_workers_ask() -> None:
    assert table_bucket.FIRST_LOOKUP == FIRST_LOOKUP


@pytest.mark.parametrize("member", [b'"views":[],', b'"parts":[],'])
def test_a_file_of_before_there_were_views_or_parts_is_read(tmp_path: Path, member: bytes) -> None:
    capture = Capture(PROCESSES, BUCKETS, tuple(chain()))
    write_chrome(capture, tmp_path / "new.gz")
    text = gzip.decompress((tmp_path / "new.gz").read_bytes())
    assert text.count(member) == 1
    (tmp_path / "old.gz").write_bytes(gzip.compress(text.replace(member, b"")))
    assert read(tmp_path / "old.gz") == capture


def test_parts_that_xla_compiles_are_kept_and_named(tmp_path: Path) -> None:
    parts = CapturedPart("part 1: a", ("a",)), CapturedPart("part 2: b, backward", ("b",), ("a", "b"), 1.5)
    spans = [Span("part", 0, lane_of("part"), at, at + 1, slice=at, rank=0) for at in (0, 1, 2)]
    capture = Capture(PROCESSES, BUCKETS, (*chain(), *spans), parts=parts)
    write_chrome(capture, tmp_path / "one.gz")
    assert read(tmp_path / "one.gz") == capture
    # The last one is of a worker that has traced more than rank 0.
    assert [capture.title(span) for span in spans] == ["part 1: a", "part 2: b, backward", "part"]


def test_names_and_keys_of_spans() -> None:
    capture = Capture(PROCESSES, BUCKETS, tuple(chain()))
    names = {span.kind: (span.key, capture.variable_name(span)) for span in capture.spans}
    assert names["wire"] == ("1/0", "a, b")
    assert names["gate"] == ("1", "b")
    assert Span("step", 0, "steps", 0, 1).key == "" == capture.variable_name(Span("step", 0, "steps", 0, 1))
    assert lane_of("wire", pserver=3) == "to pserver 3"


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 20)), max_size=40))
def test_rows_hold_no_overlap_and_are_as_few_as_possible(found: list[tuple[int, int]]) -> None:
    ranges = [(begin, begin + length) for begin, length in sorted(found)]
    placed = rows(ranges)
    for row in set(placed):
        own = [one for one, where in zip(ranges, placed, strict=True) if where == row]
        assert all(first[1] <= second[0] for first, second in pairwise(own))
    deepest = max((sum(b <= at < e for b, e in ranges) for at, _ in ranges), default=0)
    assert max(placed, default=-1) + 1 == deepest
