"""The memory of a whole job: 256 MB of variables, 2 workers, 2 pservers, all on this machine.

16 dense layers of 2000 with SGD, batch 4 per worker, some steps of `fit` with each system's defaults, and of tfps
with one setting at a time. `alone` is Keras in one process; its figure counts twice, for two workers without exchange.

A figure is the peak, from the start of the first process to the end of training, of the sum of all processes' PSS
(`/proc/PID/smaps_rollup`: pages that several processes share count once). It is read every `PERIOD_S`; a shorter peak
may be missed. Reading takes processor time, so steps are not timed here.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from tfps.types import Json
from tools.benchmarks.common import Outcome, Table, median
from tools.peer_runs import PEERS, Place, measure
from tools.peer_workers.common import Work
from tools.peers import PeerError

ROUNDS = 3
PERIOD_S = 0.05
WORK = Work(warmup_steps=3, steps=10, width=2000, depth=16)


class Kind(NamedTuple):
    """One system, and settings in its environment. `jobs`: how often its figure counts."""

    name: str
    peer: str
    settings: dict[str, str]
    jobs: int = 1


KINDS = (
    Kind("alone, twice", "alone", {}, 2),
    Kind("Horovod", "horovod", {}),
    Kind("tfps", "tfps", {}),
    Kind("tfps, min_workers", "tfps", {"TFPS_MIN_WORKERS": "1"}),
    Kind("tfps, update on pservers", "tfps", {"TFPS_UPDATE": "server"}),
    Kind("tfps, int8", "tfps", {"TFPS_COMPRESSION": "int8"}),
)


def run(quick: bool) -> Outcome:
    """All kinds in turn; medians over the rounds."""
    runs: list[dict[str, Json]] = []
    for number, kind in itertools.product(range(1 if quick else ROUNDS), KINDS):
        runs.append({"kind": kind.name, "round": number, **_measure(kind)})
        print(runs[-1], flush=True)
    found = {
        kind.name: median(own, "gb")
        for kind in KINDS
        if (own := [one for one in runs if one["kind"] == kind.name and "gb" in one])
    }
    rows = [[name, f"{gb:.2f}"] for name, gb in found.items()]
    print(Table("The peak of all processes' memory", ["", "GB"], rows).text(), flush=True)
    return Outcome({f"{name} (GB)": gb for name, gb in found.items()}, runs)


def _measure(kind: Kind) -> dict[str, Json]:
    if reason := PEERS[kind.peer].absence:
        return {"left_out": reason}
    try:
        result = measure(kind.peer, Place(), WORK, kind.settings, memory_period_s=PERIOD_S)
    except PeerError as error:
        return {"failed": str(error)}
    return {"gb": kind.jobs * result["peak_bytes"] / 1e9}
