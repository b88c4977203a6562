"""Rounds of mode "diloco" with a quorum: 4 workers on this host, of which one takes three times as long per step.

The task is the digits CNN of modes.py; a layer sleeps in each step, and a round is 25 steps. Three jobs: all workers
equally fast; one of them slow; the same with a quorum of three and a grace of a tenth of a round. A round is the time
from one exchange to the next on the first worker, while it trains; the first one has all workers and the tracing, and
does not count. Accuracy is that of the parameters that would be saved when all have used their rows.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

from tfps.types import Json
from tools import children
from tools.benchmarks import modes
from tools.benchmarks.common import Outcome

WORKERS, PSERVERS = 4, 2
ROUND, STEP_S = 25, 0.08
PASSES = 8  # over the rows, in one epoch
LOCAL: dict[str, Json] = {"mode": "diloco", "inner_steps": ROUND}
JOBS: dict[str, tuple[int, dict[str, Json]]] = {  # how many times as long a step takes on the last worker
    "even": (1, LOCAL),
    "slow": (3, LOCAL),
    "quorum": (3, {**LOCAL, "quorum": 0.75, "grace_s": ROUND * STEP_S / 10}),
}


def run(quick: bool) -> Outcome:
    """Each job with three seeds; quick: with one."""
    runs: list[dict[str, Json]] = []
    with contextlib.ExitStack() as stack:
        serve = ["-m", "tfps.pserver.cli", "--port=0", "--host=127.0.0.1", f"--workers={WORKERS}"]
        pservers = [stack.enter_context(children.python(serve)) for _ in range(PSERVERS)]
        addresses = [children.answer(each, modes.ANSWER_S).split()[3] for each in pservers]
        work, workers = [str(pathlib.Path(__file__)), *addresses], []
        for rank in range(WORKERS):
            variables = {"TFPS_RANK": str(rank), "TFPS_WORKERS": str(WORKERS), "TF_CPP_MIN_LOG_LEVEL": "2"}
            workers.append(stack.enter_context(children.python(work, variables)))
        for seed in range(1 if quick else 3):
            for name, (slow, settings) in JOBS.items():
                for rank, worker in enumerate(workers):
                    step_s = STEP_S * (slow if rank == WORKERS - 1 else 1)
                    children.tell(worker, json.dumps({"step_s": step_s, "settings": settings, "seed": seed}))
                found = [json.loads(children.answer(each, modes.ANSWER_S)) for each in workers]
                if any(each["accuracy"] != found[0]["accuracy"] for each in found):
                    raise RuntimeError(f"all ranks must end with the same parameters, got {found}")
                runs.append({"job": name, "seed": seed, **found[0]})
                print(" ".join(f"{key}={value}" for key, value in runs[-1].items()), flush=True)
    return Outcome(headline(runs), runs)


def headline(runs: Sequence[Mapping[str, Json]]) -> dict[str, float]:
    """Medians over seeds: rounds as multiples of those without a slow worker, and points of accuracy above these."""
    figures: dict[str, float] = {}
    even = {run["seed"]: run for run in runs if run["job"] == "even"}
    for name in JOBS:
        pairs = [(run, even[run["seed"]]) for run in runs if run["job"] == name]
        figures[f"{name}_round"] = statistics.median(run["round_s"] / other["round_s"] for run, other in pairs)
        figures[f"{name}_points"] = statistics.median(
            100 * (run["accuracy"] - other["accuracy"]) for run, other in pairs
        )
    return figures


def _train(addresses: Sequence[str], job: Mapping[str, Json]) -> dict[str, Json]:
    import keras
    import numpy as np

    import tfps

    keras.utils.clear_session()
    keras.utils.set_random_seed(job["seed"])
    strategy = tfps.Strategy(addresses, config=tfps.Config(**job["settings"]))
    (x, y), test = modes._digits()
    x, y = np.concatenate([x] * PASSES), np.concatenate([y] * PASSES)
    with strategy.scope():
        model = modes._digits_model(job["step_s"])
    ends: list[float] = []
    timed = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.monotonic()))
    began_s = time.monotonic()
    model.fit(x, y, batch_size=modes.BATCH, verbose=0, callbacks=[timed])
    seconds = time.monotonic() - began_s
    accuracy = model.evaluate(*test, batch_size=500, verbose=0)[1]
    strategy.close()
    exchanged = ends[ROUND::ROUND]  # the first step after each exchange
    rounds = [later - earlier for earlier, later in itertools.pairwise(exchanged)]
    return {"round_s": round(statistics.median(rounds), 3), "accuracy": accuracy, "seconds": round(seconds, 1)}


if __name__ == "__main__":
    for _line in sys.stdin:
        print(json.dumps(_train(sys.argv[1:], json.loads(_line))), flush=True)
