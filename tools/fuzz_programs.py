#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Runs random Keras programs under tfps and beside plain Keras, and compares what they end with.

    tools/fuzz_programs.py --minutes 10
    tools/fuzz_programs.py --minutes 10 --seed 3 --workers 2 --folder failures
    tools/fuzz_programs.py --minutes 10 --elastic --workers 2 3

A program that fails is shrunk and written to the folder: it runs by itself, under tfps_launch, and prints what differs.
What is compared with what is in tools/fuzzing/oracle.py, what is known to fail in tools/fuzzing/known.py. Exit code 1:
something failed.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from tools.fuzzing.known import KNOWN
from tools.fuzzing.session import Session


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long (default: %(default)s)")
    parser.add_argument("--cases", type=int, default=1_000_000, help="at most so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3], help="numbers of workers")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("fuzzing-failures"))
    parser.add_argument("--shrink-seconds", type=float, default=240.0, help="per failure")
    parser.add_argument("--compressed", type=int, default=6, help="every so many-th case with pservers compresses")
    parser.add_argument("--compiled", type=int, default=4, help="every so many-th case is compiled by XLA")
    parser.add_argument("--update", default="worker", choices=["worker", "server"], help="where the optimizer runs")
    parser.add_argument("--elastic", action="store_true", help="a worker leaves each program, and comes back")
    parser.add_argument("--without", nargs="*", default=[], help="features to leave out, beside the known faults")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    session = Session(
        arguments.minutes,
        arguments.seed,
        tuple(arguments.workers),
        arguments.cases,
        [*KNOWN, *arguments.without],
        arguments.folder,
        arguments.shrink_seconds,
        arguments.compressed,
        say=lambda line: print(line, flush=True),
        update=arguments.update,
        elastic=arguments.elastic,
        compiled=arguments.compiled,
    )
    session.run()
    print(session.summary())
    return 1 if session.failures else 0


if __name__ == "__main__":
    sys.exit(main())
