#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Runs the same Keras 3 programs under tfps and under TensorFlow's strategies, and writes which of them work.

    tools/compare_strategies.py                      all programs under all strategies; some 15 minutes
    tools/compare_strategies.py fit gan              these programs; the others stay as they are on the page
    tools/compare_strategies.py --strategy tfps fit  under one strategy
    tools/compare_strategies.py --page               runs nothing, writes docs/strategies.md from docs/strategies.json
    tools/compare_strategies.py --check              as --page, but only says whether it is up to date

A program works if it ends without an error in time, with results that are bitwise equal on all workers and equal to
those of one process without a strategy. Results: docs/strategies.json, docs/strategies.md; README.md says how many.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from tfps.pserver.server import ParameterServer
from tfps.types import Json
from tools import pages
from tools.pages import ROOT
from tools.strategies.programs import PROGRAMS

PROGRAM = "tools/compare_strategies.py"
NAMES = {"tfps": "tfps", "mwms": "MultiWorkerMirroredStrategy", "ps": "ParameterServerStrategy"}
WORKERS, PSERVERS = 2, 2
LIMIT_S = 180.0  # from the end of one program to the end of the next; the first one includes the start
OTHERS_S = 15.0  # how long the others may take to end after the first error
WORKER = pathlib.Path(__file__).resolve().parent / "strategies" / "worker.py"


@dataclass(frozen=True)
class Outcome:
    """What became of a program: `words` for the table ("works" or what went wrong), the error's text in `details`."""

    words: str
    details: str = ""

    @property
    def works(self) -> bool:
        return self.words == "works"


