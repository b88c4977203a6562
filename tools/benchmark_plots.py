"""Plots and tables of each benchmark, from the runs in its JSON file (for tools/make_benchmarks_page.py)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tfps.types import Json, Options
from tools.pages import BLUE, COLOURS, GREEN, GREY, MARKERS, ORANGE, RED, SKY, log_ticks, plot, spread, table

Run = Mapping[str, Json]
Runs = Sequence[Run]
Key = TypeVar("Key", bound=Hashable)

ENDS = ("worker", "pserver")
POLICIES = ("barrier", "overlap_send_barrier", "overlap", "slices", "priority")  # from the slowest
POLICY_LINES = {
    "barrier": (GREY, "X", ":"),
    "overlap_send_barrier": (RED, "D", "-."),
    "overlap": (ORANGE, "^", "--"),
    "slices": (GREEN, "s", "-"),
    "priority": (BLUE, "o", "-"),
}


@dataclass
class Section:
    """What a page shows of one benchmark: Markdown, and SVGs by file name."""

    text: str = ""
    plots: dict[str, bytes] = field(default_factory=dict)

    def add(self, text: str) -> None:
        self.text += text + "\n"

    def add_plot(self, name: str, what: str, data: bytes) -> None:
        """An SVG and the place for it in the text."""
        self.plots[name] = data
        self.add(f"![{what}](benchmarks/{name})\n")


def grouped(runs: Runs, key: Callable[[Run], Key], value: Callable[[Run], float]) -> dict[Key, float]:
    """Medians of `value`, by key, in the order of first occurrence."""
    found: dict[Key, list[float]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(value(run))
    return {each: float(statistics.median(values)) for each, values in found.items()}


# schedule


def schedule(runs: Runs) -> Section:
    """Per model step time over bandwidth; speed-ups; measured against simulated."""
    section = Section()
    section.add("Step times and bandwidths are those of the undivided model.\n")
    keras = [run for run in runs if run.get("form") == "keras"]
    runs = [run for run in runs if run.get("form") != "keras"]
    for model in dict.fromkeys(run["model"] for run in runs):
        _model(section, model, [run for run in runs if run["model"] == model])
    _accuracy(section, runs)
    if keras:
        _keras(section, runs, keras)
    return section


def _keras(section: Section, runs: Runs, keras: Runs) -> None:
    """The same case through Keras and without TensorFlow."""

    def place(run: Run) -> tuple[str, float, str]:
        return run["model"], run["gbit"], run["policy"]

    engine_s = grouped(runs, place, lambda run: run["step_s"])
    rows = [
        [model, f"{gbit:.3g}", policy, f"{engine_s[model, gbit, policy]:.3f}", f"{step_s:.3f}"]
        for (model, gbit, policy), step_s in grouped(keras, place, lambda run: run["step_s"]).items()
    ]
    section.add("### Through Keras and the strategy\n")
    section.add("The same with layers that sleep, in `model.fit`.\n")
    section.add(table(["model", "Gbit/s", "policy", "without TensorFlow (s)", "through Keras (s)"], rows))


def _model(section: Section, model: str, runs: Runs) -> None:
    step_s = grouped(runs, lambda r: (r["policy"], r["gbit"]), lambda r: r["step_s"] / r.get("time_factor", 1))
    bound_s = grouped(runs, lambda r: r["gbit"], lambda r: r["bound_s"] / r.get("time_factor", 1))
    rates = sorted(bound_s)
    policies = [name for name in POLICIES if all((name, rate) in step_s for rate in rates)]

    def draw(figure: Figure, axes: list[Axes]) -> None:
        left, right = axes
        for policy in policies:
            colour, marker, line = POLICY_LINES[policy]
            times = [step_s[policy, rate] for rate in rates]
            left.plot(rates, times, color=colour, marker=marker, linestyle=line, label=policy)
            if policy != "priority" and "priority" in policies:
                gains = [step_s[policy, rate] / step_s["priority", rate] for rate in rates]
                right.plot(rates, gains, color=colour, marker=marker, linestyle=line, label=f"over {policy}")
        left.plot(rates, [bound_s[rate] for rate in rates], color="black", linewidth=1, label="lower bound")
        right.axhline(1, color="black", linewidth=1)
        left.set(title=f"{model}: time of a step", xlabel="bandwidth of a host (Gbit/s)", ylabel="seconds per step")
        right.set(title="Speed-up of priority", xlabel="bandwidth of a host (Gbit/s)", ylabel="times as fast")
        left.set_ylim(bottom=0)
        for each in axes:
            log_ticks(each, "x", spread(rates))
            each.legend(frameon=True, framealpha=0.85, fontsize="small")

    heads = ["Gbit/s", *(f"{policy} (s)" for policy in policies), "lower bound (s)", "priority: bound / step"]
    rows = [
        [
            f"{rate:.3g}",
            *(f"{step_s[policy, rate]:.3f}" for policy in policies),
            f"{bound_s[rate]:.3f}",
            f"{bound_s[rate] / step_s['priority', rate]:.2f}" if "priority" in policies else "",
        ]
        for rate in rates
    ]
    section.add(f"### {model}\n")
    section.add_plot(f"schedule-{model}.svg", f"{model}: step time and speed-up over bandwidth", plot(1, 2, 3.6, draw))
    section.add(table(heads, rows))


def _accuracy(section: Section, runs: Runs) -> None:
    """Simulated against measured, on equal scales."""
    pairs = [(r["step_s"] / r.get("time_factor", 1), r["simulated_s"] / r.get("time_factor", 1)) for r in runs]
    errors = {
        policy: statistics.median(abs(r["simulated_s"] / r["step_s"] - 1) for r in runs if r["policy"] == policy)
        for policy in POLICIES
        if any(r["policy"] == policy for r in runs)
    }
    overall = statistics.median(abs(r["simulated_s"] / r["step_s"] - 1) for r in runs)

    def draw(figure: Figure, axes: list[Axes]) -> None:
        left, right = axes
        ends = [min(map(min, pairs)) / 1.1, max(map(max, pairs)) * 1.1]
        left.plot(ends, ends, color="black", linewidth=1, label="equal")
        for policy in errors:
            colour, marker, _ = POLICY_LINES[policy]
            of_it = [pair for pair, run in zip(pairs, runs, strict=True) if run["policy"] == policy]
            left.plot(*zip(*of_it, strict=True), color=colour, marker=marker, linestyle="", label=policy)
            off = [(simulated / measured - 1) * 100 for measured, simulated in of_it]
            right.plot([m for m, _ in of_it], off, color=colour, marker=marker, linestyle="")
        right.axhline(0, color="black", linewidth=1)
        ticks = spread([0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10], 1.3)
        inside = [tick for tick in ticks if ends[0] <= tick <= ends[1]]
        for each, which in ((left, "x"), (left, "y"), (right, "x")):
            log_ticks(each, which, inside)
        left.set(title="Simulated against measured", xlabel="measured (seconds per step)", ylabel="simulated (s)")
        right.set(title=f"Median error {overall:.1%}", xlabel="measured (seconds per step)", ylabel="error (%)")
        left.legend()

    section.add("### Measured and simulated\n")
    section.add_plot("schedule-simulated.svg", "Simulated against measured step times", plot(1, 2, 3.6, draw))
    rows = [[policy, f"{error:.1%}"] for policy, error in errors.items()]
    section.add(table(["policy", "median error of the simulation"], [*rows, ["all", f"{overall:.1%}"]]))


# tuning


def tuning(runs: Runs) -> Section:
    """Sizes that were chosen beside fixed ones."""
    section = Section()
    step_s = grouped(runs, lambda r: (r["model"], r["wire_over_compute"], r["sizes"]), lambda r: r["step_s"])
    sizes = list(dict.fromkeys(run["sizes"] for run in runs))
    rows = []
    for model, ratio in dict.fromkeys((run["model"], run["wire_over_compute"]) for run in runs):
        fixed = min(step_s[model, ratio, each] for each in sizes if each != "auto")
        own = (f"{step_s[model, ratio, each]:.3f}" for each in sizes)
        rows.append([model, f"{ratio:g}", *own, f"{step_s[model, ratio, 'auto'] / fixed:.3f}"])
    heads = ["model", "wire / computing", *(f"{each} (s)" for each in sizes), "auto / best fixed"]
    section.add(
        "Seconds per step with slices / windows of so many KiB, bytes and bandwidth divided as in `schedule`.\n"
    )
    section.add(table(heads, rows))
    return section


# staging


def staging(runs: Runs) -> Section:
    """Steps with and without batches that lie ready."""
    section = Section()
    names = ("step_s", "input_s", "compute_s", "over_max", "over_sum")
    rows = []
    for case, depth in dict.fromkeys((run["case"], run["depth"]) for run in runs):
        same = [run for run in runs if (run["case"], run["depth"]) == (case, depth)]
        figures = [float(statistics.median(run[name] for run in same)) for name in names]
        rows.append([case, str(depth), *(f"{figure:.3f}" for figure in figures)])
    heads = ["bound by", "staging_depth", "step (s)", "input (s)", "computing (s)", "step / longer", "step / sum"]
    section.add(table(heads, rows))
    return section


# scale


def scale(runs: Runs) -> Section:
    """Hosts and pservers; CPU and memory."""
    section = Section()
    hosts = [run for run in runs if run["what"] == "hosts"]
    if hosts:
        _hosts(section, hosts)
    growth = [run for run in runs if run["what"] != "hosts"]
    if growth:
        _growth(section, growth)
    return section


def _hosts(section: Section, runs: Runs) -> None:
    def place(run: Run) -> tuple[str, float, int, int]:
        return run["layout"], run["gbit"], run["workers"], run["pservers"]

    step_s, bound_s, simulated_s = (
        grouped(runs, place, lambda r, name=name: r[name] / r.get("time_factor", 1))  # type: ignore[misc]
        for name in ("step_s", "bound_s", "simulated_s")
    )
    kinds = sorted({key[:2] for key in step_s})
    most = max(key[2] for key in step_s if key[2] != key[3]) if any(key[2] != key[3] for key in step_s) else 0

    def draw(figure: Figure, axes: list[Axes]) -> None:
        for number, (layout, gbit) in enumerate(kinds):
            style: Options = {"color": COLOURS[number], "marker": MARKERS[number]}
            for each, keys in (
                (axes[0], sorted(key for key in step_s if key[:2] == (layout, gbit) and key[2] == key[3])),
                (axes[1], sorted(key for key in step_s if key[:2] == (layout, gbit) and key[2] == most)),
            ):
                if not keys:
                    continue
                x = [key[3] for key in keys]
                label = f"{layout}, {gbit:.3g} Gbit/s"
                each.plot(x, [step_s[keys[0]] / step_s[key] for key in keys], **style, label=label)
                each.plot(x, [bound_s[keys[0]] / bound_s[key] for key in keys], color=COLOURS[number], linestyle=":")
        axes[0].plot([], [], color="black", linestyle=":", label="what the bounds allow")
        axes[0].set(title="Throughput of a worker", xlabel="workers = pservers", ylabel="relative to 2 workers")
        axes[1].set(title=f"{most} workers", xlabel="pservers", ylabel="throughput relative to 1 pserver")
        axes[0].set_xticks(sorted({key[2] for key in step_s if key[2] == key[3]}))
        axes[1].set_xticks(sorted({key[3] for key in step_s if key[2] == most} or {1}))
        for each in axes:
            each.set_ylim(bottom=0, top=each.get_ylim()[1] * 1.03)
        axes[0].legend(loc="lower left")

    rows = []
    for key in sorted(step_s):
        base = min(other for other in step_s if other[:2] == key[:2] and (other[2] == other[3]))
        rows.append(
            [
                f"{key[2]} + {key[3]} {key[0]}",
                f"{key[1]:.3g}",
                f"{step_s[key]:.3f}",
                f"{simulated_s[key]:.3f}",
                f"{bound_s[key]:.3f}",
                f"{step_s[base] / step_s[key]:.2f}",
                f"{bound_s[base] / bound_s[key]:.2f}",
            ]
        )
    section.add("### Hosts and pservers\n")
    section.add_plot("scale-hosts.svg", "Throughput over workers and pservers", plot(1, 2, 3.4, draw))
    heads = ["workers + pservers", "Gbit/s", "step (s)", "simulated (s)", "lower bound (s)"]
    section.add(table([*heads, "of the smallest's throughput", "allowed"], rows))


def _growth(section: Section, runs: Runs) -> None:
    def medians(what: str, key: str, value: Callable[[Run], float]) -> tuple[list[float], list[float]]:
        found = grouped([run for run in runs if run["what"] == what], lambda run: float(run[key]), value)
        return sorted(found), [found[each] for each in sorted(found)]

    def draw(figure: Figure, axes: list[Axes]) -> None:
        for column, (what, key, label) in enumerate(
            (("variables", "variables", "variables"), ("bytes", "megabytes", "MB of parameters"))
        ):
            cpu, memory = axes[column], axes[2 + column]
            for number, who in enumerate(ENDS):
                style: Options = {"color": COLOURS[number], "marker": MARKERS[number]}
                cpu.plot(*medians(what, key, lambda r, w=who: r[f"{w}_cpu_s"] * 1e3), **style, label=who)  # type: ignore[misc]
                memory.plot(*medians(what, key, lambda r, w=who: _used_mb(r, w)), **style, label=who)  # type: ignore[misc]
                aim = medians(what, key, lambda r, w=who: _used_mb(r, w) / r[f"{w}_of_aim"])  # type: ignore[misc]
                memory.plot(*aim, color=COLOURS[number], linestyle=":", label=f"{who}: at most")
            cpu.set(xlabel=label, ylabel="CPU of a process (ms per step)")
            memory.set(xlabel=label, ylabel="peak memory over idle (MB)")
            for each in (cpu, memory):
                each.set_ylim(bottom=0)
                each.legend()

    def row(runs: Runs) -> list[str]:
        cpu_ms = [statistics.median(run[f"{who}_cpu_s"] * 1e3 for run in runs) for who in ENDS]
        used_mb = [statistics.median(_used_mb(run, who) for run in runs) for who in ENDS]
        of_aim = [statistics.median(run[f"{who}_of_aim"] for run in runs) for who in ENDS]
        return [f"{each:.0f}" for each in cpu_ms + used_mb] + [f"{each:.2f}" for each in of_aim]

    keys = dict.fromkeys((run["what"], run["variables"], run["megabytes"]) for run in runs)
    rows = [
        [
            f"{key[1]} variables, {key[2]} MB{', shared memory' if key[0] == 'shared memory' else ''}",
            *row([run for run in runs if (run["what"], run["variables"], run["megabytes"]) == key]),
        ]
        for key in keys
    ]
    section.add("### Variables and bytes\n")
    section.add_plot("scale-growth.svg", "CPU and memory over variables and bytes", plot(2, 2, 6.0, draw))
    heads = ["", *(f"{who}: {what}" for what in ("CPU ms/step", "MB over idle", "of what it may be") for who in ENDS)]
    section.add(table(heads, rows))
    idle = {who: runs[0][f"idle_{who}_bytes"] / 1e6 for who in ENDS}
    section.add(f"Idle: worker {idle['worker']:.0f} MB, pserver {idle['pserver']:.0f} MB.\n")


def _used_mb(run: Run, who: str) -> float:
    return float(run[f"{who}_peak_bytes"] - run[f"idle_{who}_bytes"]) / 1e6


# The others


def wire(runs: Runs) -> Section:
    """Throughput and CPU beside what they are measured against."""
    section = Section()
    speed, cpu = (grouped(runs, lambda r: r["what"], lambda r, n=n: r[n]) for n in ("gb_per_s", "cpu_s_per_gb"))  # type: ignore[misc]
    panels = (("Throughput of a worker", "GB/s", "gb_per_s"), ("CPU, all processes", "CPU s/GB", "cpu_s_per_gb"))
    section.add_plot("wire.svg", "Throughput and CPU", _bars(runs, "what", panels))
    rows = [[what, f"{speed[what]:.2f}", f"{cpu[what]:.2f}"] for what in speed]
    section.add(table(["", "GB/s per worker", "CPU s/GB"], rows))
    return section


def overhead(runs: Runs) -> Section:
    """Ratios to plain Keras."""
    section = Section()
    panels = (("Step time, of plain Keras", "ratio", "ratio"), ("CPU beyond plain Keras", "s per step", "extra_cpu_s"))
    section.add_plot("overhead.svg", "Step time relative to plain Keras", _bars(runs, "model", panels))
    figures = ("plain_step_s", "tfps_step_s", "ratio", "extra_cpu_s")
    found = {name: grouped(runs, lambda r: r["model"], lambda r, n=name: r[n]) for name in figures}  # type: ignore[misc]
    rows = [
        [
            model,
            f"{found['plain_step_s'][model] * 1e3:.1f}",
            f"{found['tfps_step_s'][model] * 1e3:.1f}",
            f"{found['ratio'][model]:.2f}",
            f"{found['extra_cpu_s'][model] * 1e3:.1f}",
        ]
        for model in found["ratio"]
    ]
    section.add(table(["model", "plain (ms)", "tfps (ms)", "ratio", "CPU beyond plain (ms)"], rows))
    return section


def peers(runs: Runs) -> Section:
    """Seconds per step of each peer, a plot per case; who was left out or failed, and why."""
    section = Section()
    for case in dict.fromkeys(run["case"] for run in runs):
        same = [run for run in runs if run["case"] == case]
        measured = [run for run in same if "step_s" in run]
        section.add(f"### {case}\n")
        if measured:
            found = [grouped(measured, lambda r: r["peer"], lambda r, n=n: r[n]) for n in ("step_s", "cpu_s")]  # type: ignore[misc]
            panels = (("Time of a step", "s", "step_s"), ("CPU of a step, all processes", "s", "cpu_s"))
            section.add_plot(f"peers-{case}.svg", f"{case}: time and CPU of a step", _bars(measured, "peer", panels))
            rows = [[peer, *(f"{each[peer]:.3f}" for each in found)] for peer in found[0]]
            section.add(table(["", "step (s)", "CPU (s)"], rows))
        reasons = {run["peer"]: run.get("left_out") or run.get("failed") for run in same if "step_s" not in run}
        if reasons:
            section.add("".join(f"- {peer}: not measured, {reason}\n" for peer, reason in reasons.items()))
    return section


def _bars(runs: Runs, label: str, panels: Sequence[tuple[str, str, str]]) -> bytes:
    """Horizontal bars of medians and a dot for every run; `panels` are title, unit and key."""
    labels = list(dict.fromkeys(run[label] for run in runs))

    def draw(figure: Figure, axes: list[Axes]) -> None:
        for each, (title, unit, key) in zip(axes, panels, strict=True):
            medians = grouped(runs, lambda run: run[label], lambda run, key=key: run[key])  # type: ignore[misc]
            for place, name in enumerate(labels):
                ours = "tfps" in name or "pserver" in name
                each.barh(place, medians[name], color=BLUE if ours else SKY, height=0.6)
                style: Options = {"color": "white" if ours else "black", "va": "center", "fontsize": 8}
                each.text(min(medians[name], 0), place, f" {medians[name]:.3g}", **style)
                dots = [run[key] for run in runs if run[label] == name]
                each.plot(dots, [place] * len(dots), color="black", marker="o", markersize=2, linestyle="")
            each.set_yticks(range(len(labels)), labels)
            each.invert_yaxis()
            each.grid(visible=False, axis="y")
            each.set(title=title, xlabel=unit, xlim=(min(0, *(run[key] for run in runs)), None))

    return plot(1, len(panels), 1.0 + 0.4 * len(labels), draw)


DRAWERS: dict[str, Callable[[Runs], Section]] = {
    "schedule": schedule,
    "tuning": tuning,
    "staging": staging,
    "scale": scale,
    "wire": wire,
    "overhead": overhead,
    "peers": peers,
}
