"""Makes the pictures of docs/traceview.md anew: `tools/make_traceview_pictures.py`."""

from __future__ import annotations

import io
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import synthetic_captures
from PIL import Image
from tensorboard_page import ROOT, Page, tensorboard

FOLDER = ROOT / "docs" / "traceview"
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
    """Two policies of one job, compared; one slice, followed."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as log_dir:
        job = ["--policy=fifo", "--policy=priority", "--rate-gbit=3", "--workers=2", "--pservers=2"]
        synthetic_captures.main([log_dir, *job])
        with tensorboard(pathlib.Path(log_dir)) as address:
            page = Page()
            try:
                page.open(address)
                page("tfps.show('fifo', 'priority')")
                page.settle()
                picture(page, "compare")
                page("tfps.show('priority', '')")
                page.settle()
                page(_FOLLOW)
                page.driver.set_window_size(1500, 1300)
                page.driver.execute_script("parent.document.body.classList.add('dark-mode')")
                picture(page, "follow")
            finally:
                page.close()


def picture(page: Page, name: str) -> None:
    """Saves what is shown, below TensorBoard's bar."""
    page.frame()
    page.driver.switch_to.default_content()
    shot = Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("RGB")
    page.driver.switch_to.frame(0)
    shot.quantize(_COLORS).save(FOLDER / f"{name}.png", optimize=True)
    print(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
