#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Writes docs/scaling.md and its plots: clusters that cannot be run on one machine, simulated (tools/simulation).

Takes some minutes. `--check` fails if the page is not what the simulation gives.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tfps.types import Argument, Options
from tools import model_profiles, pages
from tools.model_profiles import Profile
from tools.pages import COLOURS, MARKERS, log_ticks, plot, table
from tools.simulation import Cluster, Policy, Settings, lower_bound, simulate
from tools.simulation.plan import link_bytes, make_plan

PROGRAM = "tools/make_scaling_page.py"
MODELS = ("vgg19", "resnet50")
WORKERS = (16, 64, 256, 1024)
RATES = (1.0, 5.0, 10.0, 25.0, 100.0)
PARTS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)  # pservers per worker
PARTS_WORKERS, PARTS_RATES = 256, (10.0, 25.0)
KIB = 1024
DEFAULT_SLICE = 1024 * KIB
SLICES = (64 * KIB, 256 * KIB, DEFAULT_SLICE, 4096 * KIB)
FUSE, FIRST = 1024 * KIB, 64 * KIB
GOODPUT = 0.955
RACK = 16
CORES = 4


@dataclass(frozen=True)
class Case:
    """One simulation."""

    model: str
    workers: int
    pservers: int
    rate_gbit: float
    dedicated: bool = False
    slice_bytes: int = DEFAULT_SLICE
    policy: Policy = "priority"
    cores: float = 1.0
    divisor: int = 1

    @property
    def profile(self) -> Profile:
        return model_profiles.load(self.model).scaled(self.divisor)

    @property
    def cluster(self) -> Cluster:
        return Cluster(
            self.workers,
            self.pservers,
            self.rate_gbit,
            goodput=GOODPUT,
            dedicated=self.dedicated,
            process_cores=self.cores,
        )

    @property
    def settings(self) -> Settings:
        return Settings(
            policy=self.policy,
            slice_bytes=self.slice_bytes,
            fuse_bytes=FUSE // self.divisor,
            first_bytes=FIRST // self.divisor,
            mode="symmetric",
            warmup_steps=1,
            steps=1,
        )


@functools.cache
def step_s(case: Case) -> float:
    """Seconds per step."""
    return simulate(case.profile, case.cluster, case.settings).step_s


def speed(case: Case) -> float:
    """Of a worker, relative to computing without any exchange."""
    return case.profile.compute_s / step_s(case)


def best(**case: Argument) -> Case:
    """With the slice size that makes the step shortest."""
    return min((Case(**case, slice_bytes=size) for size in SLICES), key=step_s)


def limits(case: Case) -> dict[str, float]:
    """Seconds per step that each resource is busy, and how long one slice takes to be summed and sent back."""
    profile, cluster = case.profile, case.cluster
    plan = make_plan(profile, cluster, case.settings)
    owned = plan.bytes_per_pserver(case.pservers)
    counts = [0] * case.pservers
    for pieces in plan.pieces:
        for piece in pieces:
            counts[piece.owner] += 1
    ends = [
        (cluster.cpu_slice_s * count + cluster.cpu_gb_s * nbytes / 1e9) / 2
        for count, nbytes in zip(counts, owned, strict=True)
    ]
    largest = max(piece.nbytes for pieces in plan.pieces for piece in pieces)
    one_s = max(largest / cluster.bytes_per_s, cluster.end_s(largest) / case.cores)
    return {
        "computing": profile.compute_s,
        "busiest link": max(max(each) for each in link_bytes(cluster, owned)) / cluster.bytes_per_s,
        "busiest pserver's CPU": max(ends) * case.workers / case.cores,
        "worker's CPU": sum(ends) / case.cores,
        "turnaround of a slice": 2 * case.workers * one_s,
    }


def in_racks_s(model: str, workers: int, rate_gbit: float) -> float:
    """A step with sums within racks first: the rack's step, and what the exchange between racks adds to computing.

    In a rack every host is worker and pserver; then each of its pservers exchanges its part of the bytes with those of
    the other racks that own the same part. Links and processors do both, and take at least as long as both together.
    """
    racks = workers // RACK
    inside = best(model=model, workers=RACK, pservers=RACK, rate_gbit=rate_gbit)
    between = best(model=model, workers=racks, pservers=racks, rate_gbit=rate_gbit, divisor=RACK)
    shared = ("busiest link", "busiest pserver's CPU", "worker's CPU")
    least = max(limits(inside)[name] + limits(between)[name] for name in shared)
    return max(step_s(inside) + step_s(between) - between.profile.compute_s, least)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    pages.command((__doc__ or "").split("\n")[0], PROGRAM, "scaling/*.svg", make, arguments)


