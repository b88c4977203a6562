"""What a short step costs: models that compute little, so that messages, threads and wakes are what counts.

All processes are on this machine: 2 or 4 workers and, where there are any, 2 servers, on loopback. Dense layers, 12 of
64, 60 of 64 and 6 of 512, with batch 4 per worker and SGD, under tfps and its peers as in `tools/bench.py peers`;
`alone` is Keras in one process. And a recommender that is one table of a million rows of 16 floats, with the mean of 26
rows as logits and batch 64 per worker: for tfps alone, as its peers have no tables. `--quick`: one round of fewer
steps, and with 4 workers only tfps and Horovod with the smallest model, and the table.

Per step, behind those in which graphs are traced and tfps chooses the sizes of messages:

* time: of all ranks' steps together, from one step's loss to the next (`tools/bench.py peers` says more);
* CPU: user and system time of all processes, servers included;
* switches: how often threads of all processes gave up their processor to wait (`voluntary_ctxt_switches`);
* messages, of tfps: frames with data that a worker sends and receives, which are slices of gradients and of sums, rows
  and what ranks tell each other about batches.

Systems alternate within a round, and rounds go through them the other way round in turn. Figures are medians over
rounds, ratios to Horovod those of the same round.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from tfps.types import Json
from tools.benchmarks import peers
from tools.benchmarks.common import Outcome, Table, median
from tools.benchmarks.peers import CLOSEST, Case
from tools.peer_workers.common import Work

SYSTEMS = ("alone", "tfps", "horovod", "mxnet", "mwms")
ROUNDS = 5
WARMUP, STEPS, QUICK_STEPS = 60, 500, 200  # tfps gives up measuring an idle network after 50
LOOKED = 5  # timed steps that do not count: during the first one threads are looked at
MODELS = {
    "12x64": Work(WARMUP, STEPS, width=64, depth=12),
    "60x64": Work(WARMUP, STEPS, width=64, depth=60),
    "6x512": Work(WARMUP, STEPS, width=512, depth=6),
    "table": Work(WARMUP, STEPS, batch=64, width=26, classes=16, rows=1_000_000),
}
QUICK_WITH_4 = ("12x64", "table")
FIGURES = ("p50_ms", "p99_ms", "cpu_ms", "switches", "messages")
RATIOS = {"p50_to_horovod": "p50_ms", "cpu_to_horovod": "cpu_ms"}
COLUMNS = {
    "p50_ms": "p50 (ms)",
    "p99_ms": "p99 (ms)",
    "tail": "p99 / p50",
    "cpu_ms": "CPU (ms)",
    "switches": "switches",
    "messages": "messages",
    "p50_to_horovod": "p50 / Horovod",
    "cpu_to_horovod": "CPU / Horovod",
}


def cases(quick: bool) -> list[Case]:
    """What is measured."""
    found = []
    for workers, (model, work) in itertools.product((2, 4), MODELS.items()):
        few = quick and workers == 4
        if few and model not in QUICK_WITH_4:
            continue
        what = f"{model}, {workers} workers"
        systems: tuple[str, ...] = SYSTEMS if workers == 2 else SYSTEMS[1:]  # `alone` is one process either way
        if work.rows:
            what, systems = f"{what} (tfps alone: its peers have no tables)", ("tfps",)
        elif few:
            systems = CLOSEST
        sized = replace(work, workers=workers, steps=QUICK_STEPS if quick else STEPS)
        found.append(Case(f"{model}_{workers}w", what, sized, peers=systems))
    return found


def run(quick: bool) -> Outcome:
    """All systems in turn, in every case, round after round. What is left out, or fails, is in the runs, too."""
    runs: list[dict[str, Json]] = []
    for number, case in itertools.product(range(1 if quick else ROUNDS), cases(quick)):
        turned = replace(case, peers=case.peers[:: -1 if number % 2 else 1])
        of_round = []
        for result in peers.measure_case(turned):
            of_round.append({"case": case.key, "round": number, **figures(result)})
            print(f"{case.key:8} {describe(of_round[-1])}", flush=True)
        runs += beside_horovod(of_round)
    for case in cases(quick):
        print(table(case, [one for one in runs if one["case"] == case.key]).text(), flush=True)
    return Outcome(headline(runs), runs)


def figures(result: dict[str, Json]) -> dict[str, Json]:
    """What steps took, of a result of `measure`; one without figures stays as it is."""
    if "periods_s" not in result:
        return result
    periods_s = [period_s for of_rank in result["periods_s"] for period_s in of_rank[LOOKED:]]
    p50_s, p99_s = np.percentile(periods_s, (50, 99))
    found: dict[str, Json] = {name: result[name] for name in ("peer", "load", "switches", "messages") if name in result}
    return {**found, "p50_ms": 1e3 * float(p50_s), "p99_ms": 1e3 * float(p99_s), "cpu_ms": 1e3 * result["cpu_s"]}


def beside_horovod(of_round: Sequence[dict[str, Json]]) -> list[dict[str, Json]]:
    """The runs of one case in one round, with their ratios to Horovod's, if it is among them."""
    base = next((one for one in of_round if one["peer"] == "horovod" and "p50_ms" in one), None)
    if base is None:
        return list(of_round)
    return [
        {**one, **{ratio: one[name] / base[name] for ratio, name in RATIOS.items()}} if "p50_ms" in one else one
        for one in of_round
    ]


def describe(one: dict[str, Json]) -> str:
    """One run for people."""
    if "p50_ms" not in one:
        return peers.describe(one)
    return (
        f"{one['peer']:9} {one['p50_ms']:.2f} ms/step (p99 {one['p99_ms']:.2f}), {one['cpu_ms']:.2f} CPU ms, "
        f"{one['switches']:.0f} switches, load before {one['load']:.1f}"
    )


def medians(runs: Iterable[dict[str, Json]]) -> dict[str, dict[str, float]]:
    """By system: medians over rounds of what there is of it."""
    found: dict[str, dict[str, float]] = {}
    measured = [one for one in runs if "p50_ms" in one]
    for peer in dict.fromkeys(one["peer"] for one in measured):
        own = [one for one in measured if one["peer"] == peer]
        having = {name: [one for one in own if name in one] for name in (*FIGURES, *RATIOS)}
        found[peer] = {name: median(some, name) for name, some in having.items() if some}
    return found


def table(case: Case, runs: Iterable[dict[str, Json]]) -> Table:
    """A row of medians per system."""
    rows = []
    for peer, found in medians(runs).items():
        cells = {name: f"{value:.2f}" for name, value in found.items()}
        cells |= {"tail": f"{found['p99_ms'] / found['p50_ms']:.2f}", "switches": f"{found['switches']:.0f}"}
        rows.append([peer, *(cells.get(name, "") for name in COLUMNS)])
    return Table(f"{case.what}, per step", ["", *COLUMNS.values()], rows)


def headline(runs: Sequence[dict[str, Json]]) -> dict[str, float]:
    """Of system and case, as in `tfps_12x64_2w_p50_ms`; less is better."""
    return {
        f"{peer}_{case}_{name}": value
        for case in dict.fromkeys(one["case"] for one in runs)
        for peer, found in medians(one for one in runs if one["case"] == case).items()
        for name, value in found.items()
    }
