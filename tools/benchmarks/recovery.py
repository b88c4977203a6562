"""What a lost worker costs the others, what a join does, and what is left of an hour with a death every minute.

All with `min_workers`. Losses: three workers and two pservers exchange 1 MB per step, 10 ms apart, without TensorFlow.
One is killed, or stopped as on a host that is silent, which counts as a loss after 5 s; how long the others' longest
step in the next second (if it is silent, 7 s) takes.
Joins: two workers in `fit`; one is killed and started again. How much longer than others the pause before the epoch is
at whose beginning it takes part, for the one that stays; variables are copied through the pservers.
Deaths: three workers in `fit`, of which one is killed every minute, in turn, and started again: with `min_workers`, and
without, where all are started again and go on from the last epoch that BackupAndRestore has saved. Steps that count.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import pathlib
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

from tfps.types import Json
from tools import children
from tools.benchmarks.common import Outcome, median

LOSSES = {"worker": (2, signal.SIGKILL), "rank0": (0, signal.SIGKILL), "silent": (2, signal.SIGSTOP)}
SIZES_MB = (50, 500)
LAYERS, BATCH = 4, 12
JOIN_EPOCH_MB = 2000  # of variables in the steps of an epoch: a join opens the data once for each epoch that is over
DEATH_UNITS, DEATH_STEPS, EVERY_S = 1024, 40, 60.0
ANSWER_S = 600.0
_TICK = threading.Event()
_TIME = struct.Struct("<IId")  # epoch, batch, when it ended


def run(quick: bool) -> Outcome:
    """Medians of losses and joins; one run of deaths each with and without going on."""
    runs: list[dict[str, Json]] = []
    headline: dict[str, float] = {}
    for what, (rank, how) in LOSSES.items():
        found = [_loss(what, rank, how) for _ in range(1 if quick else 9)]
        runs += found
        headline[f"{what}_lost_s"] = median(found, "longest_s")
    for size_mb in SIZES_MB:
        found = _joins(size_mb, 1 if quick else 5)
        runs += found
        headline[f"join_{size_mb}mb_s"] = median(found, "join_s")
    for kind in ("undisturbed", "goes_on", "restarts"):
        found = [_deaths(kind, 60.0 if quick else 300.0)]
        runs += found
        headline[f"{kind}_steps_per_h"] = found[0]["steps_per_h"]
    for kind in ("goes_on", "restarts"):
        headline[f"{kind}_ratio"] = headline[f"{kind}_steps_per_h"] / headline["undisturbed_steps_per_h"]
    return Outcome(headline, runs)


def _until(done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + ANSWER_S
    while not done():
        if time.monotonic() > end_s:
            raise RuntimeError("what the benchmark waits for did not happen")
        _TICK.wait(0.01)


def _note(found: dict[str, Json]) -> dict[str, Json]:
    print(" ".join(f"{key}={value}" for key, value in found.items()), flush=True)
    return found


class _Job:
    """Two pservers and workers, each of which runs this file."""

    def __init__(self, stack: contextlib.ExitStack, workers: int, work: Sequence[str], **more: str) -> None:
        self._stack, self._work, self._more, self._workers = stack, work, more, workers
        serve = ["-m", "tfps.pserver.cli", "--port=0", f"--workers={workers}", "--quiet"]
        servers = [stack.enter_context(children.python(serve, stderr=subprocess.DEVNULL)) for _ in range(2)]
        self._pservers = ",".join(children.answer(each, ANSWER_S).split()[3] for each in servers)
        self.folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(workers):
            self.processes.append(self._new(rank))

    def _new(self, rank: int) -> subprocess.Popen[str]:
        environment = {
            "TFPS_PSERVERS": self._pservers,
            "TFPS_RANK": str(rank),
            "TFPS_WORKERS": str(self._workers),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            **self._more,
        }
        work = [str(pathlib.Path(__file__)), *self._work, str(self.folder)]
        return self._stack.enter_context(_killed(children.python(work, environment, stderr=subprocess.DEVNULL)))

    def start_again(self, rank: int) -> None:
        self.processes[rank] = self._new(rank)

    def end(self, rank: int, how: int = signal.SIGKILL) -> float:
        """Sends a signal; returns when."""
        self.processes[rank].send_signal(how)
        if how == signal.SIGKILL:
            self.processes[rank].wait(ANSWER_S)
        return time.monotonic()

    def times(self, rank: int) -> list[tuple[int, int, float]]:
        """Epoch, batch and end of all steps that the processes of a rank have taken."""
        with contextlib.suppress(FileNotFoundError):
            data = (self.folder / f"{rank}.times").read_bytes()
            return list(_TIME.iter_unpack(data[: len(data) // _TIME.size * _TIME.size]))
        return []


@contextlib.contextmanager
def _killed(context: contextlib.AbstractContextManager[subprocess.Popen[str]]):  # type: ignore[no-untyped-def]
    """A process that may be stopped, and need not end by itself."""
    with context as process:
        try:
            yield process
        finally:
            process.kill()


def _loss(what: str, rank: int, how: int) -> dict[str, Json]:
    with contextlib.ExitStack() as stack:
        job = _Job(stack, 3, ["exchange"])
        _until(lambda: all(len(job.times(each)) > 100 for each in range(3)))
        ended_s = job.end(rank, how)
        others = [each for each in range(3) if each != rank]
        last_s = ended_s + (1.0 if how == signal.SIGKILL else 7.0)
        _until(lambda: all(job.times(each)[-1][2] > last_s for each in others))
        longest = []
        for each in others:
            ends = [end for _, _, end in job.times(each)]
            longest.append(max(b - a for a, b in itertools.pairwise(ends) if ended_s < b < last_s))
        return _note({"what": "loss", "which": what, "longest_s": round(max(longest), 3)})


def _pauses(times: Sequence[tuple[int, int, float]]) -> dict[int, float]:
    """By epoch: the time from the last step before it to its first one."""
    return {
        later[0]: later[2] - earlier[2] for earlier, later in itertools.pairwise(times) if later[0] == earlier[0] + 1
    }


def _joins(size_mb: int, count: int) -> list[dict[str, Json]]:
    with contextlib.ExitStack() as stack:
        units = int((size_mb * 1e6 / 4 / LAYERS) ** 0.5)
        steps = JOIN_EPOCH_MB // size_mb
        work = ["fit", "--units", str(units), "--steps", str(steps)]
        job = _Job(stack, 2, work, TFPS_MIN_WORKERS="1", TFPS_STEP_TIMEOUT_S="300")
        found: list[dict[str, Json]] = []
        _until(lambda: len(_pauses(job.times(0))) >= 2)
        for _ in range(count):
            job.end(1)
            before = len(job.times(1))
            job.start_again(1)
            _until(lambda start=before: len(job.times(1)) > start + steps)  # type: ignore[misc]
            epoch = job.times(1)[before][0]
            _until(lambda start=epoch: start + 1 in _pauses(job.times(0)))  # type: ignore[misc]
            pauses = _pauses(job.times(0))
            usual_s = statistics.median(pause for number, pause in pauses.items() if number not in (1, epoch))
            one = {"what": "join", "mb": size_mb, "join_s": round(pauses[epoch] - usual_s, 3)}
            found.append(_note({**one, "usual_s": round(usual_s, 3)}))
        return found


def _deaths(kind: str, window_s: float) -> dict[str, Json]:
    with contextlib.ExitStack() as stack:
        work = ["fit", "--units", str(DEATH_UNITS), "--steps", str(DEATH_STEPS)]
        more = {"TFPS_MIN_WORKERS": "1"}
        if kind == "restarts":
            work, more = [*work, "--backup"], {}
        job = _Job(stack, 3, work, **more)
        _until(lambda: all(len(job.times(rank)) > DEATH_STEPS for rank in range(3)))
        began_s, deaths = time.monotonic(), 0
        first = max(job.times(rank)[-1][:2] for rank in range(3))
        while (left_s := began_s + window_s - time.monotonic()) > 0:
            next_s = began_s + EVERY_S * (deaths + 0.5) - time.monotonic()
            if kind == "undisturbed" or next_s > left_s:
                _TICK.wait(left_s)
                break
            _TICK.wait(max(next_s, 0.0))
            rank, deaths = deaths % 3, deaths + 1
            job.end(rank)
            if kind == "goes_on":
                job.start_again(rank)
                continue
            for other in range(3):  # they end by themselves; what starts them again is not what is measured
                job.end(other)
            for other in range(3):
                job.start_again(other)
        last = max(entry[:2] for rank in range(3) for entry in job.times(rank))
        steps = (last[0] - first[0]) * DEATH_STEPS + last[1] - first[1]
        took_s = time.monotonic() - began_s
        found = {"what": "deaths", "kind": kind, "deaths": deaths, "steps": steps, "window_s": round(took_s, 1)}
        return _note({**found, "steps_per_h": round(steps / took_s * 3600)})


def _work_exchange(folder: str) -> None:
    import numpy as np

    from tfps.config import Config
    from tfps.exchange.interface import BucketSpec, Reply
    from tfps.worker.worker import Worker

    rank = int(os.environ["TFPS_RANK"])
    worker = Worker(os.environ["TFPS_PSERVERS"].split(","), rank=rank, config=Config(min_workers=1))
    (bucket,) = worker.declare([BucketSpec(("gradient",), "sum", 1_000_000, "float32", 0)])
    payload = np.ones(250_000, np.float32)
    with pathlib.Path(folder, f"{rank}.times").open("ab", buffering=0) as times:
        for step in range(2**31):
            replied = threading.Event()

            def note(reply: Reply, replied: threading.Event = replied) -> None:
                replied.set()

            worker.push(bucket, payload, note)
            replied.wait()
            times.write(_TIME.pack(0, step, time.monotonic()))
            _TICK.wait(0.01)


def _work_fit(folder: str, units: int, steps: int, backup: bool) -> None:
    import keras
    import numpy as np
    import tensorflow as tf

    import tfps

    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tfps.Strategy()
    with strategy.scope():
        hidden = [keras.layers.Dense(units, use_bias=False) for _ in range(LAYERS)]
        model = keras.Sequential([keras.layers.Input((units,)), *hidden])
        model.compile(keras.optimizers.SGD(1e-6), "mse", jit_compile=False)
    x = np.random.default_rng(0).normal(size=[BATCH, units]).astype(np.float32)
    data = tf.data.Dataset.from_tensors((x, x)).repeat(steps)

    class Times(keras.callbacks.Callback):
        def on_train_begin(self, logs: Json = None) -> None:
            path = pathlib.Path(folder, f"{os.environ['TFPS_RANK']}.times")
            self.file = path.open("ab", buffering=0)

        def on_epoch_begin(self, epoch: int, logs: Json = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Json = None) -> None:
            self.file.write(_TIME.pack(self.epoch, batch, time.monotonic()))

    callbacks = [Times()]
    if backup:
        callbacks.append(keras.callbacks.BackupAndRestore(pathlib.Path(folder, "backup")))
    model.fit(data, epochs=10**6, verbose=0, callbacks=callbacks)


if __name__ == "__main__":
    _parser = argparse.ArgumentParser()
    _parser.add_argument("what", choices=["exchange", "fit"])
    _parser.add_argument("folder")
    _parser.add_argument("--units", type=int, default=0)
    _parser.add_argument("--steps", type=int, default=0)
    _parser.add_argument("--backup", action="store_true")
    _options = _parser.parse_args()
    if _options.what == "exchange":
        _work_exchange(_options.folder)
    else:
        _work_fit(_options.folder, _options.units, _options.steps, _options.backup)
    sys.exit(0)