def make(docs: pathlib.Path) -> dict[str, bytes]:
    """The page and its plots, by path in `docs`."""
    files = {}
    for model in MODELS:
        files[f"scaling/{model}-workers.svg"] = plot(1, 2, 3.4, functools.partial(_draw_workers, model))
        files[f"scaling/{model}-pservers.svg"] = plot(1, 2, 3.4, functools.partial(_draw_pservers, model))
    return {"scaling.md": text().encode(), **files}


def _draw_workers(model: str, figure: Figure, axes: list[Axes]) -> None:
    for number, rate in enumerate(RATES):
        cases: list[Options] = [{"model": model, "workers": n, "pservers": n, "rate_gbit": rate} for n in WORKERS]
        style: Options = {"color": COLOURS[number], "marker": MARKERS[number], "label": f"{rate:g} Gbit/s"}
        style["linestyle"] = "--" if rate == RATES[-1] else "-"  # it hides the one before
        axes[0].plot(WORKERS, [speed(Case(**case)) for case in cases], **style)
        axes[1].plot(WORKERS, [speed(best(**case)) for case in cases], **style)
    axes[0].set_title(f"{model}: slices of 1 MiB")
    axes[1].set_title("the best slices of 64 KiB to 4 MiB")
    for each in axes:
        log_ticks(each, "x", WORKERS)
        each.set(xlabel="workers = pservers, co-located", ylabel="speed of a worker", ylim=(0, 1.05))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(RATES))


def _draw_pservers(model: str, figure: Figure, axes: list[Axes]) -> None:
    for each, rate in zip(axes, PARTS_RATES, strict=True):
        for number, dedicated in enumerate((False, True)):
            cases = [_part(model, part, rate, dedicated) for part in PARTS]
            style: Options = {"color": COLOURS[number], "marker": MARKERS[number]}
            style["linestyle"] = "--" if dedicated else "-"
            count = [case.pservers for case in cases]
            each.plot(count, [speed(case) for case in cases], **style, label="dedicated" if dedicated else "co-located")
            bounds = [case.profile.compute_s / lower_bound(case.profile, case.cluster) for case in cases]
            each.plot(count, bounds, color=COLOURS[number], linestyle=":")
        each.plot([], [], color="black", linestyle=":", label="what the bound allows")
        each.set(
            title=f"{model}: {PARTS_WORKERS} workers, {rate:g} Gbit/s", xlabel="pservers", ylabel="speed of a worker"
        )
        log_ticks(each, "x", count)
        each.set_ylim(0, 1.05)
    axes[0].legend(loc="lower right")


def _part(model: str, part: float, rate: float, dedicated: bool) -> Case:
    count = round(PARTS_WORKERS * part)
    return best(model=model, workers=PARTS_WORKERS, pservers=count, rate_gbit=rate, dedicated=dedicated)


def text() -> str:
    """The page."""
    parts = [_INTRODUCTION]
    for model in MODELS:
        profile = model_profiles.load(model)
        size = f"{profile.nbytes / 1e6:.0f} MB, computing {profile.compute_s:.3f} s"
        parts += [f"## {model} ({size})\n", _workers(model), _limits(model), _pservers(model), _remedies(model)]
    return "\n".join([*parts, words()])


def _slice(nbytes: int) -> str:
    return f"{nbytes // KIB} KiB" if nbytes < 1024 * KIB else f"{nbytes // (1024 * KIB)} MiB"


def _workers(model: str) -> str:
    rows, gains = [], []
    for n in WORKERS:
        row, gain = [str(n)], [str(n)]
        for rate in RATES:
            at: Options = {"model": model, "workers": n, "pservers": n, "rate_gbit": rate}
            tuned = best(**at)
            row.append(f"{speed(Case(**at)):.2f} / {speed(tuned):.2f} ({_slice(tuned.slice_bytes)})")
            gain.append(f"{step_s(Case(**at, policy='overlap')) / step_s(tuned):.2f}")
        rows.append(row)
        gains.append(gain)
    heads = ["workers = pservers", *(f"{rate:g} Gbit/s" for rate in RATES)]
    return (
        "As many pservers as workers, co-located: speed of a worker with slices of 1 MiB / with the best (size).\n\n"
        f"![{model}: speed over workers](scaling/{model}-workers.svg)\n\n{table(heads, rows)}\n"
        "Step time of `overlap` over that of priority with the best slices. Overlap sends variables of less than a "
        "million items whole, each to one pserver, and waits for everything:\n\n" + table(heads, gains)
    )


