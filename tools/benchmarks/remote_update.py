"""Update on the server beside update on the worker: memory of a worker, and time of a step with 2 and 8 workers.

Memory: one worker and one pserver, a model of 500 MB (8 Dense layers) under Adam, resident and shared memory of the
worker after 4 steps, and of the pserver. Each figure is from processes of their own. Reading all slots back then is
timed, too.
Steps: a model of 33 MB (4 Dense layers) under Adam and 2 pservers per job; every process has a strategy of each kind,
with pservers of its own, and their fits alternate. All processes share one machine: a step is mostly the processors'
work, of which pservers do once what workers otherwise do each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
import sys
import time

from tfps.types import Json
from tools import children
from tools.benchmarks.common import Outcome, median

UPDATES = ("worker", "server")
MEMORY_UNITS, MEMORY_LAYERS = 3953, 8  # kernels of 62.5 MB
STEP_UNITS, STEP_LAYERS = 1440, 4  # of 8.3 MB
STEPS, BATCH = 6, 16  # of a fit, and of a worker
ANSWER_S = 600.0
MB = 1e6


def run(quick: bool) -> Outcome:
    """Memory once per kind; medians of steps over pairs of fits."""
    runs: list[dict[str, Json]] = [_memory(update) for update in UPDATES]
    headline = {f"memory_{each['update']}_mb": float(each["worker_mb"]) for each in runs}
    headline["memory_saved_mb"] = headline["memory_worker_mb"] - headline["memory_server_mb"]
    for workers in (2, 8):
        found = _steps(workers, 3 if quick else 10)
        runs += found
        for update in UPDATES:
            own = [each for each in found if each["update"] == update]
            headline[f"step_{update}_{workers}_ms"] = median(own, "step_ms")
        pairs = zip(found[::2], found[1::2], strict=True)
        headline[f"step_ratio_{workers}"] = statistics.median(new["step_ms"] / old["step_ms"] for old, new in pairs)
    return Outcome(headline, runs)


def _start(stack: contextlib.ExitStack, count: int, workers: int) -> tuple[list[str], list[int]]:
    """Addresses and process ids of new pservers."""
    processes = [
        stack.enter_context(children.python(["-m", "tfps.pserver.cli", "--port=0", f"--workers={workers}"]))
        for _ in range(count)
    ]
    return [children.answer(each, ANSWER_S).split()[3] for each in processes], [each.pid for each in processes]


def _memory(update: str) -> dict[str, Json]:
    with contextlib.ExitStack() as stack:
        addresses, pids = _start(stack, 1, 1)
        work = [str(pathlib.Path(__file__)), "memory", *addresses, "--update", update]
        worker = stack.enter_context(children.python(work, {"TF_CPP_MIN_LOG_LEVEL": "2"}))
        found = json.loads(children.answer(worker, ANSWER_S))
        found |= {"what": "memory", "update": update, "pserver_mb": _resident_mb(pids[0])}
        print(" ".join(f"{key}={value}" for key, value in found.items()), flush=True)
        return dict(found)


def _steps(workers: int, pairs: int) -> list[dict[str, Json]]:
    with contextlib.ExitStack() as stack:
        addresses = [address for _ in UPDATES for address in _start(stack, 2, workers)[0]]
        work = [str(pathlib.Path(__file__)), "steps", *addresses, "--pairs", str(pairs)]
        job = {"TFPS_WORKERS": str(workers), "TF_CPP_MIN_LOG_LEVEL": "2"}
        running = [
            stack.enter_context(children.python(work, {**job, "TFPS_RANK": str(rank)})) for rank in range(workers)
        ]
        found = []
        for _ in range(pairs * len(UPDATES)):
            one = {"what": "step", "workers": workers, **json.loads(children.answer(running[0], ANSWER_S))}
            print(" ".join(f"{key}={value}" for key, value in one.items()), flush=True)
            found.append(one)
        return found


def _resident_mb(pid: int | str = "self") -> float:
    """Memory of a process, shared memory included."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024 / MB, 1)


def _work_memory(addresses: list[str], update: str) -> None:
    """A worker: prints its memory after some steps."""
    import numpy as np

    import tfps

    strategy = tfps.Strategy(addresses, config=tfps.Config(update=update))  # type: ignore[arg-type]
    model = _model(strategy, MEMORY_UNITS, MEMORY_LAYERS)
    x = np.ones([4 * BATCH, MEMORY_UNITS], np.float32)
    before = _resident_mb()
    model.fit(x, x, batch_size=BATCH, verbose=0)
    strategy._runtime.settle(ANSWER_S)
    after = _resident_mb()
    began_s = time.monotonic()
    slots = sum(float(each.numpy().nbytes) for each in model.optimizer.variables)
    collected_s = round(time.monotonic() - began_s, 2)
    found = {"before_mb": before, "worker_mb": after, "slots_mb": round(slots / MB, 1), "collected_s": collected_s}
    print(json.dumps(found), flush=True)
    sys.stdin.readline()  # stays until it is terminated


def _work_steps(addresses: list[str], pairs: int) -> None:
    """A worker; rank 0 prints the time of a step in each fit."""
    import numpy as np

    import tfps

    strategies = {
        update: tfps.Strategy(addresses[2 * index : 2 * index + 2], config=tfps.Config(update=update))  # type: ignore[arg-type]
        for index, update in enumerate(UPDATES)
    }
    models = {update: _model(strategy, STEP_UNITS, STEP_LAYERS) for update, strategy in strategies.items()}
    (rank,) = {strategy.rank for strategy in strategies.values()}
    workers = strategies["server"].num_workers
    x = np.random.default_rng(0).normal(size=[STEPS * BATCH * workers, STEP_UNITS]).astype(np.float32)
    for number in range(-2, pairs):
        for update, model in models.items():
            began_s = time.monotonic()
            model.fit(x, x, batch_size=BATCH * workers, shuffle=False, verbose=0)
            strategies[update]._runtime.settle(ANSWER_S)
            if rank == 0 and number >= 0:
                step_ms = round((time.monotonic() - began_s) / STEPS * 1e3, 2)
                print(json.dumps({"update": update, "step_ms": step_ms}), flush=True)
    for strategy in strategies.values():
        strategy.close()
    sys.stdin.readline()


def _model(strategy: Json, units: int, layers: int) -> Json:
    import keras

    with strategy.scope():
        hidden = [keras.layers.Dense(units, use_bias=False) for _ in range(layers)]
        model = keras.Sequential([keras.layers.Input((units,)), *hidden])
        model.compile(keras.optimizers.Adam(1e-5), "mse", jit_compile=False)
    return model


if __name__ == "__main__":
    _parser = argparse.ArgumentParser()
    _parser.add_argument("what", choices=["memory", "steps"])
    _parser.add_argument("addresses", nargs="+")
    _parser.add_argument("--update", default="worker")
    _parser.add_argument("--pairs", type=int, default=1)
    _options = _parser.parse_args()
    if _options.what == "memory":
        _work_memory(_options.addresses, _options.update)
    else:
        _work_steps(_options.addresses, _options.pairs)
