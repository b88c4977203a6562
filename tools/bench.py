#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Runs one benchmark: `tools/bench.py NAME [--quick] [--json FILE]`.

The last line of each is `bench NAME: key=value ...`.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import pkgutil
import shlex

from tools import benchmarks
from tools.benchmarks import common

OF_PARTS = ("recovery", "tables")


def main() -> None:
    """Every module of tools/benchmarks with a `run(quick) -> Outcome` is a benchmark."""
    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name != "common"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=names)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: at most 6 minutes")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all runs to FILE")
    parser.add_argument("--part", metavar="NAME", help="recovery, tables: one of its parts, such as cost, size")
    options = parser.parse_args()
    if options.part is not None and options.name not in OF_PARTS:
        parser.error(f"--part is for {' and '.join(OF_PARTS)}, got it with {options.name}")
    arguments = {} if options.part is None else {"part": options.part}
    outcome: common.Outcome = importlib.import_module(f"benchmarks.{options.name}").run(options.quick, **arguments)
    if options.json is not None:
        own = [] if options.part is None else ["--part", options.part]
        command = ["tools/bench.py", options.name, *["--quick"] * options.quick, *own]
        common.write_json(options.json, options.name, shlex.join(command), outcome)
    print(f"bench {options.name}: " + " ".join(f"{key}={value:.4g}" for key, value in outcome.headline.items()))


if __name__ == "__main__":
    main()
