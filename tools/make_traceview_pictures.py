#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Makes pictures anew: `tools/make_traceview_pictures.py` those of docs/traceview.md, from a simulation;
`tools/make_traceview_pictures.py LOG_DIR` those of docs/finding_what_is_slow.md and docs/modes.md, from what
tools/record_examples.py has recorded there.
"""

from __future__ import annotations

import io
import pathlib
import sys
import tempfile

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


def main() -> None:
    """Of simulated or of recorded runs."""
    if len(sys.argv) > 1:
        recorded(pathlib.Path(sys.argv[1]))
    else:
        simulated()


def recorded(log_dir: pathlib.Path) -> None:
    """Two policies of one job, compared; a host with a slow link; two ways to exchange a round, compared."""
    with tensorboard(log_dir) as address:
        page = Page()
        try:
            page.open(address)
            for name, runs in (
                ("compare", "'fifo', 'priority'"),
                ("slow_host", "'slow_host', ''"),
                ("streaming", "'diloco', 'streaming'"),
            ):
                page(f"tfps.show({runs})")
                page.settle()
                picture(page, RECORDED / f"{name}.png")
        finally:
            page.close()


def simulated() -> None:
    """Two policies of one job, compared; one slice, followed."""
    with tempfile.TemporaryDirectory() as log_dir:
        job = ["--policy=fifo", "--policy=priority", "--rate-gbit=3", "--workers=2", "--pservers=2"]
        synthetic_captures.main([log_dir, *job])
        with tensorboard(pathlib.Path(log_dir)) as address:
            page = Page()
            try:
                page.open(address)
                page("tfps.show('fifo', 'priority')")
                page.settle()
                picture(page, SIMULATED / "compare.png")
                page("tfps.show('priority', '')")
                page.settle()
                page(_FOLLOW)
                page.driver.set_window_size(1500, 1300)
                page.driver.execute_script("parent.document.body.classList.add('dark-mode')")
                picture(page, SIMULATED / "follow.png")
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
