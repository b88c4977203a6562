"""How long the first layer waits for its parameters while a large late layer is updated.

2 workers and 2 pservers, on this host and on 4 hosts with 1 Gbit/s and 250 Mbit/s each (which needs root, for network
namespaces). The model: two small convolutions, a Dense layer with a kernel of 51 MB, Adam. "in order" is what tfps did
before: updates run one after the other, each as a whole. "urgent first" is what it does: an urgent update does not wait
for one that runs; and where slices come back more slowly than the update takes, the large one runs in parts meanwhile.
Parts cost more CPU than a whole update. Here all hosts share two processors with the emulated network, so that a step
may take longer with parts. Both are the same program in the same processes; fits alternate. Waits are what a capture of
both workers says, per step.

On one host the first layer waited longer with "urgent first" in 8 of 12 pairs (median 1.25 times, 0.44 to 2.27; an
earlier, shorter run had 0.99). The reason is not known; there all processes share two processors and no link limits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable

from tfps.types import Json
from tools import children
from tools.benchmarks.common import Outcome, median
from tools.netlab import Netlab

WORKERS, PSERVERS = 2, 2
SIDE, BATCH, UNITS = 32, 16, 780  # of images; 32 * 32 / 4 * 64 inputs to so many units are 51 MB
STEPS = 6  # of a fit
ANSWER_S = 300.0
PLACES = {"one host": 0.0, "1 Gbit/s": 1000.0, "250 Mbit/s": 250.0}  # and the rate of a host in Mbit/s
MODES = ("in order", "urgent first")
FIGURES = ("first_ms", "exposed_ms", "step_ms")


def run(quick: bool) -> Outcome:
    """Medians over pairs of fits."""
    runs = [found for place in PLACES for found in _measure(place, 3 if quick else 12)]
    headline: dict[str, float] = {}
    for place in PLACES:
        of_place = [each for each in runs if each["place"] == place]
        name = place.replace(" ", "_").replace("/", "_")
        for what in MODES:
            of_mode = [each for each in of_place if each["what"] == what]
            headline |= {f"{name}_{what.replace(' ', '_')}_{key}": median(of_mode, key) for key in FIGURES}
        for figure in FIGURES:
            pairs = zip(of_place[::2], of_place[1::2], strict=True)
            ratio = statistics.median(new[figure] / max(old[figure], 1e-3) for old, new in pairs)
            headline[f"{name}_{figure.removesuffix('_ms')}_ratio"] = ratio
    return Outcome(headline, runs)


def _measure(place: str, pairs: int) -> list[dict[str, Json]]:
    with contextlib.ExitStack() as stack:
        starts: list[Callable[..., subprocess.Popen[str]]] = [subprocess.Popen] * (WORKERS + PSERVERS)
        names = ["127.0.0.1"] * PSERVERS
        if rate := PLACES[place]:
            hosts = stack.enter_context(Netlab(WORKERS + PSERVERS, rate)).hosts
            starts, names = [host.popen for host in hosts], [host.address for host in hosts[WORKERS:]]
        addresses = []
        for name, popen in zip(names, starts[WORKERS:], strict=True):
            serve = ["-m", "tfps.cli", f"--host={name}", "--port=0", f"--workers={WORKERS}", "--insecure"]
            pserver = stack.enter_context(children.python(serve, popen=popen))
            addresses.append(children.answer(pserver, ANSWER_S).split()[3])
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        work = [str(pathlib.Path(__file__)), folder, str(pairs)]
        # Sizes are given: tuning would change them between fits.
        sizes = {"TFPS_SLICE_BYTES": str(2**20), "TFPS_WINDOW_BYTES": str(4 * 2**20)}
        job = {"TFPS_PSERVERS": ",".join(addresses), "TFPS_WORKERS": str(WORKERS), "TF_CPP_MIN_LOG_LEVEL": "2", **sizes}
        workers = [
            stack.enter_context(children.python(work, {**job, "TFPS_RANK": str(rank)}, popen))
            for rank, popen in enumerate(starts[:WORKERS])
        ]
        runs: list[dict[str, Json]] = []
        for _ in range(pairs * len(MODES)):
            found = {"place": place, **json.loads(children.answer(workers[0], ANSWER_S))}
            runs.append(found)
            print(
                f"{place:10} {found['what']:14} " + " ".join(f"{key}={found[key]:.1f}" for key in FIGURES), flush=True
            )
    return runs


def _work(folder: pathlib.Path, pairs: int) -> None:
    """A worker; rank 0 prints what each fit's capture says."""
    import keras
    import numpy as np

    import tfps
    from tfps.runtime.apply_threads import ApplyThreads
    from tfps.strategy import emitter
    from tfps.trace import capture_file
    from tfps.trace.summary import summarize

    urgent_first, cut_slices = ApplyThreads._may_start, emitter._CUT_SLICES

    def one_after_the_other(threads: ApplyThreads) -> bool:
        return bool(threads._waiting) and not threads._running

    def use(what: str) -> None:
        """Applies to what runs from now on, and to models that are traced from now on."""
        ordered = what == "in order"
        setattr(ApplyThreads, "_may_start", one_after_the_other if ordered else urgent_first)  # noqa: B010
        setattr(emitter, "_CUT_SLICES", sys.maxsize if ordered else cut_slices)  # noqa: B010

    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH * STEPS, SIDE, SIDE, 3)).astype("float32")
    y = random.integers(0, 10, BATCH * STEPS)
    strategy, models = tfps.Strategy(), {}
    for what in MODES:
        use(what)
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layers = [
                keras.layers.Conv2D(16, 3, padding="same", activation="relu", name="first"),
                keras.layers.Conv2D(64, 3, 2, padding="same", activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(UNITS, activation="relu", name="large"),
                keras.layers.Dense(10),
            ]
            models[what] = keras.Sequential([keras.layers.Input((SIDE, SIDE, 3)), *layers])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            models[what].compile(keras.optimizers.Adam(1e-4), loss, jit_compile=False)
        for _ in range(2):
            models[what].fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    for number in range(pairs):
        for what in MODES:
            use(what)
            where = folder / f"{number} {what}"
            with strategy.trace(where, "fit"):
                models[what].fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
            if strategy.rank == 0:
                found = summarize(capture_file.read(capture_file.chrome_path(where, "fit")))
                runs = len(found.steps) * found.workers
                first_ns = sum(cost.exposed_ns for cost in found.costs if "/first/" in cost.variable)
                figures = {
                    "first_ms": first_ns / runs / 1e6,
                    "exposed_ms": sum(cost.exposed_ns for cost in found.costs) / runs / 1e6,
                    "step_ms": found.totals.duration_ns / len(found.steps) / 1e6,
                }
                print(json.dumps({"what": what, **figures}), flush=True)
    strategy.close()
    sys.stdin.readline()  # stays until it is terminated


if __name__ == "__main__":
    _parser = argparse.ArgumentParser()
    _parser.add_argument("folder", type=pathlib.Path)
    _parser.add_argument("pairs", type=int)
    _options = _parser.parse_args()
    _work(_options.folder, _options.pairs)
