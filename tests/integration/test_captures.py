"""A capture of two worker processes and two pservers."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import processes
from recorded import captured

from tfps.pserver.server import ParameterServer
from tfps.trace.capture import Capture
from tfps.trace.summary import summarize


def test_rank_0_writes_what_all_workers_and_pservers_did(tmp_path: Path) -> None:
    servers = [ParameterServer("127.0.0.1", 0, workers=2) for _ in range(2)]
    addresses = [server.address for server in servers]
    environment = {"TFPS_SLICE_BYTES": "4096", "TFPS_WINDOW_BYTES": "8192"}
    with processes.started("traced.py", addresses, 2, [[str(tmp_path)]] * 2, **environment) as running:
        first, second = processes.outputs(running)
    for server in servers:
        server.stop()
    assert "recorded 5 steps" in first
    assert "recorded" not in second
    for name in ("first", "second"):
        capture = captured(tmp_path / name)
        assert [process.name for process in capture.processes] == ["worker 0", "worker 1", "pserver 0", "pserver 1"]
        assert max(process.clock_error_ns for process in capture.processes) < 50_000_000
        assert len(capture.steps) == 5
        # Rank 1 hears of the begin and of the end a moment later: it may be in the first and in the last step already.
        for steps, workers in ((capture.steps, (0,)), (capture.steps[1:-1], (0, 1))):
            found = Counter((str(span.kind), span.process) for span in capture.spans if span.step in steps)
            for worker in workers:
                for kind in ("step", "forward", "backward"):
                    assert found[kind, worker] == len(steps), (kind, worker)
                for kind in ("ready", "queued", "wire", "update"):
                    assert found[kind, worker] >= len(steps), (kind, worker)
            for pserver in (2, 3):
                for kind in ("aggregate", "reply_queued", "reply_wire"):
                    assert found[kind, pserver] >= len(steps), (kind, pserver)
        _check_chains(capture)
    # The steps of the second `fit` go on counting where those of the first ended.
    ends = [captured(tmp_path / name).steps for name in ("first", "second", "block")]
    assert all(before[-1] < after[0] for before, after in pairwise(ends))
    summary = summarize(captured(tmp_path / "block"))
    assert summary.workers == 2
    assert summary.totals.exposed_ns > 0


def _check_chains(capture: Capture) -> None:
    """On each worker a gradient is there before its slices are queued, and they are back before the update."""
    error = 2 * max(process.clock_error_ns for process in capture.processes) + 1_000_000
    for step in capture.steps:
        spans = [span for span in capture.spans if span.step == step and span.bucket >= 0]
        for worker in (0, 1) if step in capture.steps[1:-1] else (0,):
            updates = {span.bucket: span for span in spans if span.kind == "update" and span.process == worker}
            ready = {span.bucket: span for span in spans if span.kind == "ready" and span.process == worker}
            for bucket, update in updates.items():
                queued = [one for one in spans if one.kind == "queued" and one.bucket == bucket and one.rank == worker]
                back = [
                    one for one in spans if one.kind == "reply_wire" and one.bucket == bucket and one.rank == worker
                ]
                assert queued
                assert back
                assert min(one.begin_ns for one in queued) >= ready[bucket].begin_ns - error
                assert update.begin_ns >= max(one.end_ns for one in back) - error
