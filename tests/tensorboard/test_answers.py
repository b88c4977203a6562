"""What the plugin answers to the page; no browser is needed."""

from __future__ import annotations

from pathlib import Path

from tensorboard.plugins.base_plugin import TBContext
from werkzeug.test import Client

from tests.trace.test_capture import BUCKETS, PROCESSES, chain
from tfps.tensorboard import ParameterServersPlugin
from tfps.trace.capture import Capture, CapturedView, Span
from tfps.trace.capture_file import chrome_path, write_chrome
from tfps.types import Json


def answers(log_dir: Path, run: str) -> tuple[Json, Json]:
    """The capture and its summary."""
    apps = ParameterServersPlugin(TBContext(logdir=str(log_dir))).get_plugin_apps()
    found = [Client(apps[path]).get("/", query_string={"run": run}) for path in ("/capture", "/summary")]
    assert [each.status_code for each in found] == [200, 200]
    return found[0].json, found[1].json


def test_changes_of_the_view_are_in_the_capture_and_in_its_summary(tmp_path: Path) -> None:
    step, change = Span("step", 0, "steps", 0, 9000, step=3), Span("change", 0, "view", 6000, 6000, step=3, rank=1)
    views = CapturedView(1, (0, 1)), CapturedView(2, (0,), "rank 1 died", "step 3 lacks it", {"a, b": (0,)})
    capture = Capture(PROCESSES, BUCKETS, (step, *chain(), change), views=views)
    write_chrome(capture, chrome_path(tmp_path, "one"))
    columns, summary = answers(tmp_path, "one")
    kind = columns["kinds"].index("change")
    assert columns["columns"]["kind"].index(kind) == capture.spans.index(change)
    assert columns["views"] == [
        {"generation": 1, "ranks": [0, 1], "reason": "", "note": "", "lacking": {}},
        {"generation": 2, "ranks": [0], "reason": "rank 1 died", "note": "step 3 lacks it", "lacking": {"a, b": [0]}},
    ]
    assert summary["view"] == "generation 1, with workers 0, 1 and pserver c:7070"
    assert summary["changes"] == [
        "0.006 ms, in step 3: generation 2, with worker 0: rank 1 died; step 3 lacks it",
    ]
