"""Two captures of the same job, read from tests/data: 3 steps of ResNet-50, 2 workers, 2 pservers, 2 Gbit/s.

The simulator that is in the repository up to commit 2e7a4075 made them, under the policies "priority" and "fifo".
"""

from __future__ import annotations

import functools
from pathlib import Path

from tfps.trace.capture import Capture
from tfps.trace.capture_file import read

FOLDER = Path(__file__).resolve().parent.parent / "data"
COMPUTE_S, NBYTES = 0.266, 102_334_368  # of a step: forward and backward, and what each worker pushes


@functools.cache
def capture(policy: str) -> Capture:
    """The one of a policy."""
    return read(FOLDER / f"{policy}.trace.json.gz")
