#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Predicts the time of a training step: `tools/simulate.py --profile vgg19 --workers 4 --pservers 4 --rate-gbit 10`.

A profile is a model's name, a file of `Strategy.report().save_profile`, or a trace (`<run>.trace.json.gz`) that
`tfps.callbacks.Trace` recorded: what would this training cost with more workers, or on another network?
Without --policy all are compared. `--sweep-rate 1,2,5,10` prints a row per bandwidth. "of bound" is the lower bound
(docs/lower_bound.md) divided by the predicted time: 100 % is as short as a step can be.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from dataclasses import fields, replace

from tfps.errors import ConfigError
from tfps.types import Function
from tools import model_profiles
from tools.simulation import POLICIES, Cluster, Policy, Result, Settings, chrome_trace, lower_bound, simulate, to_json


def main(arguments: list[str] | None = None) -> None:
    """Reads options, simulates, prints a table and writes files."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        runs = run(options)
    except ConfigError as error:
        parser.error(str(error))
    if options.json is not None:
        rows = [to_json(profile, cluster, settings, result) for profile, cluster, settings, result in runs]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.trace is not None:
        options.trace.write_text(json.dumps(chrome_trace(runs[0][3])) + "\n", encoding="utf-8")


def run(options: argparse.Namespace) -> list[tuple[model_profiles.Profile, Cluster, Settings, Result]]:
    """Simulates all that was asked for and prints a row for each.

    Raises:
        ConfigError: a value is out of range, or a trace of several runs was asked for.
    """
    profile = model_profiles.load(options.profile).scaled(options.scale)
    base = Cluster(**{field.name: getattr(options, field.name) for field in fields(Cluster)})
    rates = [base.rate_gbit] if options.sweep_rate is None else options.sweep_rate
    policies: list[Policy] = options.policy or list(POLICIES)
    if options.trace is not None and (len(policies) > 1 or len(rates) > 1):
        raise ConfigError(
            f"--trace writes one run: give one --policy and one rate, got {len(policies)} and {len(rates)}"
        )
    print(
        f"{profile.name}: {profile.nbytes / 1e6:.1f} MB, computing {profile.compute_s:.3f} s; "
        f"{base.workers} workers, {base.pservers} pservers"
    )
    print(
        f"{'Gbit/s':>7} {'policy':20} {'step s':>9} {'wait s':>9} {'overlap':>8} {'link':>6} {'of bound':>9} "
        f"{'speed':>7}"
    )
    runs = []
    for rate in rates:
        cluster, slowest = replace(base, rate_gbit=rate), None
        for policy in policies:
            settings = Settings(
                policy=policy,
                trace=options.trace is not None,
                **{name: getattr(options, name) for name in _SETTINGS},
            )
            result = simulate(profile, cluster, settings)
            slowest = slowest or result.step_s
            print(
                f"{rate:7g} {policy:20} {result.step_s:9.4f} {result.wait_s:9.4f} {result.overlap:8.0%} "
                f"{max(result.tx_use + result.rx_use):6.0%} {lower_bound(profile, cluster) / result.step_s:9.1%} "
                f"{slowest / result.step_s:6.2f}x"
            )
            runs.append((profile, cluster, settings, result))
    return runs


_SETTINGS = ("slice_bytes", "window_bytes", "fuse", "jitter", "seed", "mode", "warmup_steps", "steps")


def make_parser() -> argparse.ArgumentParser:
    """The options; defaults are those of `Cluster` and `Settings`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add(kind: type[Cluster | Settings], name: str, read: Function, text: str) -> None:
        default = next(field.default for field in fields(kind) if field.name == name)
        flag = f"--{name.replace('_', '-')}"
        shown = f"{text} (default: {default})" if default is not None else text
        parser.add_argument(flag, type=read, default=default, metavar="N", help=shown)

    known = ", ".join(model_profiles.names())
    parser.add_argument(
        "--profile", required=True, metavar="NAME|FILE", help=f"{known}, a JSON file, or a recorded trace"
    )
    parser.add_argument("--scale", type=float, default=1.0, metavar="N", help="divide all bytes by this")
    parser.add_argument("--workers", type=int, default=4, metavar="N")
    parser.add_argument("--pservers", type=int, default=4, metavar="N")
    parser.add_argument("--rate-gbit", type=float, default=10.0, metavar="N", help="of every link, each direction (10)")
    parser.add_argument("--sweep-rate", type=_numbers, metavar="A,B,...", help="several rates instead")
    parser.add_argument("--dedicated", action="store_true", help="pservers on hosts of their own")
    add(Cluster, "goodput", float, "part of the rate that payload gets")
    add(Cluster, "latency_s", float, "one way, between hosts")
    add(Cluster, "cpu_slice_s", float, "CPU seconds per slice, there and back, both ends")
    add(Cluster, "cpu_gb_s", float, "CPU seconds per GB, there and back, both ends")
    add(Cluster, "process_cores", float, "what one process can use")
    add(Cluster, "machine_cores", float, "cores that all processes share (default: hosts are separate machines)")
    add(Cluster, "apply_gb_s", float, "seconds per GB of a worker's updates")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="may be repeated; default: all")
    add(Settings, "slice_bytes", int, "largest slice")
    add(Settings, "window_bytes", int, "in flight per stream and direction")
    parser.add_argument("--no-fuse", dest="fuse", action="store_false", help="every layer is a bucket of its own")
    add(Settings, "jitter", float, "relative standard deviation of computing times")
    add(Settings, "seed", int, "of the jitter")
    parser.add_argument("--mode", choices=["auto", "exact", "symmetric"], default="auto", help="what is simulated")
    add(Settings, "warmup_steps", int, "steps that are not counted")
    add(Settings, "steps", int, "steps that are counted")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all results to FILE")
    parser.add_argument("--trace", type=pathlib.Path, metavar="FILE", help="write a timeline for chrome://tracing")
    return parser


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