class Job:
    """The processes that run some programs one after the other."""

    def __init__(self, strategy: str, programs: Sequence[str], folder: pathlib.Path) -> None:
        self.strategy, self.programs, self.folder = strategy, programs, folder
        self.ranks = range(WORKERS if strategy in ("tfps", "mwms") else 1)
        self._end = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Job:  # noqa: PYI034  # typing.Self is younger than Python 3.10
        for number, environment in enumerate(self._environments()):
            log = self._end.enter_context((self.folder / f"log.{number}").open("wb"))
            process = subprocess.Popen(
                [sys.executable, str(WORKER), self.strategy, str(self.folder), *self.programs],
                env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            self._processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._end.close()

    def _environments(self) -> Iterator[Mapping[str, str]]:
        """One per process; those that run the programs first, in the order of ranks."""
        if self.strategy == "alone":
            yield {}
        elif self.strategy == "tfps":
            servers = [ParameterServer("127.0.0.1", 0, workers=WORKERS) for _ in range(PSERVERS)]
            for server in servers:
                self._end.callback(server.stop, 0.2)
            addresses = ",".join(server.address for server in servers)
            for rank in range(WORKERS):
                yield {"TFPS_PSERVERS": addresses, "TFPS_RANK": str(rank), "TFPS_WORKERS": str(WORKERS)}
        else:
            tasks = {"worker": WORKERS} if self.strategy == "mwms" else {"chief": 1, "worker": WORKERS, "ps": PSERVERS}
            cluster = {task: [f"127.0.0.1:{free_port()}" for _ in range(count)] for task, count in tasks.items()}
            for task, addresses_of_task in cluster.items():
                for index in range(len(addresses_of_task)):
                    yield {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})}

    def results(self, program: str) -> list[dict[str, Json]] | Outcome:
        """The results of each rank, or what went wrong."""
        deadline = time.monotonic() + LIMIT_S
        failed: list[pathlib.Path] = []
        while time.monotonic() < deadline:
            done, errors = self._ended(program, "npz"), self._ended(program, "error")
            if len(done) == len(self.ranks):
                return [dict(np.load(path)) for path in done]
            if len(errors) + len(done) == len(self.ranks):
                return failure(errors)
            if errors and not failed:
                failed = errors
                deadline = min(deadline, time.monotonic() + OTHERS_S)
            if not errors and any(process.poll() is not None for process in self._processes[: len(self.ranks)]):
                time.sleep(1.0)  # what it wrote last may be there now
                if not any(
                    (self.folder / f"{program}.{rank}.{end}").exists()
                    for rank in self.ranks
                    for end in ("npz", "error")
                ):
                    return self._died()
            time.sleep(0.05)
        return failure(failed) if failed else Outcome("hangs", f"no result after {LIMIT_S:.0f} s")

    def is_over(self, program: str) -> bool:
        """Whether all ranks have ended this program, with results or an error, and can go on."""
        return len(self._ended(program, "npz") + self._ended(program, "error")) == len(self.ranks)

    def _ended(self, program: str, how: str) -> list[pathlib.Path]:
        return [path for rank in self.ranks if (path := self.folder / f"{program}.{rank}.{how}").exists()]

    def _died(self) -> Outcome:
        tails = []
        for number, process in enumerate(self._processes):
            if process.poll() is not None:
                log = (self.folder / f"log.{number}").read_text(errors="replace").splitlines()
                tails.append(f"process {number} ended with {process.returncode}\n" + "\n".join(log[-6:]))
        return Outcome("the process dies", "\n".join(tails))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def failure(errors: Sequence[pathlib.Path]) -> Outcome:
    """What the first of these files says."""
    first = min(errors, key=lambda path: path.stat().st_mtime_ns)
    error = json.loads(first.read_text())
    lines = [line.strip() for line in error["text"].splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("Exception encountered when calling"):
        del lines[0]
    # Errors from within a graph function begin with a traceback, and Keras adds what the arguments were.
    named = [line for line in lines if re.match(r"\w+(Error|Exception): ", line)]
    said = (named[-1].partition(": ")[2] if named else (lines[0] if lines else "")).rstrip(" {(:")
    return Outcome(f"{error['type']}: {shortened(said)}", shortened(error["text"], 1200))


def shortened(text: str, length: int = 90) -> str:
    # Addresses of objects and temporary folders differ from run to run; Keras colours its messages.
    text = re.sub(r" at 0x[0-9a-f]+|\x1b\[\d*m|(?<=')/\S*/(?=[^/'\s]+')", "", text).strip()
    return text if len(text) <= length else f"{text[: length - 4].rstrip()} ..."


def compared(name: str, ranks: Sequence[Mapping[str, Json]], alone: Mapping[str, Json] | None) -> Outcome:
    """Whether all ranks have the same results, and those of one process."""
    first, program = ranks[0], PROGRAMS[name]
    for rank, other in enumerate(ranks):
        for key, value in first.items():
            if key not in other or other[key].shape != value.shape or other[key].tobytes() != value.tobytes():
                return Outcome(f"workers differ in {what(key)}", f"{key} of worker 0 and {rank}")
    if alone is None or not program.compared:
        return Outcome("works")
    for key, expected in alone.items():
        if key not in first or first[key].shape != expected.shape:
            found = first[key].shape if key in first else "nothing"
            return Outcome(
                f"other {what(key)} than one process", f"{key}: must have shape {expected.shape}, got {found}"
            )
        difference = float(np.abs(first[key] - expected).max() / max(1e-6, np.abs(expected).max()))
        if not difference <= program.tolerance:
            return Outcome(
                f"other {what(key)} than one process",
                f"{key} differs from one process by {difference:.1g} of its largest, allowed are {program.tolerance:g}",
            )
    return Outcome("works")


def what(key: str) -> str:
    return "weights" if "weight" in key else key


def run(strategy: str, programs: Sequence[str], alone: Mapping[str, Json]) -> Iterator[tuple[str, Outcome]]:
    """Runs the programs in one job as long as all workers get on.

    What fails is run again in a job of its own, so that nothing came before it, unless another program has failed in
    the same way in such a job.
    """
    left, known = list(programs), set()
    while left:
        done = 0
        with tempfile.TemporaryDirectory() as folder, Job(strategy, left, pathlib.Path(folder)) as job:
            for number, name in enumerate(left):
                found = job.results(name)
                outcome = found if isinstance(found, Outcome) else compared(name, found, alone.get(name))
                if not outcome.works and number > 0 and outcome.words not in known:
                    break
                known.add(outcome.words)
                yield name, outcome
                done += 1
                if not job.is_over(name):
                    break
        left = left[done:]


def run_alone(programs: Sequence[str]) -> dict[str, Json]:
    """The results of one process without a strategy.

    Raises:
        PageError: a program fails by itself.
    """
    with tempfile.TemporaryDirectory() as folder, Job("alone", programs, pathlib.Path(folder)) as job:
        found = {}
        for name in programs:
            results = job.results(name)
            if isinstance(results, Outcome):
                raise pages.PageError(f"{name} must run without a strategy, got {results.words}\n{results.details}")
            found[name] = results[0]
        return found


def make(recorded: Mapping[str, Json], readme: str) -> str:
    """docs/strategies.md

    Raises:
        PageError: results are missing or unknown, or the README says something else.
    """
    outcomes = recorded["outcomes"]
    for strategy in NAMES:
        if list(outcomes.get(strategy, {})) != list(PROGRAMS):
            raise pages.PageError(
                f"docs/strategies.json must have all programs under {NAMES[strategy]}, in their order; run {PROGRAM}"
            )
    works = [sum(Outcome(**each).works for each in outcomes[strategy].values()) for strategy in NAMES]
    counts = [
        f"{count} {'work ' * (not index)}under {name}"
        for index, (count, name) in enumerate(zip(works, NAMES.values(), strict=True))
    ]
    if (sentence := ", ".join(counts)) not in " ".join(readme.split()):
        raise pages.PageError(f"README.md must say: {sentence}")
    details: dict[tuple[str, str], list[str]] = {}  # programs that fail alike stand together
    for strategy in NAMES:
        for name, program in PROGRAMS.items():
            outcome = Outcome(**outcomes[strategy][name])
            if not outcome.works:
                details.setdefault((strategy, outcome.details or outcome.words), []).append(program.what)
    sections = [
        f"**{NAMES[strategy]}**, {'; '.join(programs)}:\n\n```\n{text}\n```\n"
        for (strategy, text), programs in details.items()
    ]
    page = f"""# What works under which strategy

Written by `{PROGRAM}`, with {recorded["versions"]}.

Twenty small Keras 3 programs ([source](../tools/strategies/programs.py)) run under each strategy with {WORKERS}
worker processes; tfps and ParameterServerStrategy with {PSERVERS} servers. A program **works** if it ends without an
error within {LIMIT_S:.0f} s, with results that are bitwise equal on all workers and equal to those of one process
without a strategy and the same global batches: 1e-4 of the largest item, half precision as much as its bits allow,
Dropout only between workers. Results are weights, `History` and what `evaluate` and `predict` return.

ParameterServerStrategy is asynchronous by design, so its weights cannot be those of one process; its programs run in
one coordinator, so there is nothing to compare between workers. Training loops are written for it as its
documentation has them. Clipping: under every strategy Keras 3 clips each replica's gradients before they are summed.

{table(recorded, lambda outcome: outcome.words.replace("|", "/"))}
## What went wrong

{chr(10).join(sections) or "Nothing."}"""
    return page.rstrip() + "\n"


def table(recorded: Mapping[str, Json], cell: Callable[[Outcome], str]) -> str:
    outcomes = recorded["outcomes"]
    rows = [
        [program.what, *(cell(Outcome(**outcomes[strategy][name])) for strategy in NAMES)]
        for name, program in PROGRAMS.items()
    ]
    counts = [sum(Outcome(**each).works for each in outcomes[strategy].values()) for strategy in NAMES]
    rows.append(["of 20", *map(str, counts)])
    return pages.table(["program", *NAMES.values()], rows).replace("---:", "---")


def versions() -> str:
    return f"TensorFlow {tf.__version__}, Keras {keras.__version__}, Python {sys.version_info[0]}.{sys.version_info[1]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"default: all of {', '.join(PROGRAMS)}")
    parser.add_argument("--strategy", action="append", choices=list(NAMES), help="default: all")
    parser.add_argument("--quick", action="store_true", help="fit, custom_loop and save_and_load only; writes nothing")
    parser.add_argument("--page", action="store_true", help="run nothing, write the pages from docs/strategies.json")
    parser.add_argument(
        "--check", action="store_true", help="run and write nothing; fail unless the pages are up to date"
    )
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.programs if name not in PROGRAMS]:
        parser.error(f"programs must be among {', '.join(PROGRAMS)}, got {', '.join(unknown)}")
    path = ROOT / "docs" / "strategies.json"
    recorded: dict[str, Json] = json.loads(path.read_text()) if path.exists() else {"versions": "", "outcomes": {}}
    try:
        if not options.page and not options.check:
            programs = options.programs or list(PROGRAMS)
            if options.quick:
                programs = ["fit", "custom_loop", "save_and_load"]
            alone = run_alone(programs)
            for strategy in options.strategy or list(NAMES):
                measure(recorded, strategy, programs, alone)
                if not options.quick:
                    path.write_text(json.dumps(recorded, indent=1) + "\n")
            if options.quick:
                return 0
        page = make(recorded, (ROOT / "README.md").read_text())
    except pages.PageError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    changed = pages.update(ROOT, {"docs/strategies.md": page.encode()}, "docs/strategies.md", options.check)
    if changed and options.check:
        print(f"{PROGRAM}: must be up to date, differs: {', '.join(changed)}; run {PROGRAM} --page", file=sys.stderr)
        return 1
    print(f"{PROGRAM}: {'wrote ' + ', '.join(changed) if changed else 'up to date'}")
    return 0


def measure(recorded: dict[str, Json], strategy: str, programs: Sequence[str], alone: Mapping[str, Json]) -> None:
    """Runs programs under a strategy and puts their outcomes into `recorded`."""
    found = recorded["outcomes"].setdefault(strategy, {})
    for name, outcome in run(strategy, programs, alone):
        print(f"{strategy:5} {name:22} {outcome.words}", flush=True)
        found[name] = asdict(outcome)
    recorded["outcomes"][strategy] = {name: found[name] for name in PROGRAMS if name in found}
    recorded["versions"] = versions()


if __name__ == "__main__":
    sys.exit(main())
