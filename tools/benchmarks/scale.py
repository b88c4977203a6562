"""How throughput, CPU and memory grow: with hosts, with pservers, with variables, with bytes. Without TensorFlow.

Hosts and pservers: VGG-19 whose computation sleeps (tools/emulation.py), on hosts of equal bandwidth; everything else
is tfps itself. Bytes, slices and bandwidth are divided by one number and times multiplied, so that 16 processes fit on
a small machine; bandwidths are reported as they would be without. Parts are slices of 8 KiB: 64 KiB,
tfps' own, would stand for 16 MiB. *Co-located*: worker i and pserver i share host i,
whose link then carries 2 (N - 1) / N bytes per byte of parameters: 1 with 2 workers, 1.75 with 8. *Dedicated*:
pservers have hosts of their own, and every link carries 1 byte per byte whatever N is. `of_2` is a worker's throughput
relative to that of one of 2 workers, `allowed` the same of the lower bounds (docs/lower_bound.md).

Variables and bytes: 2 workers and 1 pserver on one host without a limit of rate, nothing computed, through sockets as
to other hosts; bytes also through shared memory. Variables are fused up to 64 KiB only, not up to a slice as tfps does
it, so that many variables are many buckets. Peak memory is compared with what it may be: a pserver's with 1.5 times its
shard and one window per worker; a worker's with its buffers (the gradients, which the caller holds, and one window per
direction) and 1.25 times the gradients on top; both besides what the process has when it has exchanged next to nothing.
What is shared counts as the worker's, who owns it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from tfps.types import Argument, Json
from tools import model_profiles
from tools.benchmarks.common import Outcome, median
from tools.emulation import GOODPUT, Emulation, Task
from tools.model_profiles import Layer, Profile
from tools.netlab import Host, Netlab
from tools.simulation import Cluster, Settings, lower_bound, simulate

MODEL, BYTES_DIVISOR, TIME_FACTOR = "vgg19", 256, 5
SLICE_BYTES = 2 * 2**20 // BYTES_DIVISOR  # smaller ones would cost more CPU than this machine has
# As many windows as there are streams stand in front of an urgent slice. With 8 workers and 8 pservers on 8 hosts a
# step takes 6 % longer with windows of 4 slices.
WINDOW_BYTES = SLICE_BYTES
FUSE_BYTES = 2**20 // BYTES_DIVISOR
WORKERS = (2, 4, 8)
PSERVERS = (1, 2, 3, 4)  # for 4 workers
RATIOS = (0.5, 1.0)  # wire time at 1 byte per byte over computing time
MAX_HOSTS = 2 * max(WORKERS)

GROWTH_SLICE_BYTES, GROWTH_WINDOW_BYTES = 2**20, 4 * 2**20  # what a job starts with
GROWTH_WORKERS = 2
GROWTH_STEPS = 10
VARIABLES, VARIABLES_MB = (10, 50, 200, 500, 1000, 2000), 50
MEGABYTES, MEGABYTES_VARIABLES = (1, 5, 20, 50, 100, 200), 50
MB = 1_000_000


@dataclass(frozen=True)
class Hosts:
    """Who trains with whom, and where the pservers are."""

    workers: int
    pservers: int
    dedicated: bool

    @property
    def layout(self) -> str:
        return "dedicated" if self.dedicated else "co-located"

    def cluster(self, rate_mbit: float) -> Cluster:
        return Cluster(
            self.workers,
            self.pservers,
            rate_gbit=rate_mbit / 1000,
            goodput=GOODPUT,
            dedicated=self.dedicated,
            machine_cores=len(os.sched_getaffinity(0)),
        )


class _Pair:
    """Two hosts that an emulation takes for one: the worker runs on the first, the pserver on the second."""

    def __init__(self, worker: Host, pserver: Host) -> None:
        self._worker, self._pserver = worker, pserver
        self.address = pserver.address

    def popen(self, command: Sequence[str], **options: Argument) -> subprocess.Popen[str]:
        host = self._worker if command[-1] == "worker" else self._pserver
        return host.popen(command, **options)


def run(quick: bool) -> Outcome:
    """Hosts and pservers interleaved over the rounds, then variables and bytes in fresh processes each."""
    runs: list[dict[str, Json]] = []
    with Netlab(MAX_HOSTS, 1000.0) as lab:
        runs += measure_hosts(lab, quick)
        some = len(VARIABLES) - 1 if quick else 1  # the first and the last
        cases = [("variables", number, VARIABLES_MB) for number in VARIABLES[::some]]
        cases += [
            (what, MEGABYTES_VARIABLES, each) for what in ("bytes", "shared memory") for each in MEGABYTES[::some]
        ]
        idle = measure_growth(lab, "idle", 1, 0.004)
        for _ in range(1 if quick else 3):
            for what, variables, megabytes in cases:
                runs.append(measure_growth(lab, what, variables, megabytes, idle))
    return Outcome(headline(runs), runs)


# Hosts and pservers


def measure_hosts(lab: Netlab, quick: bool) -> list[dict[str, Json]]:
    """Every number of workers and pservers, co-located and dedicated."""
    counts = dict.fromkeys([(n, n) for n in WORKERS] + [(max(PSERVERS), n) for n in PSERVERS])
    cases = [Hosts(*count, dedicated) for dedicated in (False, True) for count in counts]
    if quick:
        cases = [case for case in cases if case.workers == case.pservers or (case.pservers == 1 and not case.dedicated)]
    profile = model_profiles.load(MODEL).scaled(BYTES_DIVISOR, TIME_FACTOR)
    runs = []
    with contextlib.ExitStack() as stack:
        emulations = {case: stack.enter_context(_emulation(lab, case)) for case in cases}
        for ratio in RATIOS[:1] if quick else RATIOS:
            rate_mbit = profile.nbytes * 8 / (ratio * profile.compute_s) / 1e6 / GOODPUT
            lab.set_rate(rate_mbit)
            lab.probe()
            for number, case in itertools.product(range(1 if quick else 2), cases):
                found = measure(emulations[case], case, profile, rate_mbit, steps=3)
                runs.append({"what": "hosts", "round": number, "wire_over_compute": ratio, **found})
                print(
                    f"{case.workers} workers, {case.pservers} pservers, {case.layout:10} {found['gbit']:5.1f} Gbit/s "
                    f"{found['step_s']:.3f} s/step, {found['bound_s'] / found['step_s']:.2f} of the bound, "
                    f"simulated {found['simulated_s']:.3f}",
                    flush=True,
                )
    return runs


def _emulation(lab: Netlab, case: Hosts) -> Emulation:
    hosts = list(lab.hosts)
    if case.dedicated:
        # A host that only one of the two is on is paired with itself.
        pairs = itertools.zip_longest(hosts[: case.workers], hosts[case.workers : case.workers + case.pservers])
        hosts = [cast(Host, _Pair(worker or pserver, pserver or worker)) for worker, pserver in pairs]
    return Emulation(hosts, case.workers, case.pservers, part_bytes=SLICE_BYTES)


def measure(emulation: Emulation, case: Hosts, profile: Profile, rate_mbit: float, steps: int) -> dict[str, Json]:
    """One run, the bound and the simulation of it."""
    task = Task(
        profile,
        "priority",
        case.workers,
        case.pservers,
        SLICE_BYTES,
        WINDOW_BYTES,
        FUSE_BYTES,
        warmup_steps=1,
        steps=steps,
    )
    found = emulation.run(task)
    cluster = case.cluster(rate_mbit)
    settings = Settings(
        slice_bytes=SLICE_BYTES, window_bytes=WINDOW_BYTES, fuse_bytes=FUSE_BYTES, first_bytes=FUSE_BYTES // 16
    )
    place = {"workers": case.workers, "pservers": case.pservers, "layout": case.layout, "model": MODEL}
    return {
        **place,
        "gbit": rate_mbit * BYTES_DIVISOR * TIME_FACTOR / 1000,
        "compute_s": profile.compute_s,
        "bytes_divisor": BYTES_DIVISOR,
        "time_factor": TIME_FACTOR,
        "bound_s": lower_bound(profile, cluster),
        "simulated_s": simulate(profile, cluster, settings).step_s,
        **found,
    }


# Variables and bytes


def measure_growth(
    lab: Netlab, what: str, variables: int, megabytes: float, idle: Mapping[str, Json] | None = None
) -> dict[str, Json]:
    """One exchange without computing, in fresh processes, whose peak memory is that of this exchange alone."""
    profile = _flat(variables, round(megabytes * MB))
    task = Task(
        profile,
        "priority",
        GROWTH_WORKERS,
        1,
        GROWTH_SLICE_BYTES,
        GROWTH_WINDOW_BYTES,
        warmup_steps=2,
        steps=GROWTH_STEPS,
        shared_memory=what == "shared memory",
    )
    with Emulation([lab.hosts[0]] * GROWTH_WORKERS, GROWTH_WORKERS, 1) as emulation:  # over the host's own loopback
        found = emulation.run(task)
    found |= {"what": what, "variables": variables, "megabytes": megabytes, "buckets": len(task.plan.layers)}
    if idle is None:
        return found
    found["pserver_peak_bytes"] -= found["shared_bytes"]
    pserver_bytes = found["pserver_peak_bytes"] - idle["pserver_peak_bytes"]
    worker_bytes = found["worker_peak_bytes"] - idle["worker_peak_bytes"]
    found |= {
        "idle_pserver_bytes": idle["pserver_peak_bytes"],
        "idle_worker_bytes": idle["worker_peak_bytes"],
        "pserver_of_aim": pserver_bytes / (1.5 * profile.nbytes + GROWTH_WINDOW_BYTES * GROWTH_WORKERS),
        "worker_of_aim": worker_bytes / (2.25 * profile.nbytes + 2 * GROWTH_WINDOW_BYTES),
    }
    print(
        f"{variables:5} variables, {megabytes:5} MB ({what}): {found['step_s']:.3f} s/step, CPU ms/step of a worker "
        f"{found['worker_cpu_s'] * 1e3:.0f}, of the pserver {found['pserver_cpu_s'] * 1e3:.0f}; peak MB over idle: "
        f"worker {worker_bytes / MB:.0f}, pserver {pserver_bytes / MB:.0f}; of the aim: "
        f"worker {found['worker_of_aim']:.2f}, pserver {found['pserver_of_aim']:.2f}",
        flush=True,
    )
    return found


def _flat(variables: int, nbytes: int) -> Profile:
    """Variables of equal size, nothing to compute."""
    items = nbytes // 4
    sizes = [(items // variables + (number < items % variables)) * 4 for number in range(variables)]
    layers = tuple(Layer(f"v{number}", 0.0, 0.0, size) for number, size in enumerate(sizes))
    return Profile(f"flat{variables}", layers, "Made for tools/benchmarks/scale.py.")


# What comes out


def headline(runs: Sequence[Mapping[str, Json]]) -> dict[str, float]:
    """Medians over rounds."""
    figures: dict[str, float] = {}
    hosts = [r for r in runs if r["what"] == "hosts"]
    for layout, ratio in sorted({(r["layout"], r["wire_over_compute"]) for r in hosts}):
        same = [r for r in hosts if r["layout"] == layout and r["wire_over_compute"] == ratio]
        for key, baseline, count in (("8_workers_of_2", (2, 2), (8, 8)), ("4_pservers_of_1", (4, 1), (4, 4))):
            if not any((r["workers"], r["pservers"]) == baseline for r in same):
                continue  # not in a quick run
            reached, allowed = (_of(same, baseline, count, field) for field in ("step_s", "bound_s"))
            name = f"{layout.replace('-', '')}_{ratio:g}_{key}"
            figures[name], figures[f"{name}_allowed"] = reached, allowed
    figures["simulation_error"] = statistics.median(abs(r["simulated_s"] / r["step_s"] - 1) for r in hosts)
    growth = [r for r in runs if r["what"] != "hosts"]
    for key, what, field, unit in (
        ("cpu_ms_per_bucket", "variables", "buckets", 1e3),
        ("cpu_s_per_gb", "bytes", "megabytes", 1e3),
        ("shared_memory_cpu_s_per_gb", "shared memory", "megabytes", 1e3),
    ):
        same = [r for r in growth if r["what"] == what]
        low, high = (pick(r[field] for r in same) for pick in (min, max))
        each = [_cpu_s([r for r in same if r[field] == end]) for end in (low, high)]
        figures[key] = (each[1] - each[0]) / (high - low) * unit
    for who in ("pserver", "worker"):
        figures[f"idle_{who}_mb"] = growth[0][f"idle_{who}_bytes"] / MB
        figures[f"{who}_memory_of_aim"] = max(r[f"{who}_of_aim"] for r in growth)
    return figures


def _of(runs: Sequence[Mapping[str, Json]], baseline: tuple[int, int], count: tuple[int, int], field: str) -> float:
    """Throughput with `count` workers and pservers, of that with `baseline`."""
    each = [[r for r in runs if (r["workers"], r["pservers"]) == which] for which in (baseline, count)]
    return median(each[0], field) / median(each[1], field)


def _cpu_s(runs: Sequence[Mapping[str, Json]]) -> float:
    """CPU of one step per worker: its own and its part of the pserver's."""
    return median(runs, "worker_cpu_s") + median(runs, "pserver_cpu_s") / GROWTH_WORKERS
