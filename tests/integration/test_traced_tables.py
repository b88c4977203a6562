"""A capture, and the report, of two worker processes and two pservers that train tables of rows."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import processes
from recorded import captured

from tfps.pserver.server import ParameterServer
from tfps.trace.capture import Capture, Span
from tfps.trace.summary import summarize

NAMES = ["words/rows", "items/rows"]


def test_rows_are_seen_from_their_ids_to_the_step_that_waits_for_them_and_in_the_report(tmp_path: Path) -> None:
    servers = [ParameterServer("127.0.0.1", 0, workers=2) for _ in range(2)]
    addresses = [server.address for server in servers]
    with processes.started("traced_tables.py", addresses, 2, [[str(tmp_path)]] * 2) as running:
        first, second = processes.outputs(running)
    for server in servers:
        server.stop()
    capture = captured(tmp_path)
    assert sorted(capture.buckets[bucket].name for bucket in capture.tables) == sorted(NAMES)
    for step in capture.steps[1:-1]:  # the first and the last one of rank 1 may be recorded in part
        for bucket in capture.tables:
            for rank in (0, 1):
                _check(capture, step, bucket, rank)
    summary = summarize(capture)
    assert sorted(table.table for table in summary.tables) == sorted(NAMES)
    waited = sum(cost.exposed_ns for cost in summary.costs if cost.variable in NAMES)
    assert 0 < waited <= sum(table.wait_ns for table in summary.tables)
    assert all(min(table.questions, table.rows_bytes, table.gradient_bytes) > 0 for table in summary.tables)
    for said in (first, second):
        assert re.search(r"rows of words/rows: 20 asked for and 20 with gradients a step, 0.00064 and 0.00064 MB", said)
        assert re.search(r"rows of items/rows: 64 asked for and 64 with gradients a step, 0.0041 and 0.0041 MB", said)
        assert re.search(r"waiting: .* for rows, .* for dense parameters alone", said)


def _check(capture: Capture, step: int, bucket: int, rank: int) -> None:
    """Rows come back before the lookup ends, and gradients are there before they are queued."""
    error = 2 * max(process.clock_error_ns for process in capture.processes) + 1_000_000
    asked, gradients = defaultdict[str, list[Span]](list), defaultdict[str, list[Span]](list)
    for span in capture.spans:
        if (span.step, span.bucket, span.rank) == (step, bucket, rank):
            (asked if capture.is_lookup(span) else gradients)[span.kind].append(span)
    (lookup,) = asked["lookup"]
    (whole,) = (one for one in capture.spans if (one.kind, one.step, one.rank) == ("step", step, rank))
    assert whole.begin_ns - error <= lookup.begin_ns <= lookup.end_ns <= whole.end_ns + error
    held = {(one.slice, one.pserver): one for one in asked["held"]}
    assert {pserver for _, pserver in held} == {0, 1}
    assert sum(one.nbytes for one in held.values()) == lookup.nbytes
    for one in asked["reply_wire"]:
        if (one.slice, one.pserver) in held:
            assert one.end_ns <= lookup.end_ns + error
    (ready,) = gradients["ready"]
    assert ready.begin_ns >= lookup.end_ns
    assert {one.pserver for one in gradients["wire"]} == {0, 1}
    assert min(one.begin_ns for one in gradients["queued"]) >= ready.begin_ns
