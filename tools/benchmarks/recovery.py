"""What a lost worker or pserver costs the others, what a join does, and an hour with a death every minute.

All with `min_workers`. Losses: three workers and two pservers exchange 1 MB per step, 10 ms apart, without TensorFlow.
One is killed, or stopped as on a host that is silent, which counts as a loss after 5 s; how long the others' longest
step in the next second (if it is silent, 7 s) takes.
Pservers: the same with 50 and 500 MB per step, where a pserver is killed (the coordinator is the first of the list),
stopped, or joins; how much longer than a usual step before it the longest step takes.
Joins: two workers in `fit`; one is killed and started again. How much longer than others the first step is in which it
takes part, for the one that stays; variables are copied through the pservers.
Growth: the same, but two workers join two others (`max_workers`): all steps in which one of them first takes part.
Deaths: three workers of which one is killed every minute, in turn, and another one started 5 s later. With
`min_workers`; without, where all are started again and go on from the last epoch (40 steps) that BackupAndRestore has
saved; with Elastic Horovod, if it is installed, that commits every 10 steps, with its timeout of 30 s and with one of 5
s (not with `--quick`). All train the same: 4 MB of gradients, 12 rows per step, which are divided among the workers. A
worker sleeps 15 ms for each of its rows, as if it had a machine of its own. Steps that count, and pauses from one new
step to the next.
Cost: two jobs of two workers and two pservers in `fit`, one with `min_workers` and one without, take epochs in turn,
50 MB of gradients per step and little to compute: steps per second, CPU and memory, with shared memory and over TCP.
Snapshots: the same over TCP for two jobs with `min_workers`, `update="server"` and Adam, of which one has
`snapshot_steps=10`. And a pserver is killed, as above, where pservers update with `snapshot_steps=10`.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tfps.types import Json
from tools import children
from tools.benchmarks.common import Outcome, median
from tools.recovery import deaths
from tools.recovery.horovod_job import HorovodError
from tools.recovery.job import LAYERS, Job, Step, until


class _Fault(NamedTuple):
    """Of one of three workers or two pservers."""

    which: str
    number: int
    how: int = signal.SIGKILL

    @property
    def watched_s(self) -> float:
        """Within this time the longest step begins: a silent host counts as lost after 5 s."""
        return 1.0 if self.how == signal.SIGKILL else 7.0


LOSSES = {
    "worker": _Fault("worker", 2),
    "rank0": _Fault("worker", 0),
    "silent": _Fault("worker", 2, signal.SIGSTOP),
}
PSERVERS = {
    "pserver": _Fault("pserver", 1),
    "coordinator": _Fault("pserver", 0),
    "pserver_silent": _Fault("pserver", 1, signal.SIGSTOP),
    "pserver_joins": None,
}
STEPS_BEFORE = {1: 100, 50: 40, 500: 10}  # a fault, by MB per step
PSERVER_RUNS = {50: 5, 500: 3}
SIZES_MB = (50, 500)
JOIN_EPOCH_MB = 2000  # of variables in the steps of an epoch: a join opens the data once for each epoch that is over
DEATH_UNITS = 512
DEATHS_S, QUICK_DEATHS_S = (60.0, 180.0), (40.0, 40.0)  # from one to the next, of all
COST_MB, COST_STEPS = 50, 20


def run(quick: bool, part: str = "") -> Outcome:
    """Medians of all parts, or of one; one run of deaths each."""
    runs: list[dict[str, Json]] = []
    headline: dict[str, float] = {}
    for name, measure in PARTS.items():
        if part in ("", name):
            outcome = measure(quick)
            runs += outcome.runs
            headline |= outcome.headline
    return Outcome(headline, runs)


def _losses(quick: bool) -> Outcome:
    runs: list[dict[str, Json]] = []
    headline: dict[str, float] = {}
    for name, fault in LOSSES.items():
        found = [_fault(name, fault, 1) for _ in range(1 if quick else 9)]
        runs += found
        headline[f"{name}_lost_s"] = median(found, "longest_s")
    return Outcome(headline, runs)


def _pservers(quick: bool) -> Outcome:
    runs: list[dict[str, Json]] = []
    headline: dict[str, float] = {}
    for size_mb in SIZES_MB[: 1 if quick else None]:
        for name, fault in PSERVERS.items():
            found = [_fault(name, fault, size_mb) for _ in range(1 if quick else PSERVER_RUNS[size_mb])]
            runs += found
            headline[f"{name}_{size_mb}mb_wait_s"] = median(found, "wait_s")
    return Outcome(headline, runs)


def _joins(quick: bool) -> Outcome:
    runs: list[dict[str, Json]] = []
    headline: dict[str, float] = {}
    for size_mb in SIZES_MB[: 1 if quick else None]:
        found = _joins_of(size_mb, 1 if quick else 5)
        runs += found
        headline[f"join_{size_mb}mb_s"] = median(found, "join_s")
    return Outcome(headline, runs)


def _growth(quick: bool) -> Outcome:
    runs = [_note(_growth_of(SIZES_MB[0])) for _ in range(1 if quick else 5)]
    return Outcome({f"grows_2_to_4_{SIZES_MB[0]}mb_s": median(runs, "grow_s")}, runs)


def _deaths(quick: bool) -> Outcome:
    every_s, window_s = QUICK_DEATHS_S if quick else DEATHS_S
    runs: list[dict[str, Json]] = []
    headline: dict[str, float] = {}
    for kind in deaths.KINDS:
        if quick and kind in deaths.HOROVOD:
            continue
        if absence := deaths.absence(kind):
            print(absence)
            continue
        try:
            one = _note(deaths.measure(kind, DEATH_UNITS, every_s, window_s))
        except HorovodError as error:  # as with a short timeout on a busy machine
            print(f"{kind} is left out: {error}")
            continue
        runs.append(one)
        headline[f"{kind}_steps_per_h"] = one["steps_per_h"]
        if one["deaths"]:
            whole = "horovod_undisturbed_steps_per_h" if kind in deaths.HOROVOD else "undisturbed_steps_per_h"
            if whole in headline:
                headline[f"{kind}_ratio"] = one["steps_per_h"] / headline[whole]
            for name in ("lost", "join"):
                headline[f"{kind}_{name}_pause_s"] = statistics.median(one[f"{name}_pauses_s"])
    return Outcome(headline, runs)


def _cost(quick: bool) -> Outcome:
    runs: list[dict[str, Json]] = []
    headline: dict[str, float] = {}
    for transport in ("shared", "tcp"):
        jobs: dict[str, dict[str, str]] = {"off": {}, "on": {"TFPS_MIN_WORKERS": "1"}}
        found = _compared("cost", transport, jobs, 5 if quick else 20)
        runs += found
        headline |= {f"{transport}_{name}": median(found, name) for name in _figures(jobs)}
    return Outcome(headline, runs)


def _figures(jobs: Iterable[str]) -> list[str]:
    each = ("steps_per_s", "cpu_s", "worker_mb", "pserver_mb")
    return ["steps_ratio", "cpu_ratio", *(f"{kind}_{figure}" for kind in jobs for figure in each)]


def _snapshots(quick: bool) -> Outcome:
    on_server = {"TFPS_MIN_WORKERS": "1", "TFPS_UPDATE": "server"}
    jobs = {"without": on_server, "with": {**on_server, "TFPS_SNAPSHOT_STEPS": "10"}}
    runs = _compared("snapshots", "tcp", jobs, 5 if quick else 20, "--adam")
    headline = {f"snapshots_{name}": median(runs, name) for name in _figures(jobs)}
    for size_mb in SIZES_MB[: 1 if quick else None]:
        name, more = f"snapshots_pserver_{size_mb}mb", jobs["with"]
        count = 1 if quick else PSERVER_RUNS[size_mb]
        found = [_fault(name, PSERVERS["pserver"], size_mb, **more) for _ in range(count)]
        runs += found
        headline[f"{name}_wait_s"] = median(found, "wait_s")
    return Outcome(headline, runs)


PARTS = {
    "losses": _losses,
    "pservers": _pservers,
    "joins": _joins,
    "growth": _growth,
    "deaths": _deaths,
    "cost": _cost,
    "snapshots": _snapshots,
}


def _note(found: dict[str, Json]) -> dict[str, Json]:
    print(" ".join(f"{key}={value}" for key, value in found.items()), flush=True)
    return found


def _fault(name: str, fault: _Fault | None, size_mb: int, **more: str) -> dict[str, Json]:
    """None: a pserver joins. `more`: environment variables."""
    with contextlib.ExitStack() as stack:
        job = Job(stack, 3, ["exchange", "--mb", str(size_mb)], **more)
        until(lambda: all(len(job.steps(each)) > STEPS_BEFORE[size_mb] for each in range(3)))
        others = list(range(3))
        if fault is None:
            began_s = job.join()
        elif fault.which == "pserver":
            began_s = job.end(job.pservers[fault.number], fault.how)
        else:
            began_s = job.end(job.workers[fault.number], fault.how)
            others.remove(fault.number)
        last_s = began_s + (1.0 if fault is None else fault.watched_s)
        until(lambda: all(job.steps(each)[-1][2] > last_s for each in others))
        usual, longest = [], []
        for each in others:
            ends = [step.end_s for step in job.steps(each)]
            before = [b - a for a, b in itertools.pairwise(ends) if b < began_s]
            usual.append(statistics.median(before[len(before) // 2 :]))  # the first ones are slower
            longest.append(max(b - a for a, b in itertools.pairwise(ends) if began_s < b and a < last_s))
        found = {"what": "fault", "which": name, "mb": size_mb, "longest_s": round(max(longest), 3)}
        usual_s = statistics.median(usual)
        return _note({**found, "usual_s": round(usual_s, 3), "wait_s": round(max(longest) - usual_s, 3)})


def _units(size_mb: int) -> int:
    """Of each layer, with so many MB of variables."""
    return int((size_mb * 1e6 / 4 / LAYERS) ** 0.5)


def _took(times: Sequence[Step]) -> dict[tuple[int, int], float]:
    """By epoch and batch: the time since the end of the step before it."""
    return {later[:2]: later[2] - earlier[2] for earlier, later in itertools.pairwise(times)}


def _joins_of(size_mb: int, count: int) -> list[dict[str, Json]]:
    with contextlib.ExitStack() as stack:
        steps = JOIN_EPOCH_MB // size_mb
        work = ["fit", "--units", str(_units(size_mb)), "--steps", str(steps)]
        job = Job(stack, 2, work, TFPS_MIN_WORKERS="1", TFPS_STEP_TIMEOUT_S="300")
        found: list[dict[str, Json]] = []
        until(lambda: len(job.steps(0)) > 3 * steps)
        for _ in range(count):
            job.end(job.workers[1])
            before = len(job.steps(1))
            job.start_again(1)
            until(lambda start=before: len(job.steps(1)) > start + steps)  # type: ignore[misc]
            first = job.steps(1)[before][:2]  # the one that stays has taken this step, too
            took = _took(job.steps(0))
            usual_s = statistics.median(s for step, s in took.items() if (step[1] == 0) == (first[1] == 0))
            one = {"what": "join", "mb": size_mb, "join_s": round(took[first] - usual_s, 3)}
            found.append(_note({**one, "usual_s": round(usual_s, 3)}))
        return found


def _growth_of(size_mb: int) -> dict[str, Json]:
    with contextlib.ExitStack() as stack:
        steps = JOIN_EPOCH_MB // size_mb
        work = ["fit", "--units", str(_units(size_mb)), "--steps", str(steps)]
        more = {"TFPS_MIN_WORKERS": "1", "TFPS_MAX_WORKERS": "4", "TFPS_STEP_TIMEOUT_S": "300"}
        job = Job(stack, 2, work, **more)
        until(lambda: len(job.steps(0)) > 3 * steps)
        for _ in range(2):
            job.add()
        until(lambda: all(job.steps(rank) for rank in (2, 3)))
        firsts = {job.steps(rank)[0][:2] for rank in (2, 3)}  # they may come together
        until(lambda: max(firsts) in _took(job.steps(0)))
        took = _took(job.steps(0))
        usual_s = statistics.median(s for step, s in took.items() if step < min(firsts))
        grow_s = sum(took[step] - usual_s for step in firsts)
        return {"what": "growth", "mb": size_mb, "grow_s": round(grow_s, 3), "usual_s": round(usual_s, 3)}


def _compared(
    what: str, transport: str, settings: Mapping[str, Mapping[str, str]], pairs: int, *options: str
) -> list[dict[str, Json]]:
    """Epochs in turn of two jobs, whose settings are environment variables."""
    first, second = settings
    with contextlib.ExitStack() as stack:
        work = ["fit", "--units", str(_units(COST_MB)), "--steps", str(COST_STEPS), "--paced", *options]
        shared = {"TFPS_SHARED_MEMORY": str(int(transport == "shared"))}
        jobs = {kind: Job(stack, 2, work, **shared, **more) for kind, more in settings.items()}
        for job in jobs.values():
            _epoch(job, 0)  # traces and tunes
        found: list[dict[str, Json]] = []
        for number in range(1, pairs + 1):
            one: dict[str, Json] = {"what": what, "transport": transport}
            for kind in (first, second) if number % 2 else (second, first):
                steps_per_s, cpu_s = _epoch(jobs[kind], number)
                one |= {f"{kind}_steps_per_s": round(steps_per_s, 3), f"{kind}_cpu_s": round(cpu_s, 4)}
                for which, processes in (("worker", jobs[kind].workers), ("pserver", jobs[kind].pservers)):
                    found_bytes = statistics.mean(children.memory_bytes(each.pid) for each in processes)
                    one[f"{kind}_{which}_mb"] = round(found_bytes / 1e6, 1)
            for figure, key in (("steps_ratio", "steps_per_s"), ("cpu_ratio", "cpu_s")):
                one[figure] = round(one[f"{second}_{key}"] / one[f"{first}_{key}"], 3)
            found.append(_note(one))
        return found


def _epoch(job: Job, number: int) -> tuple[float, float]:
    """Lets a job take an epoch; returns steps per second, from the first's end on, and CPU seconds per step, of all."""
    processes = [*job.workers, *job.pservers]
    before_s = sum(children.cpu_s(each.pid) for each in processes)
    for worker in job.workers:
        children.tell(worker, "")

    def ends(rank: int) -> list[float]:
        return [step.end_s for step in job.steps(rank) if step.epoch == number]

    until(lambda: all(len(ends(rank)) == COST_STEPS for rank in range(len(job.workers))))
    first_s, *_, last_s = ends(0)
    cpu_s = sum(children.cpu_s(each.pid) for each in processes) - before_s
    return (COST_STEPS - 1) / (last_s - first_s), cpu_s / COST_STEPS
