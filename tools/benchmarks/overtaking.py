"""How long an urgent slice of 64 KiB takes behind bulk, on a host and its pserver with a link between them.

Through the real worker and pserver, in both directions: pushes and replies, as a capture of the job has them. Bulk is
pushed all the time; four times a second an urgent slice comes. Its time is from when it is wanted (pushed, or summed
up) to when it has arrived, over its own time on the wire. Beside it, how full the link was: payload in one direction,
over what TCP can carry at the link's rate. Needs root, for network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time

import numpy as np

from tfps.config import Transport
from tfps.types import Json
from tools import children
from tools.benchmarks.common import Outcome
from tools.netlab import Host, Netlab

RATES_MBIT = (100, 300, 1000)
TRANSPORTS = ("tcp", "grpc")
URGENT_BYTES, BULK_BYTES, BULK_BUCKETS = 64 * 1024, 4_000_000, 6
PAYLOAD_SHARE = 0.956  # of the wire, that TCP leaves for payload
EVERY_S, WARMUP_S, RUN_S = 0.25, 8.0, 8.0
ANSWER_S = 120.0


def run(quick: bool) -> Outcome:
    """Interleaves transports at each rate; medians over the rounds."""
    runs: list[dict[str, Json]] = []
    print(f"{'':12} {'Mbit/s':>7} {'push':>15} {'reply':>15} {'link':>6}")
    for _ in range(1 if quick else 3):
        for rate in RATES_MBIT:
            for transport in TRANSPORTS:
                result = measure(rate, transport)
                runs.append(result)
                ways = [f"{result[f'{way}_ms']:7.1f} ms {result[f'{way}_ratio']:4.1f}" for way in ("push", "reply")]
                print(f"{transport:12} {rate:7} {ways[0]:>15} {ways[1]:>15} {result['link']:6.2f}", flush=True)
    headline = {}
    for rate in RATES_MBIT:
        for transport in TRANSPORTS:
            of_kind = [each for each in runs if each["rate"] == rate and each["transport"] == transport]
            for figure in ("push_ratio", "reply_ratio", "link"):
                headline[f"{transport}_{rate}_{figure}"] = statistics.median(each[figure] for each in of_kind)
    return Outcome(headline, runs)


def measure(rate_mbit: float, transport: str) -> dict[str, Json]:
    """One run in fresh processes on two hosts."""
    with Netlab(2, rate_mbit) as lab, contextlib.ExitStack() as stack:
        here, there = lab.hosts
        serve = ["-m", "tfps.cli", f"--host={there.address}", "--port=0", "--workers=1", "--insecure"]
        server = stack.enter_context(_start(there, serve))
        address = children.answer(server, ANSWER_S).split()[3]
        worker = stack.enter_context(_start(here, [str(pathlib.Path(__file__)), address, transport]))
        result: dict[str, Json] = json.loads(children.answer(worker, ANSWER_S))
    own_s = URGENT_BYTES * 8 / (rate_mbit * 1e6 * PAYLOAD_SHARE)
    for way in ("push", "reply"):
        result[f"{way}_ratio"] = result[f"{way}_ms"] / 1e3 / own_s
    link = result["bytes_per_s"] * 8 / (rate_mbit * 1e6 * PAYLOAD_SHARE)
    return {**result, "rate": rate_mbit, "transport": transport, "link": link}


def _start(host: Host, arguments: list[str]) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    root = pathlib.Path(__file__).resolve().parents[2]
    process = host.popen(
        [sys.executable, "-u", *arguments],
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return children.ended(process)


def _work(address: str, transport: Transport) -> dict[str, Json]:
    """The worker: bulk all the time, urgent slices in between, a capture of the second half."""
    from tfps.config import Config
    from tfps.exchange.interface import BucketSpec, Reply
    from tfps.worker.worker import Worker

    worker = Worker([address], config=Config.from_environment(transport=transport, shared_memory=False))
    bulk = [BucketSpec((f"bulk{n}",), "sum", BULK_BYTES, "float32", 9) for n in range(BULK_BUCKETS)]
    *numbers, urgent = worker.declare([*bulk, BucketSpec(("urgent",), "sum", URGENT_BYTES, "float32", 0)])
    payload, urgent_payload = np.ones(BULK_BYTES // 4, np.float32), np.ones(URGENT_BYTES // 4, np.float32)
    stopping, left = threading.Event(), threading.Semaphore(0)
    replied = [0]

    def again(number: int) -> None:
        def take(reply: Reply) -> None:
            replied[0] += BULK_BYTES
            if reply.error is not None or stopping.is_set():
                left.release()
            else:
                worker.push(number, payload, take)

        worker.push(number, payload, take)

    for number in numbers:
        again(number)

    def beats(seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            arrived = threading.Event()
            worker.push(urgent, urgent_payload, lambda _, arrived=arrived: arrived.set())  # type: ignore[misc]
            arrived.wait(ANSWER_S)
            threading.Event().wait(EVERY_S)

    beats(WARMUP_S)
    worker.start_trace()
    bytes_then, then_s = replied[0], time.monotonic()
    beats(RUN_S)
    nbytes, seconds = replied[0] - bytes_then, time.monotonic() - then_s
    capture = worker.stop_trace([], "overtaking", (), {})
    stopping.set()
    for _ in numbers:
        left.acquire()
    slice_bytes = worker.slice_bytes
    worker.close()
    ways: dict[str, dict[tuple[int, int], int]] = {"push": {}, "reply": {}}
    kinds = {"queued": "push", "wire": "push", "reply_queued": "reply", "reply_wire": "reply"}
    for span in capture.spans:
        if span.bucket == urgent and span.kind in kinds:
            times, key = ways[kinds[span.kind]], (span.step, span.slice)
            times[key] = times.get(key, 0) + span.end_ns - span.begin_ns
    found = {f"{way}_ms": statistics.median(times.values()) / 1e6 for way, times in ways.items()}
    return {**found, "urgent": len(ways["push"]), "bytes_per_s": nbytes / seconds, "slice_bytes": slice_bytes}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("transport")
    options = parser.parse_args()
    print(json.dumps(_work(options.address, options.transport)), flush=True)
    sys.stdin.readline()  # stays until it is terminated


if __name__ == "__main__":
    main()
