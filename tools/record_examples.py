#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Records the traces of docs/finding_what_is_slow.md and docs/modes.md: `tools/record_examples.py LOG_DIR`; needs root.

Two workers and two pservers, each on a host of its own, train a VGG-19 whose layers sleep as long as an accelerator
computes, with a sixteenth of its bytes. What is recorded, as runs of LOG_DIR:

* `fifo` and `priority`: the same job under both policies, 312 Mbit/s per host (5 Gbit/s for the whole model);
* `slow_host`: as `priority`, but worker 1's host has a third of the others' bandwidth;
* `diloco` and `streaming`: a round of 4 steps, exchanged at once, or in 4 fragments of which each has a step's time.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile
from collections.abc import Mapping
from dataclasses import replace

from tfps.trace import capture_file
from tools.benchmarks.peers import BYTES_DIVISOR, LAB_HOSTS, vgg19
from tools.netlab import Netlab
from tools.peer_runs import Place, measure

RATE_MBIT = 5000 / BYTES_DIVISOR
WARMUP_STEPS, FIRST, STEPS = 10, 11, 3  # sizes of slices have tuned themselves by then
ROUND = 4
LOCAL = {"TFPS_MODE": "diloco", "TFPS_INNER_STEPS": str(ROUND)}
STREAMING = {**LOCAL, "TFPS_FRAGMENTS": "4", "TFPS_OVERLAP_STEPS": "1"}
SLOW_HOST = 1  # of worker 1


def main() -> None:
    """Records what is missing in LOG_DIR."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("log_dir", type=pathlib.Path, metavar="LOG_DIR")
    log_dir = parser.parse_args().log_dir.resolve()
    even = [RATE_MBIT] * LAB_HOSTS
    uneven = [rate / 3 if host == SLOW_HOST else rate for host, rate in enumerate(even)]
    record(log_dir, "fifo", even, {"TFPS_POLICY": "fifo"})
    record(log_dir, "priority", even, {})
    record(log_dir, "slow_host", uneven, {})
    record(log_dir, "diloco", even, LOCAL, 2 * ROUND)
    record(log_dir, "streaming", even, STREAMING, 2 * ROUND)


def record(
    log_dir: pathlib.Path, run: str, rates_mbit: list[float], settings: Mapping[str, str], steps: int = STEPS
) -> None:
    """One run, unless it is there."""
    path = capture_file.chrome_path(log_dir, run)
    if path.exists():
        return
    with Netlab(LAB_HOSTS, rates_mbit) as lab, tempfile.TemporaryDirectory() as folder:
        trace = {"TFPS_TRACE": f"{folder}:{FIRST}-{FIRST + steps - 1}"}
        result = measure("tfps", Place(lab.hosts), vgg19(WARMUP_STEPS, steps + 3), {**trace, **settings})
        (made,) = capture_file.chrome_path(folder, "any").parent.glob(f"*{capture_file.SUFFIX}")
        capture_file.write_chrome(replace(capture_file.read(made), name=run), path)
    print(f"{run}: {result['step_s']:.3f} s/step, {path}", flush=True)


if __name__ == "__main__":
    main()
