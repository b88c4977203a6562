"""How long the trace view takes to show a capture of 300,000 spans, and to draw one frame of it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tfps.trace.capture_file import chrome_path, write_chrome
from tfps.types import Json
from tools import model_profiles, simulation
from tools.benchmarks import common
from tools.synthetic_captures import repeated, synthetic_capture
from tools.tensorboard_page import Page, missing, tensorboard

SPANS = 300_000
FRAMES = 20


def run(quick: bool) -> common.Outcome:
    """First paint: from the start of the tab until its first timeline is on the screen. Cold: TensorBoard, the browser
    and the file are new; warm: the server has sent it before."""
    if reason := missing():
        sys.exit(f"bench traceview: {reason}")
    settings = simulation.Settings(slice_bytes=1 << 20, window_bytes=2 << 20, steps=3, jitter=0.03)
    capture = synthetic_capture(model_profiles.load("vgg19"), simulation.Cluster(4, 4, 3.0), settings, "priority")
    capture = repeated(capture, -(-SPANS // len(capture.spans)))
    runs: list[dict[str, Json]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = chrome_path(folder, "priority")
        write_chrome(capture, path)
        for _ in range(2 if quick else 7):
            with tensorboard(Path(folder)) as address:
                for visit in ("cold", "warm"):
                    runs.append({"visit": visit, **_look(address)})
                    print(runs[-1], flush=True)
    cold = [one for one in runs if one["visit"] == "cold"]
    warm = [one for one in runs if one["visit"] == "warm"]
    return common.Outcome(
        {
            "spans": len(capture.spans),
            "received_mb": common.median(runs, "received_mb"),
            "first_paint_cold_s": common.median(cold, "first_paint_s"),
            "first_paint_warm_s": common.median(warm, "first_paint_s"),
            "summary_cold_s": common.median(cold, "ready_s"),
            "frame_ms": common.median(runs, "frame_ms"),
        },
        runs,
    )


def _look(address: str) -> dict[str, float]:
    page = Page()
    try:
        page.open(address)
        first_s = page("return tfps.firstPaintMs") / 1e3
        ready_s = page("return performance.now()") / 1e3
        received = page(
            "return performance.getEntriesByType('resource').reduce((sum, one) => sum + one.transferSize, 0)"
        )
        # Zooming into the middle, so that every frame shows something else.
        frames = []
        for _ in range(FRAMES):
            page("tfps.viewport.zoom(0.8)")
            page.frame()
            frames.append({"ms": page("return view.frameMs")})
        page("tfps.viewport.fit()")
        page.frame()
        return {
            "first_paint_s": first_s,
            "ready_s": ready_s,
            "received_mb": received / 1e6,
            "frame_ms": common.median(frames, "ms"),
            "whole_frame_ms": page("return view.frameMs"),
        }
    finally:
        page.close()