def _limits(model: str) -> str:
    rows = []
    for n in WORKERS:
        for case in (Case(model, n, n, 10.0), best(model=model, workers=n, pservers=n, rate_gbit=10.0)):
            found = limits(case)
            most = max(found.values())
            figures = (f"**{each:.3f}**" if each == most else f"{each:.3f}" for each in found.values())
            rows.append([f"{n}, {_slice(case.slice_bytes)}", *figures, f"{step_s(case):.3f}"])
    heads = ["workers = pservers, slices", *(f"{name} (s)" for name in limits(Case(model, 16, 16, 10.0))), "step (s)"]
    return "Where the time goes at 10 Gbit/s, co-located, with slices of 1 MiB and with the best:\n\n" + table(
        heads, rows
    )


def _pservers(model: str) -> str:
    rows = []
    for part in PARTS:
        found = [_part(model, part, rate, dedicated) for dedicated in (False, True) for rate in PARTS_RATES]
        rows.append([str(found[0].pservers), *(f"{speed(case):.2f} ({_slice(case.slice_bytes)})" for case in found)])
    heads = [
        "pservers",
        *(f"{place}, {rate:g} Gbit/s" for place in ("co-located", "dedicated") for rate in PARTS_RATES),
    ]
    return (
        f"{PARTS_WORKERS} workers, fewer and more pservers: speed of a worker with the best slices (size).\n\n"
        f"![{model}: speed over pservers](scaling/{model}-pservers.svg)\n\n{table(heads, rows)}"
    )


def _remedies(model: str) -> str:
    compute_s = model_profiles.load(model).compute_s
    rows = []
    for n in (256, 1024):
        for rate in (10.0, 25.0, 100.0):
            at: Options = {"model": model, "workers": n, "rate_gbit": rate}
            cases = (
                Case(**at, pservers=n),
                best(**at, pservers=n),
                best(**at, pservers=n, dedicated=True),
                best(**at, pservers=2 * n, dedicated=True),
                best(**at, pservers=n, cores=CORES),
            )
            racks = compute_s / in_racks_s(model, n, rate)
            rows.append([f"{n}, {rate:g} Gbit/s", *(f"{speed(case):.2f}" for case in cases), f"{racks:.2f}"])
    heads = ["workers, bandwidth", "1 MiB slices", "best slices", "dedicated pservers", "twice as many"]
    head = (
        f'What helps: speed of a worker. "Twice as many" are dedicated too; the others are co-located; racks of {RACK}.'
    )
    return f"{head}\n\n" + table([*heads, f"{CORES} cores per process", "sums in racks first"], rows)


_INTRODUCTION = f"""# Scaling beyond one machine

Written by `{PROGRAM}`; do not edit. Everything on this page is *simulated* (`tools/simulate.py`), nothing is measured.

**Speed of a worker** is computing time divided by step time: 1 is a network that does not show.

What is assumed: a link per host of the given rate in each direction, {GOODPUT:.1%} of it payload, 50 µs one way, and
a switch that carries everything; 0.25 ms of CPU per slice and 1.7 s per GB for all four ends together (worker and
pserver, send and receive), and one core per process; times of layers of a 2016 GPU (`tools/profiles`). A GPU ten times
as fast needs ten times the bandwidth, and a processor ten times as fast, for the same speed. Variables are fused up to
1 MiB.

How far to trust it:

- The simulation was compared with real processes for 2 to 8 workers and 1 to 8 pservers on emulated hosts
  ([benchmarks.md](benchmarks.md)). From there to this page it is extrapolation.
- One worker stands for all (`mode="symmetric"`): in step, alike, and the stream inside a host no faster than others.
  Compared with every worker simulated, up to 64 + 64, that is up to 8 % off.
- CPU is a quarter of the cost at each of the four ends. `tools/bench.py scale` finds more on loopback, kernel and sums
  included: about 2.5 s per GB and 0.4 ms per bucket. Where CPU is the limit, steps may take half as long again.
- No TCP: no slow start, no losses when a thousand workers send to one port at once. No other traffic, no switch with
  less than full bisection, no slow workers. What a window lets into the network stands in no line there; in truth it
  does, on all streams of a host: with 8 + 8 emulated hosts a step took 6 % longer with windows of four slices than with
  windows of one.
- A pserver has two threads per worker. Nobody has tried a thousand.
"""


