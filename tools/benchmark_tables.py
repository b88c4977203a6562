"""Tables of benchmarks with one plot at most, from the runs in their JSON files (for tools/make_benchmarks_page.py)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tfps.types import Options
from tools.benchmark_plots import Run, Runs, Section, grouped
from tools.pages import BLUE, COLOURS, GREEN, MARKERS, ORANGE, RED, SKY, plot, table
from tools.tables import summary


def overtaking(runs: Runs) -> Section:
    """Per rate and transport what an urgent slice waits for, and how full the link was."""
    section = Section()

    def figure(name: str) -> Mapping[tuple[int, str], float]:
        return grouped([r for r in runs if name in r], lambda r: (r["rate"], r["transport"]), lambda r: r[name])

    links, ways = figure("link"), [figure(f"{way}_{unit}") for way in ("push", "reply") for unit in ("ms", "ratio")]
    rows = [
        [f"{rate} Mbit/s", transport, *(f"{way[rate, transport]:.1f}" for way in ways), f"{link:.2f}"]
        for (rate, transport), link in links.items()
        if transport != "raw"
    ]
    heads = ["link", "over", "push, ms", "x own time", "reply, ms", "x own time", "full, x plain sockets"]
    section.add(table(heads, rows))
    return section


def security(runs: Runs) -> Section:
    """The flood."""
    section = Section()
    low, middle, high = statistics.quantiles((r["ratio"] for r in runs), n=4)
    refused = statistics.median(r["refused_per_s"] for r in runs)
    section.add(
        f"A step takes {middle:.3f} times as long during the flood (quartiles {low:.3f} to {high:.3f}, {len(runs)} "
        f"pairs); {refused:.0f} strangers are refused per second.\n"
    )
    return section


def compress(runs: Runs) -> Section:
    """What each codec costs, and what its steps take."""
    section = Section()
    speeds = [r for r in runs if r["what"] == "codec"]
    cost = {name: grouped(speeds, lambda r: r["codec"], lambda r, n=name: r[n]) for name in ("encode_s", "decode_s")}  # type: ignore[misc]
    step = {
        form: grouped([r for r in runs if r["what"] == form], lambda r: r["codec"], lambda r: r["step_s"])
        for form in ("asleep", "keras")
    }
    sent = grouped([r for r in runs if r["what"] == "asleep"], lambda r: r["codec"], lambda r: r["sent_bytes"])
    rows = []
    for codec, nbytes in sent.items():
        costs = [f"{each[codec]:.2f}" if codec in each else "" for each in cost.values()]
        steps = [cell for each in step.values() for cell in (f"{each[codec]:.3f}", f"{each['none'] / each[codec]:.1f}")]
        rows.append([codec, f"{nbytes / 1e6:.1f}", *costs, *steps])
    heads = ["codec", "MB each way", "encode, CPU s/GB", "decode", "layers sleep: step (s)", "x as fast"]
    section.add(table([*heads, "Keras: step (s)", "x as fast"], rows))
    return section


def remote_update(runs: Runs) -> Section:
    """Memory and steps with the update on workers and on pservers."""
    section = Section()
    memory = [r for r in runs if r["what"] == "memory"]
    figures = {
        "worker (MB)": "worker_mb",
        "its pserver (MB)": "pserver_mb",
        "slots (MB)": "slots_mb",
        "reading them (s)": "collected_s",
    }
    found = {head: grouped(memory, lambda r: r["update"], lambda r, n=n: r[n]) for head, n in figures.items()}  # type: ignore[misc]
    rows = [[update, *(f"{each[update]:.4g}" for each in found.values())] for update in found["worker (MB)"]]
    section.add(table(["update", *found], rows))
    steps = grouped(
        [r for r in runs if r["what"] == "step"], lambda r: (r["workers"], r["update"]), lambda r: r["step_ms"]
    )
    section.add(
        table(["workers", "update", "step (ms)"], [[str(n), update, f"{ms:.0f}"] for (n, update), ms in steps.items()])
    )
    return section


def modes(runs: Runs) -> Section:
    """Accuracy over time of each mode; speed, accuracy and bytes beside sync."""
    section = Section()
    for task in dict.fromkeys(run["task"] for run in runs):
        of_task = [run for run in runs if run["task"] == task]
        section.add(f"### {task.capitalize()}\n")
        section.add_plot(f"modes-{task}.svg", f"Accuracy over time, {task}", _over_time(of_task))
        for mbit in dict.fromkeys(run["mbit"] for run in of_task):
            section.add(f"{mbit:.0f} Mbit/s:\n")
            section.add(_modes_table([run for run in of_task if run["mbit"] == mbit]))
    return section


def _modes_table(runs: Runs) -> str:
    """Medians over seeds; what stands beside sync stands beside its run with the same seed."""
    plain = {run["seed"]: run for run in runs if (run["mode"], run["codec"]) == ("sync", "none")}

    def by_kind(value: Callable[[Run], float]) -> dict[tuple[str, str], float]:
        return grouped(runs, lambda run: (run["mode"], run["codec"]), value)

    speed, accuracy = by_kind(lambda run: run["rows_per_s"]), by_kind(lambda run: run["accuracy"])
    times = by_kind(lambda run: run["rows_per_s"] / plain[run["seed"]]["rows_per_s"])
    points = by_kind(lambda run: 100 * (run["accuracy"] - plain[run["seed"]]["accuracy"]))
    nbytes = by_kind(lambda run: run["bytes_per_row"])
    rows = [
        [
            kind[0] if kind[1] == "none" else f"{kind[0]}, {kind[1]}",
            f"{speed[kind]:.0f}",
            f"{times[kind]:.2f}",
            f"{accuracy[kind]:.4f}",
            f"{points[kind]:+.1f}",
            f"{nbytes[kind] / 1e3:.1f}",
        ]
        for kind in speed
    ]
    return table(["mode", "rows per s", "x as fast", "accuracy", "points more", "kB per row"], rows)


def _over_time(runs: Runs) -> bytes:
    rates = list(dict.fromkeys(run["mbit"] for run in runs))
    kinds = list(dict.fromkeys(run["mode"] for run in runs))

    def draw(figure: Figure, axes: list[Axes]) -> None:
        for each, mbit in zip(axes, rates, strict=True):
            for run in runs:
                if run["mbit"] != mbit or run["seed"]:
                    continue
                number = kinds.index(run["mode"])
                packed = run["codec"] != "none"
                style: Options = {"color": COLOURS[number], "linestyle": ":" if packed else "-", "markersize": 3.0}
                name = run["mode"] + (f", {run['codec']}" if packed else "")
                seconds, accuracy = zip(*run["line"], strict=True)
                each.plot(seconds, accuracy, marker=MARKERS[number], label=name, **style)
            each.set(title=f"{mbit:.0f} Mbit/s", xlabel="seconds of training", ylabel="accuracy on test data")
            each.set_xscale("log")
        axes[-1].legend(fontsize=7.0)

    return plot(1, len(rates), 3.6, draw)


def tables(runs: Runs) -> Section:
    """Each part's."""
    section = Section()
    for each in summary.tables(runs):
        section.add(f"{each.title[0].upper()}{each.title[1:]}:\n")
        section.add(table(each.heads, each.rows))
    for line in summary.left_out(runs):
        section.add(f"- {line}\n")
    return section


