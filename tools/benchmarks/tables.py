"""Tables of rows (tfps.layers.Embedding): lookups and updates, steps by the table's size, beside Keras, on a network.

A model of 26 features whose ids, Zipf-distributed, are rows of one table, and two dense layers; batches of 4,096
examples per worker, rows of 16 floats, Adagrad. `fit` is what is timed: the mean of the steps of a round, behind the
first ones; rounds of what is compared alternate. All but `network` are on this machine's loopback.

* `engine`: one pserver's `Table` without anything around it, beside NumPy's `take`, the same rule of update on plain
  arrays, and `a[i] = b`; what memory a row takes beside its floats.
* `size`: 1 worker and 2 pservers, with 1 M rows and with as many as memory holds, filled before; a batch has 30,000
  different ids in both, drawn from all rows.
* `unique`: the same by the number of different ids, which is that of the Zipf exponent.
* `keras`: 1 M rows in keras.layers.Embedding (as Keras compiles it by itself, and without XLA), in tfps' layer without
  a strategy, and on 2 pservers.
* `network`: 2 workers and 2 pservers on hosts with 1 Gbit/s each (tools/netlab.py): rows are asked for while the step
  before computes, and with that turned off. *Waits for rows*: from a graph's question to its answer. Also with rows of
  64 floats, and with a step that sleeps behind its lookup, as if an accelerator computed: hosts that share a few cores
  otherwise wait for these more than for the network.
* `peers`: ParameterServerStrategy with a table sharded over 2 servers, in a loop without Keras, asking for each id as
  often as it comes or once; TensorFlow Recommenders Addons (TFRA) in one process and with 2 servers, with TensorFlow
  2.16, the last one that it is for (`tools/python -m tools.tables.job` installs it; not with --quick). Those with
  servers are asynchronous, and repeat the same batches.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from tfps.types import Json
from tools.benchmarks.common import Outcome
from tools.netlab import Netlab, NetlabError
from tools.tables import engine, job, summary
from tools.tables.job import Job
from tools.tables.work import Work

Found = Iterator[dict[str, Json]]
Kind = TypeVar("Kind", int, str)

ENGINE_BATCHES = (30_000, 100_000)
SMALL_ROWS, MOST_ROWS, QUICK_ROWS = 10**6, 10**8, 10**7
ROW_BYTES = 165  # with its slot and its place in the index, while the index grows
SPARE_BYTES = 5 * 2**30  # for everything else
EXPONENTS = (0.6, 0.8, 1.0, 1.2, 1.4)
HOSTS, MBIT = 4, 1000.0
NETWORK = ((16, 0.0), (64, 0.0), (64, 0.1))  # floats of a row, seconds that a step sleeps
WARMUP, STEPS = 4, 40
PEERS = ("tf_ps", "tf_ps_unique", "tfra_ps", "tfra")


def run(quick: bool, part: str = "") -> Outcome:
    """All parts, or one."""
    if part and part not in PARTS:
        raise SystemExit(f"--part of tables must be one of {', '.join(PARTS)}, got {part!r}")
    runs: list[dict[str, Json]] = []
    for name, measure in PARTS.items():
        if part in ("", name):
            own = [{"part": name, **each} for each in measure(quick)]
            for table in summary.tables(own):
                print(table.text(), flush=True)
            for line in summary.left_out(own):
                print(line, flush=True)
            runs += own
    return Outcome(summary.headline(runs), runs)


def _engine(quick: bool) -> Found:
    for rows, bounded in itertools.product((SMALL_ROWS,) if quick else (SMALL_ROWS, QUICK_ROWS), (True, False)):
        yield from engine.measure(rows, bounded=bounded, batches=ENGINE_BATCHES, rounds=7 if quick else 25)


def _size(quick: bool) -> Found:
    large = QUICK_ROWS if quick else most_rows()
    for bounded in (False,) if quick else (False, True):
        with contextlib.ExitStack() as stack:
            jobs, about = {}, {}
            for rows in (SMALL_ROWS, large):
                jobs[rows] = job.tfps_job(stack, Work(rows, bounded), WARMUP, STEPS)
                jobs[rows].round()  # declares the table
                about[rows] = {"rows": rows, "bounded": bounded, **jobs[rows].fill()}
                print(f"filled with {rows} rows in {about[rows]['fill_s']:.0f} s", flush=True)
            for rows, found in _rounds(jobs, 4 if quick else 15):
                yield {**about[rows], **found}


def most_rows() -> int:
    """Of 16 floats, with one slot, that memory holds, in tens of millions."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
    return min(max((free - SPARE_BYTES) // ROW_BYTES // QUICK_ROWS, 1) * QUICK_ROWS, MOST_ROWS)


def _unique(quick: bool) -> Found:
    with contextlib.ExitStack() as stack:
        one = job.tfps_job(stack, Work(bounded=False), WARMUP, STEPS)
        one.round()
        one.fill()
        for number, exponent in itertools.product(range(2 if quick else 10), EXPONENTS):
            found = one.round(Work(bounded=False, unique=0, exponent=exponent))
            yield {"exponent": exponent, "round": number, **found}


def _keras(quick: bool) -> Found:
    with contextlib.ExitStack() as stack:
        kinds = {"keras": "keras", "keras_plain": "keras_plain", "tfps_local": "local"}
        jobs = {name: job.keras_job(stack, kind, Work(), WARMUP, STEPS) for name, kind in kinds.items()}
        jobs["tfps"] = _filled(stack)
        for name, found in _rounds(jobs, 4 if quick else 20, warm=True):
            yield {"kind": name, **found}


def _filled(stack: contextlib.ExitStack) -> Job:
    """1 worker, 2 pservers, all rows."""
    found = job.tfps_job(stack, Work(), WARMUP, STEPS)
    found.round()
    found.fill()
    return found


def _network(quick: bool) -> Found:
    try:
        with Netlab(HOSTS, MBIT) as lab:
            lab.probe(together=False)
            for dim, sleep_s in NETWORK[:: 2 if quick else 1]:
                work = Work(dim=dim, sleep_s=sleep_s)
                with contextlib.ExitStack() as stack:
                    kinds = {"on": (), "off": ("--no-prefetch",)}
                    jobs = {
                        kind: job.tfps_job(stack, work, WARMUP, STEPS, workers=2, hosts=lab.hosts, options=options)
                        for kind, options in kinds.items()
                    }
                    for each in jobs.values():
                        each.round()
                        each.fill()
                    for kind, found in _rounds(jobs, 2 if quick else 15):
                        yield {"dim": dim, "sleep_s": sleep_s, "kind": kind, **found}
    except NetlabError as error:
        yield {"kind": "hosts", "left_out": f"no hosts: {error}"}


def _peers(quick: bool) -> Found:
    with contextlib.ExitStack() as stack:
        jobs = {"tfps": _filled(stack), "tfps_local": job.keras_job(stack, "local", Work(), WARMUP, STEPS)}
        for kind in PEERS[: 2 if quick else None]:
            if reason := job.absence(kind):
                yield {"kind": kind, "left_out": reason}
                continue
            try:
                one = job.peer_job(stack, kind, Work(), WARMUP, STEPS)
                one.round()
                jobs[kind] = one
            except RuntimeError as error:
                yield {"kind": kind, "left_out": f"it failed: {error}"}
        for kind, found in _rounds(jobs, 3 if quick else 15, warm=True):
            yield {"kind": kind, **found}


def _rounds(jobs: Mapping[Kind, Job], count: int, *, warm: bool = False) -> Iterator[tuple[Kind, dict[str, Json]]]:
    """Rounds of all jobs in turn, each time the other way round; `warm`: one before, in which graphs are traced."""
    for number in range(-1 if warm else 0, count):
        for kind in list(jobs)[:: -1 if number % 2 else 1]:
            found = jobs[kind].round()
            if number >= 0:
                yield kind, {"round": number, **found}


PARTS: dict[str, Callable[[bool], Found]] = {
    "engine": _engine,
    "size": _size,
    "unique": _unique,
    "keras": _keras,
    "network": _network,
    "peers": _peers,
}
