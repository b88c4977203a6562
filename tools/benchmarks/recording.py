"""What it costs to record a capture: steps of 2 workers and 2 pservers with recording on and off, without TensorFlow.

All in one process and with nothing to compute meanwhile, so that whatever is added to a slice shows in full. Steps with
and without alternate; ratios are medians over pairs. Beginning, ending and collecting a capture are not in them.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tfps.config import Config
from tfps.exchange.interface import BucketSpec
from tfps.pserver.server import ParameterServer
from tfps.trace.recorder import Recorder
from tfps.types import Json
from tfps.worker.worker import Worker
from tools.benchmarks.common import Outcome, median

SIZES = {32 * 1024: 4 * 2**20, 2**20: 32 * 2**20}  # of slices -> of a step
BUCKETS = 8


class _Job:
    def __init__(self, stack: contextlib.ExitStack, slice_bytes: int, step_bytes: int) -> None:
        config = Config(slice_bytes=slice_bytes, window_bytes=4 * slice_bytes)
        addresses = []
        self._recorders = [Recorder() for _ in range(4)]
        for recorder in self._recorders[2:]:
            server = ParameterServer("127.0.0.1", 0, workers=2, recorder=recorder)
            stack.callback(server.stop)
            addresses.append(server.address)
        with ThreadPoolExecutor(2) as pool:
            make = lambda rank: Worker(addresses, rank=rank, config=config, recorder=self._recorders[rank])  # noqa: E731
            self._workers = list(pool.map(make, range(2)))
            specs = [BucketSpec((f"b{i}",), "sum", step_bytes // BUCKETS, "float32", i) for i in range(BUCKETS)]
            (self._buckets, _) = pool.map(lambda worker: worker.declare(specs), self._workers)
        for worker in self._workers:
            stack.callback(worker.close)
        self._payload = np.ones(step_bytes // BUCKETS // 4, np.float32)

    def step(self, recorded: bool) -> tuple[float, float]:
        """One step, seconds and CPU seconds."""
        for recorder in self._recorders:
            if recorded:
                recorder.start()
            else:
                recorder.stop()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        left = threading.Semaphore(0)
        for worker in self._workers:
            for bucket in reversed(self._buckets):  # as backward makes them
                worker.push(bucket, self._payload, lambda _: left.release())
        for _ in range(2 * BUCKETS):
            left.acquire()
        return time.perf_counter() - wall_s, time.process_time() - cpu_s


def run(quick: bool) -> Outcome:
    """Ratios with recording on to off, for small slices and for large ones."""
    pairs = 100 if quick else 400
    runs: list[dict[str, Json]] = []
    headline: dict[str, float] = {}
    for slice_bytes, step_bytes in SIZES.items():
        with contextlib.ExitStack() as stack:
            job = _Job(stack, slice_bytes, step_bytes)
            for _ in range(5):
                job.step(True)
            own: list[dict[str, Json]] = []
            for number in range(pairs):
                found = {recorded: job.step(recorded) for recorded in ((False, True), (True, False))[number % 2]}
                own.append(
                    {
                        "slice_bytes": slice_bytes,
                        "off_step_s": found[False][0],
                        "on_step_s": found[True][0],
                        "step_ratio": found[True][0] / found[False][0],
                        "cpu_ratio": found[True][1] / found[False][1],
                    }
                )
        runs += own
        name = f"{slice_bytes // 1024}k"
        spread = statistics.quantiles([one["cpu_ratio"] for one in own], n=4)
        headline |= {
            f"{name}_off_ms": median(own, "off_step_s") * 1e3,
            f"{name}_on_ms": median(own, "on_step_s") * 1e3,
            f"{name}_step_ratio": median(own, "step_ratio"),
            f"{name}_cpu_ratio": median(own, "cpu_ratio"),
        }
        print(
            f"slices of {slice_bytes // 1024} KiB: step {headline[f'{name}_off_ms']:.1f} ms, recorded "
            f"{headline[f'{name}_step_ratio']:.3f} times as long, {headline[f'{name}_cpu_ratio']:.3f} times the CPU "
            f"(quartiles {spread[0]:.3f} to {spread[2]:.3f})",
            flush=True,
        )
    return Outcome(headline, runs)