def chaos(runs: Runs) -> Section:
    """Steps per second over time, what happened, and who took part."""
    section = Section()
    section.add_plot("chaos.svg", "Steps per second while workers and pservers are lost and join", _story(runs))
    section.add("Sleep allows 16.7 steps per second with three workers, 11.1 with two.\n")
    events = [run for run in runs if run["what"] == "event"]
    rows = [[run["event"], f"{run['at_s']:.1f}", f"{run['pause_s']:.2f}"] for run in events]
    section.add(table(["what happens", "at (s)", "pause (s)"], rows))
    return section


def _story(runs: Runs) -> bytes:
    def of(what: str) -> Runs:
        return [run for run in runs if run["what"] == what]

    rates = of("rate")
    names = sorted({run["who"] for run in of("bar")}, key=lambda who: (who.startswith("pserver"), who))
    end_s = max(run["end_s"] for run in of("bar"))

    def draw(figure: Figure, axes: list[Axes]) -> None:
        upper, lower = axes
        upper.get_gridspec().set_height_ratios([2.0, 1.2])  # type: ignore[union-attr]  # it is one of several
        upper.step([run["at_s"] for run in rates], [run["steps_per_s"] for run in rates], where="post", color=BLUE)
        upper.set(ylabel="steps per second", xlim=(0, end_s), ylim=(0, None))
        upper.tick_params(labelbottom=False)
        for number, run in enumerate(of("event")):
            joins = run["event"].endswith("joins")
            colour = GREEN if joins else RED
            for each in axes:
                each.axvline(run["at_s"], color=colour, linewidth=1.0, linestyle=":" if joins else "--")
            style: Options = {"color": colour, "fontsize": 7.0, "ha": "center", "va": "bottom"}
            height = 1.03 + 0.15 * (number % 3)
            text = f"{run['event']}\n{run['pause_s']:.2f} s"
            upper.text(run["at_s"], height, text, transform=upper.get_xaxis_transform(), **style)
        for run in of("bar"):
            row = names.index(run["who"])
            colour = BLUE if run["who"].startswith("worker") else ORANGE
            lower.barh(row, run["first_s"] - run["start_s"], left=run["start_s"], height=0.6, color=SKY, alpha=0.5)
            lower.barh(row, run["end_s"] - run["first_s"], left=run["first_s"], height=0.6, color=colour)
        handles = {
            "worker takes part": Patch(color=BLUE),
            "starts, joins": Patch(color=SKY, alpha=0.5),
            "pserver takes part": Patch(color=ORANGE),
            "one is lost, and the pause": Line2D([], [], color=RED, linewidth=1.0, linestyle="--"),
            "one joins, and the pause": Line2D([], [], color=GREEN, linewidth=1.0, linestyle=":"),
        }
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.3), "ncols": len(handles)}
        lower.legend(handles.values(), handles.keys(), fontsize=8.0, columnspacing=1.5, **place)
        lower.set_yticks(range(len(names)), names)
        lower.invert_yaxis()
        lower.grid(visible=False, axis="y")
        lower.set(xlabel="seconds", xlim=(0, end_s))

    return plot(2, 1, 5.4, draw)


DRAWERS: dict[str, Callable[[Runs], Section]] = {
    "overtaking": overtaking,
    "security": security,
    "compress": compress,
    "remote_update": remote_update,
    "modes": modes,
    "tables": tables,
    "chaos": chaos,
}
