"""What a flood of strangers does to the steps of a running job. What TLS costs is in `wire`.

The job: 2 workers and a pserver with a job token, each a process of this host, over its sockets. A step computes for
20 ms (sleeps) and exchanges 4 MB. The flood: 200 strangers, threads of processes of their own, that open data
connections and say nothing or nonsense, and make calls without the token, as fast as they are answered. It is stopped
and continued, so that undisturbed and disturbed steps alternate; the ratio is the median over such pairs. Strangers run
at the lowest priority (nice 19): they would be elsewhere, and their own computing is not what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

from tfps.types import Json
from tools import children
from tools.benchmarks.common import Outcome, median

STRANGERS, PROCESSES = 200, 4
COMPUTE_S, STEP_BYTES, BUCKETS = 0.02, 4_000_000, 4
STEPS = 15  # of one half of a pair
ANSWER_S = 120.0


def run(quick: bool) -> Outcome:
    """Medians over pairs of undisturbed and disturbed steps."""
    runs = _flood(6 if quick else 30)
    ratios = [one["ratio"] for one in runs]
    low, _, high = statistics.quantiles(ratios, n=4)
    headline = {
        "quiet_ms": median(runs, "quiet_s") * 1e3,
        "flood_ms": median(runs, "flood_s") * 1e3,
        "ratio": median(runs, "ratio"),
        "ratio_low": low,
        "ratio_high": high,
        "refused_per_s": median(runs, "refused_per_s"),
        "quiet_cpu": median(runs, "quiet_cpu"),
        "flood_cpu": median(runs, "flood_cpu"),
    }
    print(
        f"steps of {headline['quiet_ms']:.1f} ms take {headline['ratio']:.3f} times as long (quartiles {low:.3f} to "
        f"{high:.3f}) while {STRANGERS} strangers get {headline['refused_per_s']:.0f} refusals a second",
        flush=True,
    )
    return Outcome(headline, runs)


def _flood(pairs: int) -> list[dict[str, Json]]:
    with contextlib.ExitStack() as stack:
        token = stack.enter_context(tempfile.NamedTemporaryFile("w"))
        token.write(secrets.token_hex(32))
        token.flush()
        serve = [
            "-m",
            "tfps.pserver.cli",
            "--host=127.0.0.1",
            "--port=0",
            "--workers=2",
            "--data-port",
            str(_free_port()),
        ]
        server = stack.enter_context(children.python([*serve, "--token-file", token.name], stderr=subprocess.DEVNULL))
        address = children.answer(server, ANSWER_S).split()[3]
        workers = [
            stack.enter_context(
                children.python(
                    [_ME, "work", address, str(COMPUTE_S), str(STEP_BYTES)],
                    {"TFPS_TOKEN_FILE": token.name},
                    stderr=subprocess.DEVNULL,
                )
            )
            for _ in range(2)
        ]
        for worker in workers:
            children.answer(worker, ANSWER_S)
        flood = [
            stack.enter_context(children.python([_ME, "flood", address, serve[-1]], stderr=subprocess.DEVNULL))
            for _ in range(PROCESSES)
        ]
        stack.callback(_signal, flood, signal.SIGCONT)  # else they could not be ended
        for each in flood:
            children.answer(each, ANSWER_S)
        _signal(flood, signal.SIGSTOP)
        runs = []
        for number in range(pairs + 1):
            found: dict[bool, float] = {}
            figures: dict[str, float] = {}
            for disturbed in ((False, True), (True, False))[number % 2]:
                if disturbed:
                    _signal(flood, signal.SIGCONT)
                    time.sleep(0.5)  # their connections are there again
                refused, cpu_s, then_s = _refused(address, token.name), children.cpu_s(server.pid), time.monotonic()
                for worker in workers:
                    children.tell(worker, str(STEPS))
                found[disturbed] = max(json.loads(children.answer(worker, ANSWER_S))["step_s"] for worker in workers)
                took_s = time.monotonic() - then_s
                figures["flood_cpu" if disturbed else "quiet_cpu"] = (children.cpu_s(server.pid) - cpu_s) / took_s
                if disturbed:
                    figures["refused_per_s"] = (_refused(address, token.name) - refused) / took_s
                    _signal(flood, signal.SIGSTOP)
                    time.sleep(0.2)
            if number:  # the first is for warming up
                quiet_s, flood_s = found[False], found[True]
                runs.append({"quiet_s": quiet_s, "flood_s": flood_s, "ratio": flood_s / quiet_s, **figures})
        return runs


def _refused(address: str, token_file: str) -> int:
    """How many calls and connections the pserver has refused."""
    from tfps.config import Security
    from tfps.pserver.console import Watcher

    watcher = Watcher(address, Security(token_file=token_file))
    try:
        look = watcher.look(0.0)
    finally:
        watcher.close()
    return 0 if look is None else sum(count.count for count in look.now.errors)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _signal(processes: list[subprocess.Popen[str]], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


# The processes

_ME = str(pathlib.Path(__file__))


def _work(address: str, compute_s: float, step_bytes: int) -> None:
    """A worker: as many steps as it is told, and how long they took."""
    from tfps.config import Config
    from tfps.exchange.interface import BucketSpec
    from tfps.worker.worker import Worker

    worker = Worker([address], config=Config.from_environment(shared_memory=False))
    sizes = [step_bytes // BUCKETS] * BUCKETS
    buckets = worker.declare([BucketSpec((f"b{i}",), "sum", size, "float32", i) for i, size in enumerate(sizes)])
    payload = np.ones(step_bytes // BUCKETS // 4, np.float32)

    def step() -> float:
        then_s = time.perf_counter()
        time.sleep(compute_s)
        left = threading.Semaphore(0)
        for bucket in reversed(buckets):  # as backward makes them
            worker.push(bucket, payload, lambda _: left.release())
        for _ in buckets:
            left.acquire()
        return time.perf_counter() - then_s

    for _ in range(25):  # in which it tunes itself
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        times = [step() for _ in range(int(line))]
        print(json.dumps({"step_s": statistics.mean(times)}), flush=True)


def _flooding(address: str, data_port: int) -> None:
    """Strangers: half of them call, half of them connect."""
    import grpc

    from tfps.wire.control import CHANNEL_OPTIONS, method

    os.nice(19)
    host = address.rpartition(":")[0]

    def call(number: int) -> None:
        with grpc.insecure_channel(address, CHANNEL_OPTIONS) as channel:
            ask = channel.unary_unary(method(("Status", "Join", "Declare")[number % 3]))
            while True:
                with contextlib.suppress(grpc.RpcError):
                    ask(bytes(1000), timeout=5)

    def connect(number: int) -> None:
        while True:
            with contextlib.suppress(OSError), socket.create_connection((host, data_port), 5) as connected:
                if number % 2:
                    connected.sendall(b"tfps\x02\x00" + bytes(300))
                connected.recv(1000)

    for number in range(STRANGERS // PROCESSES):
        target = call if number % 2 else connect
        threading.Thread(target=target, args=(number // 2,), name=f"tfps-stranger-{number}", daemon=True).start()
    print("ready", flush=True)
    sys.stdin.readline()  # stays until it is terminated


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["work", "flood"])
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    first, *rest = options.arguments
    if options.role == "work":
        _work(first, float(rest[0]), int(rest[1]))
    else:
        _flooding(first, int(rest[0]))


if __name__ == "__main__":
    _main()
