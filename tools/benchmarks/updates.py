"""How long the first layer waits for its parameters while a large late layer is updated.

2 workers and 2 pservers on this host. The model: two small convolutions, a Dense layer with a kernel of 51 MB, Adam.
"in order" is what tfps did before: updates run one after the other, each as a whole. "urgent first" is what it does:
an urgent update does not wait for one that runs. (The large one would run in parts if its slices came back slowly; on
one host they do not.) Both are the same program in the same processes; fits alternate. Waits are what a capture of both
workers says, per step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
import sys
import tempfile

from tfps.types import Json
from tools import children
from tools.benchmarks.common import Outcome, median

WORKERS, PSERVERS = 2, 2
SIDE, BATCH, UNITS = 32, 16, 780  # of images; 32 * 32 / 4 * 64 inputs to so many units are 51 MB
STEPS = 6  # of a fit
ANSWER_S = 300.0
MODES = ("in order", "urgent first")
FIGURES = ("first_ms", "exposed_ms", "step_ms")


def run(quick: bool) -> Outcome:
    """Medians over pairs of fits."""
    pairs = 8 if quick else 24
    with contextlib.ExitStack() as stack:
        serve = ["-m", "tfps.cli", "--host=127.0.0.1", "--port=0", f"--workers={WORKERS}"]
        addresses = [
            children.answer(stack.enter_context(children.python(serve)), ANSWER_S).split()[3] for _ in range(PSERVERS)
        ]
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        work = [str(pathlib.Path(__file__)), folder, str(pairs)]
        # Sizes are given: only the buckets of the first model would be tuned.
        sizes = {"TFPS_SLICE_BYTES": str(2**20), "TFPS_WINDOW_BYTES": str(4 * 2**20)}
        job = {"TFPS_PSERVERS": ",".join(addresses), "TFPS_WORKERS": str(WORKERS), "TF_CPP_MIN_LOG_LEVEL": "2", **sizes}
        workers = [
            stack.enter_context(children.python(work, {**job, "TFPS_RANK": str(rank)})) for rank in range(WORKERS)
        ]
        runs: list[dict[str, Json]] = []
        for _ in range(pairs):
            for _ in MODES:
                runs.append(json.loads(children.answer(workers[0], ANSWER_S)))
                found = runs[-1]
                print(f"{found['what']:14} " + " ".join(f"{key}={found[key]:.1f}" for key in FIGURES), flush=True)
    headline: dict[str, float] = {}
    for what in MODES:
        of_mode = [each for each in runs if each["what"] == what]
        headline |= {f"{what.replace(' ', '_')}_{key}": median(of_mode, key) for key in FIGURES}
    ratios = [new["first_ms"] / max(old["first_ms"], 1e-3) for old, new in zip(runs[::2], runs[1::2], strict=True)]
    return Outcome({**headline, "first_ratio": statistics.median(ratios)}, runs)


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
