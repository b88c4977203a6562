"""How long an urgent slice of 64 KiB takes behind bulk, on a host and its pserver with a link between them.

Through the real worker and pserver, in both directions: pushes and replies, as a capture of the job has them. Bulk is
pushed all the time; four times a second an urgent slice comes. Its time is from when it is wanted (pushed, or summed
up) to when it has arrived, over its own time on the wire. Beside it, how full the link was: payload of the emptier
direction, over that of plain blocking sockets that send in both directions on the same link (row "raw"), whose own
figure is over the link's rate. Needs root, for network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import socket
import statistics
import sys
import threading
import time

import numpy as np

from tfps.config import Transport
from tfps.types import Json
from tools import children
from tools.benchmarks.common import Outcome
from tools.netlab import Netlab

RATES_MBIT = (100, 300, 1000)
TRANSPORTS = ("tcp", "grpc")
URGENT_BYTES, BULK_BYTES, BULK_BUCKETS = 64 * 1024, 4_000_000, 6
ECHO_BYTES = 2**20  # of a block of the raw sockets
PAYLOAD_SHARE = 0.956  # of the wire, that TCP leaves for payload
EVERY_S, WARMUP_S, RUN_S, RAW_S = 0.25, 8.0, 8.0, 6.0
ANSWER_S = 120.0
_ME = str(pathlib.Path(__file__))


def run(quick: bool) -> Outcome:
    """Interleaves transports at each rate; medians over the rounds."""
    runs: list[dict[str, Json]] = []
    print(f"{'':12} {'Mbit/s':>7} {'push':>15} {'reply':>15} {'link':>6}")
    for _ in range(1 if quick else 3):
        for rate in RATES_MBIT:
            raw = measure_raw(rate)
            runs.append({"rate": rate, "transport": "raw", "link": raw / _payload_per_s(rate)})
            print(f"{'raw':12} {rate:7} {'':15} {'':15} {runs[-1]['link']:6.2f}", flush=True)
            for transport in TRANSPORTS:
                result = measure(rate, transport, raw)
                runs.append(result)
                ways = [f"{result[f'{way}_ms']:7.1f} ms {result[f'{way}_ratio']:4.1f}" for way in ("push", "reply")]
                print(f"{transport:12} {rate:7} {ways[0]:>15} {ways[1]:>15} {result['link']:6.2f}", flush=True)
    headline = {}
    for rate in RATES_MBIT:
        for transport in ("raw", *TRANSPORTS):
            of_kind = [each for each in runs if each["rate"] == rate and each["transport"] == transport]
            for figure in ("link",) if transport == "raw" else ("push_ratio", "reply_ratio", "link"):
                headline[f"{transport}_{rate}_{figure}"] = statistics.median(each[figure] for each in of_kind)
    return Outcome(headline, runs)


def _payload_per_s(rate_mbit: float) -> float:
    """Bytes that the link can carry in one direction while the other is idle."""
    return rate_mbit * 1e6 / 8 * PAYLOAD_SHARE


def measure(rate_mbit: float, transport: str, raw_bytes_per_s: float) -> dict[str, Json]:
    """One run in fresh processes on two hosts; `raw_bytes_per_s` is what plain sockets carry per direction."""
    with Netlab(2, rate_mbit) as lab, contextlib.ExitStack() as stack:
        here, there = lab.hosts
        serve = ["-m", "tfps.pserver.cli", f"--host={there.address}", "--port=0", "--workers=1", "--insecure"]
        server = stack.enter_context(children.python(serve, popen=there.popen))
        address = children.answer(server, ANSWER_S).split()[3]
        worker = stack.enter_context(children.python([_ME, address, transport], popen=here.popen))
        result: dict[str, Json] = json.loads(children.answer(worker, ANSWER_S))
    own_s = URGENT_BYTES / _payload_per_s(rate_mbit)
    for way in ("push", "reply"):
        result[f"{way}_ratio"] = result[f"{way}_ms"] / 1e3 / own_s
    return {**result, "rate": rate_mbit, "transport": transport, "link": result["bytes_per_s"] / raw_bytes_per_s}


def measure_raw(rate_mbit: float) -> float:
    """Bytes per second of the emptier direction, of plain sockets that send all the time in both."""
    with Netlab(2, rate_mbit) as lab, contextlib.ExitStack() as stack:
        here, there = lab.hosts
        server = stack.enter_context(children.python([_ME, there.address, "raw-listen"], popen=there.popen))
        address = children.answer(server, ANSWER_S).strip()
        client = stack.enter_context(children.python([_ME, address, "raw"], popen=here.popen))
        ends = [float(children.answer(each, ANSWER_S)) for each in (server, client)]
    return min(ends)


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

    def again(number: int) -> None:
        def take(reply: Reply) -> None:
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
    worker.captures.start()
    (queue,) = worker._queues
    then, then_s = queue.load, time.monotonic()
    beats(RUN_S)
    load, seconds = queue.load, time.monotonic() - then_s
    pushed = load.sent_bytes - load.in_flight_bytes - then.sent_bytes + then.in_flight_bytes
    nbytes = min(pushed, load.received_bytes - then.received_bytes)
    capture = worker.captures.stop([], "overtaking", (), {})
    stopping.set()
    for _ in numbers:
        left.acquire()
    slice_bytes = worker.info.slice_bytes
    worker.close()
    ways: dict[str, dict[tuple[int, int], int]] = {"push": {}, "reply": {}}
    kinds = {"queued": "push", "wire": "push", "reply_queued": "reply", "reply_wire": "reply"}
    for span in capture.spans:
        if span.bucket == urgent and span.kind in kinds:
            times, key = ways[kinds[span.kind]], (span.step, span.slice)
            times[key] = times.get(key, 0) + span.end_ns - span.begin_ns
    found = {f"{way}_ms": statistics.median(times.values()) / 1e6 for way, times in ways.items()}
    for kind in kinds:  # the two parts of each time
        each = [(s.end_ns - s.begin_ns) / 1e6 for s in capture.spans if s.bucket == urgent and s.kind == kind]
        found[f"{kind}_ms"] = statistics.median(each)
    return {**found, "urgent": len(ways["push"]), "bytes_per_s": nbytes / seconds, "slice_bytes": slice_bytes}


def _raw(address: str, *, listens: bool) -> float:
    """Sends and receives all the time; bytes received per second."""
    if listens:
        listener = socket.create_server((address, 0))
        print(f"{address}:{listener.getsockname()[1]}", flush=True)
        connection, _ = listener.accept()
    else:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)))

    def send() -> None:
        block = bytes(ECHO_BYTES)
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(block)

    threading.Thread(target=send, daemon=True).start()
    buffer = bytearray(ECHO_BYTES)

    def received(seconds: float) -> float:
        nbytes, began_s = 0, time.monotonic()
        while (passed_s := time.monotonic() - began_s) < seconds:
            nbytes += connection.recv_into(buffer)
        return nbytes / passed_s

    received(RAW_S)
    rate = received(RAW_S)
    received(RAW_S / 2)  # the other end may still measure
    return rate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("transport")
    options = parser.parse_args()
    if options.transport in ("raw", "raw-listen"):
        print(_raw(options.address, listens=options.transport == "raw-listen"), flush=True)
        sys.stdin.readline()
        return
    print(json.dumps(_work(options.address, options.transport)), flush=True)
    sys.stdin.readline()  # stays until it is terminated


if __name__ == "__main__":
    main()
