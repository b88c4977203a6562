"""Progress of a long transfer: a bar in a terminal, one line elsewhere, nothing if it is quick."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.progress

logger = logging.getLogger("tfps")
_BAR_AFTER_S = 0.5  # no bar that only flashes
_LINE_AFTER_S = 5.0


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Context manager that shows how many of `total` bytes are transferred. For one thread.

    The bar is drawn on stderr with rich, if installed, and removed at the end.

    Args:
        what: `"tfps: initial values"`.
        total: bytes; 0 shows nothing.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._done = 0
        self._started_s = 0.0  # the first `show`: before, workers may have waited for each other
        self._bar: rich.progress.Progress | None = None
        self._said = False

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, nbytes: int) -> None:
        """Counts `nbytes` as transferred."""
        self._done += nbytes
        self.show(0.0)

    def show(self, nbytes: float) -> None:
        """Shows `nbytes` beyond those added. Call it a few times per second."""
        if not self._total:
            return
        self._started_s = self._started_s or time.monotonic()
        elapsed_s, now = time.monotonic() - self._started_s, self._done + nbytes
        if self._bar is None and not self._said and elapsed_s >= _BAR_AFTER_S and now < self._total:
            self._bar = _bar(self._what, self._total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=now, refresh=True)
        elif not self._said and elapsed_s >= _LINE_AFTER_S:
            self._said = True
            left_s = elapsed_s * (self._total / now - 1) if now else 0.0
            left = f", about {left_s:.0f} s to go" if left_s else ""
            logger.info("%s: %.0f of %.0f MB%s", self._what, now / 1e6, self._total / 1e6, left)


def _bar(what: str, total: int) -> rich.progress.Progress | None:
    """A started rich bar; None without a terminal or rich."""
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True, auto_refresh=False)
    bar.add_task(what, total=total)
    bar.start()
    return bar