def words() -> str:
    """What breaks first and what to do, with figures of the same simulations."""

    def equal(model: str, n: int, rate: float) -> tuple[Case, Case]:
        at: Options = {"model": model, "workers": n, "pservers": n, "rate_gbit": rate}
        return Case(**at), best(**at)

    big, fine = equal("vgg19", 1024, 10.0)
    resnet = equal("resnet50", 1024, 10.0)
    few = _part("vgg19", 1 / 8, 25.0, True)
    once, twice, apart = (_part("vgg19", *each) for each in ((1.0, 10.0, False), (2.0, 10.0, False), (1.0, 10.0, True)))
    link, cpu, turnaround = "busiest link", "busiest pserver's CPU", "turnaround of a slice"
    of_few, of_big, of_fine = limits(few), limits(big), limits(fine)
    own_cpu_s = of_fine["worker's CPU"]
    pieces = sum(map(len, make_plan(big.profile, big.cluster, big.settings).pieces))
    fine_pieces = sum(map(len, make_plan(fine.profile, fine.cluster, fine.settings).pieces))
    gb_per_s = 2 / big.cluster.cpu_gb_s
    racks = [case.profile.compute_s / in_racks_s(case.model, 1024, 10.0) for case in (big, resnet[0])]
    return f"""## What breaks first

1. **The pserver, where there are fewer than workers.** It sends and receives workers / pservers times its equal share.
   {few.pservers} pservers for {few.workers} workers hold VGG-19 to a speed of {speed(few):.2f} at 25 Gbit/s:
   the busiest process needs {of_few[cpu]:.1f} s of CPU per step, the busiest link {of_few[link]:.1f} s.
   As many pservers as workers is the point from which neither grows with the number of workers. Twice as many
   co-located ones raise {speed(once):.2f} to {speed(twice):.2f} at 10 Gbit/s; as many on hosts of their own
   reach {speed(apart):.2f}.
2. **The turnaround of a slice.** A slice is summed when all workers have pushed it through its pserver's link, and is
   back when it has been sent to all: 2 x workers x slice / bandwidth. That is {of_big[turnaround]:.2f} s for 1 MiB,
   1024 workers and 10 Gbit/s, and computing cannot hide that of the first layer. More pservers do not help, since it
   is one slice. Smaller slices do.
3. **Slices per pserver.** VGG-19 has {pieces} slices of 1 MiB: of 1024 pservers nearly half own none, and the busiest
   link is busy for {of_big[link]:.2f} s instead of {of_fine[link]:.2f} s. Slices should be ten per pserver or more.
4. **Python's cost per slice.** So slices must be small, and small ones cost: {fine_pieces} slices of
   {_slice(fine.slice_bytes)} take a worker {own_cpu_s:.2f} s and the busiest pserver {of_fine[cpu]:.2f} s of CPU per
   step, more than computing takes, whatever the bandwidth: 100 Gbit/s are no faster than 25 at 1024 workers.
5. **Python's cost per byte.** One process can send and receive {gb_per_s:.2f} GB/s, a link of {gb_per_s * 8:.1f} Gbit/s
   in each direction. Beyond that one core per process is the limit, not the wire.

## What to do about it

- **As many pservers as workers**, at 10 Gbit/s and less on hosts of their own, if there are any to spare.
- **Smaller slices for more workers** (`slice_bytes`): the tables have the best sizes. With 1024 workers and 10 Gbit/s
  that is {speed(big):.2f} -> {speed(fine):.2f} for VGG-19 and {speed(resnet[0]):.2f} -> {speed(resnet[1]):.2f} for
  ResNet-50. Larger slices help where CPU is the limit and workers are few. tfps tunes slices by bandwidth and cost per
  message; it does not know of the turnaround, so from some dozens of workers on `slice_bytes` should be given.
- **Sums within racks first** (not in tfps): with racks of {RACK}, {1024 // RACK} racks exchange a sixteenth of the
  bytes per host, no slice has more than {max(RACK, 1024 // RACK)} parts, and the speeds become {racks[0]:.2f} and
  {racks[1]:.2f}. This is an estimate: the exchange within a rack and that between racks are simulated one by one, and
  their delays added.
- **More than one core per process**: several pservers per host for a pserver's part; for a worker's, senders and
  receivers that do not share Python's lock. The column with {CORES} cores has what that is worth.
"""


if __name__ == "__main__":
    main()
