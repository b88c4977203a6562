#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Makes pictures anew: `tools/make_traceview_pictures.py` those of docs/traceview.md, from a simulation;
`tools/make_traceview_pictures.py LOG_DIR` those of docs/finding_what_is_slow.md and docs/modes.md, from what
tools/record_examples.py has recorded there; `tools/make_traceview_pictures.py --tables` that of docs/recommenders.md,
from a job of two workers and two pservers on this machine.
"""

from __future__ import annotations

import contextlib
import io
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from PIL import Image

from tools import synthetic_captures
from tools.tensorboard_page import ROOT, Page, tensorboard

SIMULATED, RECORDED = ROOT / "docs" / "traceview", ROOT / "docs" / "slow"
_COLORS = 240  # keeps the files small
_FOLLOW = """
const wanted = (span) => trace.kindOf(span) === "wire" && trace.step[span] === 11 && trace.rank[span] === 0
  && trace.bucket[span] === 7 && trace.slice[span] === 1;
const span = [...Array(trace.count).keys()].find(wanted);
const at = trace.begin[span] - trace.first;
tfps.viewport.show(at - 4e7, at + 1e8);
view.select(span);
view.setFocus(true);
view.scroller.scrollTop = 0;
"""
# Of the last step but one and of worker 0's part of a table on pserver 0, what docs/recommenders.md numbers: the next
# step's ids, rows that are held back, others; gradients, updates, the wait of the next step.
_NUMBERED = """
const { step, begin } = trace.steps.at(-2);
const find = (kind, of, asks) => [...Array(trace.count).keys()].find((span) => trace.kindOf(span) === kind
  && trace.step[span] === of && trace.tables.has(trace.bucket[span]) && trace.asks(span) === asks
  && trace.pserver[span] <= 0 && (trace.rank[span] === 0 || kind === "aggregate"));
const numbered = [["wire", step + 1, true], ["held", step + 1, true], ["reply_wire", step + 1, true],
  ["wire", step, false], ["aggregate", step, false], ["lookup", step + 1, true]].map((one) => find(...one));
const wide = trace.end[numbered.at(-1)] - begin;
tfps.viewport.show(begin - trace.first - 0.05 * wide, begin - trace.first + 1.08 * wide);
trace.processes.forEach((process, number) => process.number && view.closed.add(number));
pane.head.querySelector("details").open = false;
view.layout();
requestAnimationFrame(() => requestAnimationFrame(() => {
  const { left, top } = view.canvas.getBoundingClientRect();
  numbered.forEach((span, at) => {
    const mark = document.createElement("b");
    const { x, y, height } = view.rectOf(span);
    mark.textContent = at + 1;
    mark.style = `position: fixed; left: ${left + x - 18}px; top: ${top + y + height / 2 - 8}px; width: 16px;
      border-radius: 8px; background: #111; color: #fff; font: bold 11px/16px sans-serif; text-align: center`;
    document.body.append(mark);
  });
}));
"""


def main() -> None:
    """Of simulated or of recorded runs."""
    if sys.argv[1:] == ["--tables"]:
        tables()
    elif len(sys.argv) > 1:
        recorded(pathlib.Path(sys.argv[1]))
    else:
        simulated()


def recorded(log_dir: pathlib.Path) -> None:
    """Two policies of one job, compared; a host with a slow link; two ways to exchange a round, compared."""
    with shown(log_dir) as page:
        for name, runs in (
            ("compare", "'fifo', 'priority'"),
            ("slow_host", "'slow_host', ''"),
            ("streaming", "'diloco', 'streaming'"),
        ):
            page(f"tfps.show({runs})")
            page.settle()
            picture(page, RECORDED / f"{name}.png")


def simulated() -> None:
    """Two policies of one job, compared; one slice, followed."""
    with tempfile.TemporaryDirectory() as log_dir:
        job = ["--policy=fifo", "--policy=priority", "--rate-gbit=3", "--workers=2", "--pservers=2"]
        synthetic_captures.main([log_dir, *job])
        with shown(pathlib.Path(log_dir)) as page:
            page("tfps.show('fifo', 'priority')")
            page.settle()
            picture(page, SIMULATED / "compare.png")
            page("tfps.show('priority', '')")
            page.settle()
            page(_FOLLOW)
            page.driver.set_window_size(1500, 1300)
            page.driver.execute_script("parent.document.body.classList.add('dark-mode')")
            picture(page, SIMULATED / "follow.png")


def tables() -> None:
    """Two steps of a small recommender, recorded now."""
    with tempfile.TemporaryDirectory() as log_dir:
        launch = [sys.executable, "-m", "tfps.launch", "--workers", "2", "--pservers", "2"]
        subprocess.run([*launch, str(ROOT / "tools" / "traced_recommender.py"), log_dir], cwd=ROOT, check=True)
        with shown(pathlib.Path(log_dir)) as page:
            page.driver.set_window_size(1500, 940)
            page.frame()
            page(_NUMBERED)
            page.frame()
            picture(page, SIMULATED / "tables.png")


@contextlib.contextmanager
def shown(log_dir: pathlib.Path) -> Iterator[Page]:
    """The tab of a TensorBoard that serves a log directory."""
    with tensorboard(log_dir) as address:
        page = Page()
        try:
            page.open(address)
            yield page
        finally:
            page.close()


def picture(page: Page, path: pathlib.Path) -> None:
    """Saves what is shown, below TensorBoard's bar."""
    page.frame()
    page.driver.switch_to.default_content()
    shot = Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("RGB")
    page.driver.switch_to.frame(0)
    shot.quantize(_COLORS).save(path, optimize=True)
    print(path)


if __name__ == "__main__":
    main()
