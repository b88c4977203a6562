"""Tables and headline figures of the runs of tools/benchmarks/tables.py. Figures are medians over rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from tfps.types import Json
from tools.benchmarks.common import Table

Run = Mapping[str, Json]
Runs = Sequence[Run]
Key = TypeVar("Key", bound=Hashable)
_SPEEDS = ("pull", "numpy_take", "update", "numpy_update", "numpy_scatter")


def tables(runs: Runs) -> Iterator[Table]:
    """One or more of each part that there are runs of."""
    for part, make in _TABLES.items():
        if own := [run for run in runs if run["part"] == part and "left_out" not in run]:
            yield make(own)


def headline(runs: Runs) -> dict[str, float]:
    """Figures by name: `_s` are seconds, `_ratio` how many times as much, `_m_per_s` million rows per second."""
    found: dict[str, float] = {}
    for part, make in _HEADLINES.items():
        if own := [run for run in runs if run["part"] == part and "left_out" not in run]:
            found |= make(own)
    return found


def left_out(runs: Runs) -> list[str]:
    """What was not measured, and why."""
    return [f"{run['part']}, {run['kind']}: not measured, {run['left_out']}" for run in runs if "left_out" in run]


def _by(runs: Runs, key: Callable[[Run], Key]) -> dict[Key, list[Run]]:
    found: dict[Key, list[Run]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return found


def _median(runs: Runs, name: str) -> float:
    return float(statistics.median(run[name] for run in runs))


def _ratio(runs: Runs, name: str, other: Runs) -> float:
    """The median over rounds of a figure relative to that of the other runs in the same round."""
    beside = {run["round"]: run[name] for run in other}
    return float(statistics.median(run[name] / beside[run["round"]] for run in runs if run["round"] in beside))


def _ms(runs: Runs, name: str) -> str:
    return f"{_median(runs, name) * 1e3:.1f}"


def _mb(runs: Runs, name: str) -> str:
    return f"{_median(runs, name) / 1e6:.3f}"


def _millions(rows: float) -> str:
    return f"{rows / 1e6:g} M"


# engine


def _engine(runs: Runs) -> Table:
    heads = ["rows", "ids below", "drawn", "batch", "pull", "take", "update", "NumPy's", "scatter", "bytes over a row"]
    rows = []
    for (count, bounded, law, batch), own in _by(runs, _of_engine).items():
        speeds = [f"{_median(own, name):.2f}" for name in _SPEEDS]
        ids = _millions(count) if bounded else "2**63"
        rows.append([_millions(count), ids, law, str(batch), *speeds, f"{_median(own, 'overhead_bytes'):.1f}"])
    return Table("engine: million rows per second of a Table and of NumPy on plain arrays, one thread", heads, rows)


def _of_engine(run: Run) -> tuple[int, bool, str, int]:
    return run["rows"], run["bounded"], run["law"], run["batch"]


def _engine_headline(runs: Runs) -> dict[str, float]:
    found = {}
    for bounded, own in _by(runs, lambda run: run["bounded"]).items():
        largest = [run for run in own if run["rows"] == max(each["rows"] for each in own)]
        name = "engine_bounded" if bounded else "engine_any_id"
        for kind, other in (("pull", "numpy_take"), ("update", "numpy_update")):
            found[f"{name}_{kind}_m_per_s"] = _median(largest, kind)
            ratio = statistics.median(run[other] / run[kind] for run in largest)
            found[f"{name}_{kind}_time_ratio_to_numpy"] = float(ratio)
        found[f"{name}_overhead_bytes_per_row"] = _median(largest, "overhead_bytes")
    return found


# size


def _size(runs: Runs) -> Table:
    heads = ["rows", "ids below", "step (ms)", "waits for rows", "pserver CPU", "MB to pservers", "back", "GB of rows"]
    rows = [
        [
            _millions(count),
            _millions(count) if bounded else "2**63",
            *(_ms(own, name) for name in ("step_s", "wait_s", "server_cpu_s")),
            *(_mb(own, name) for name in ("received_bytes", "sent_bytes")),
            f"{_median(own, 'table_bytes') / 1e9:.2f}",
        ]
        for (bounded, count), own in _by(runs, lambda run: (run["bounded"], run["rows"])).items()
    ]
    return Table("size: a step with the same number of different ids, 1 worker, 2 pservers", heads, rows)


def _size_headline(runs: Runs) -> dict[str, float]:
    found = {}
    for bounded, own in _by(runs, lambda run: run["bounded"]).items():
        small, large = (
            [run for run in own if run["rows"] == pick(each["rows"] for each in own)] for pick in (min, max)
        )
        name = "size_bounded" if bounded else "size_any_id"
        found[f"{name}_rows_m"] = large[0]["rows"] / 1e6
        found[f"{name}_step_ratio"] = _median(large, "step_s") / _median(small, "step_s")
        found[f"{name}_bytes_ratio"] = _median(large, "received_bytes") / _median(small, "received_bytes")
    return found


# unique


def _unique(runs: Runs) -> Table:
    heads = ["exponent", "different ids", "step (ms)", "waits for rows", "CPU", "pserver CPU", "MB to pservers", "back"]
    rows = [
        [
            f"{exponent:g}",
            f"{_median(own, 'pushed'):.0f}",
            *(_ms(own, name) for name in ("step_s", "wait_s", "cpu_s", "server_cpu_s")),
            *(_mb(own, name) for name in ("received_bytes", "sent_bytes")),
        ]
        for exponent, own in _by(runs, lambda run: run["exponent"]).items()
    ]
    return Table("unique: a step by the different ids of its 106,496, 1 worker, 2 pservers", heads, rows)


def _unique_headline(runs: Runs) -> dict[str, float]:
    """Lines through the medians."""
    points = _by(runs, lambda run: run["exponent"]).values()
    ids = [_median(own, "pushed") for own in points]

    def slope(*names: str) -> float:
        return float(np.polyfit(ids, [sum(_median(own, name) for name in names) for own in points], 1)[0])

    return {
        "unique_step_us_per_id": slope("step_s") * 1e6,
        "unique_cpu_us_per_id": slope("cpu_s") * 1e6,
        "unique_bytes_per_id": slope("received_bytes", "sent_bytes"),
    }


# keras, peers


def _kinds(title: str, base: str) -> Callable[[Runs], Table]:
    def make(runs: Runs) -> Table:
        kinds = _by(runs, lambda run: run["kind"])
        rows = [
            [
                kind,
                _ms(own, "step_s"),
                f"{_ratio(own, 'step_s', kinds[base]):.2f}" if base in kinds else "",
                _ms(own, "cpu_s"),
            ]
            for kind, own in kinds.items()
        ]
        return Table(title, ["", "step (ms)", f"x {base}", "CPU of all (ms)"], rows)

    return make


def _kinds_headline(part: str, base: str, **others: str) -> Callable[[Runs], dict[str, float]]:
    """Each beside `base`, and those of `others` beside another one, too."""

    def make(runs: Runs) -> dict[str, float]:
        kinds, found = _by(runs, lambda run: run["kind"]), dict[str, float]()
        for kind, own in kinds.items():
            name = kind if kind.startswith(part) else f"{part}_{kind}"
            found[f"{name}_step_s"] = _median(own, "step_s")
            if kind != base and base in kinds:
                found[f"{name}_step_ratio"] = _ratio(own, "step_s", kinds[base])
            if (other := others.get(kind)) in kinds:
                found[f"{name}_step_ratio_to_{other}"] = _ratio(own, "step_s", kinds[other])
        return found

    return make


# network


def _network(runs: Runs) -> Table:
    heads = [
        "floats of a row",
        "sleeps (ms)",
        "prefetch",
        "step (ms)",
        "CPU of all",
        "waits for rows",
        "MB to pservers",
        "back",
        "rows early",
    ]
    rows = [
        [
            str(dim),
            f"{sleep_s * 1e3:.0f}",
            kind,
            *(_ms(own, name) for name in ("step_s", "cpu_s", "wait_s")),
            *(_mb(own, name) for name in ("received_bytes", "sent_bytes")),
            f"{_early(own):.2f}",
        ]
        for (dim, sleep_s, kind), own in _by(runs, lambda run: (run["dim"], run["sleep_s"], run["kind"])).items()
    ]
    return Table("network: 2 workers, 2 pservers, each on a host with 1 Gbit/s", heads, rows)


def _early(runs: Runs) -> float:
    """The share of rows that were answered before the step before had been applied."""
    return float(statistics.median(run["early"] / run["asked"] for run in runs))


def _network_headline(runs: Runs) -> dict[str, float]:
    found: dict[str, float] = {}
    for (dim, sleep_s), own in _by(runs, lambda run: (run["dim"], run["sleep_s"])).items():
        name = f"network_{dim}_asleep" if sleep_s else f"network_{dim}"
        kinds = _by(own, lambda run: run["kind"])
        on, off = kinds["on"], kinds["off"]
        found |= {
            f"{name}_step_s": _median(on, "step_s"),
            f"{name}_step_ratio_to_no_prefetch": _ratio(on, "step_s", off),
            f"{name}_wait_s": _median(on, "wait_s"),
            f"{name}_wait_s_without_prefetch": _median(off, "wait_s"),
            f"{name}_hidden_share": 1.0 - _median(on, "wait_s") / _median(off, "wait_s"),
            f"{name}_early_share": _early(on),
        }
    return found


_TABLES: dict[str, Callable[[Runs], Table]] = {
    "engine": _engine,
    "size": _size,
    "unique": _unique,
    "keras": _kinds("keras: the same model with rows elsewhere, 1 M rows", "keras"),
    "network": _network,
    "peers": _kinds("peers: 1 worker, 2 servers (tfps, tf_ps, tfra_ps) or one process, 1 M rows", "tfps"),
}
_HEADLINES: dict[str, Callable[[Runs], dict[str, float]]] = {
    "engine": _engine_headline,
    "size": _size_headline,
    "unique": _unique_headline,
    "keras": _kinds_headline("keras", "keras"),
    "network": _network_headline,
    "peers": _kinds_headline("peers", "tfps", tfra="tfps_local"),
}
