"""Push-pull of 50 MB per step between 2 workers and 1 or 2 pservers on one host, without TensorFlow.

As it is by default, through shared memory, and through sockets on loopback (`TFPS_SHARED_MEMORY=0`), as to another
host with an unlimited network: over data connections, with the slices that tuning chooses and with slices of 64 KiB;
over gRPC; and over gRPC with TLS.

Beside it, in the same run and interleaved: 2 clients that echo the same bytes in equal slices off one process through
raw sockets, which is what loopback and Python give at best. An echo answers from the processor's cache and waits for
nobody: "raw + sums" is a process that reads a message of each of both clients, adds them and sends the sum to both,
without headers, priorities, or a bound on what is under way: the floor for parameter servers on sockets and Python,
with messages of 1 MiB and of 64 KiB. GB/s per worker are bytes pushed per worker and second; CPU s/GB are of all
processes together, per byte pushed by all workers. Two further rows are gRPC alone: the same echo over bare
bidirectional streams; and the same with the passes over memory that a sum needs (a client copies a gradient into its
message and the answer out of it, the server adds every second message to another and copies the sum into bytes, the
only thing that gRPC for Python sends): the floor for anything built on gRPC for Python.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from tfps.types import Buffer, Json
from tools import children
from tools.benchmarks.common import Outcome, median
from tools.certificates import Authority

STEP_BYTES = 50_000_000
BUCKET_BYTES = 4_000_000  # a model's buckets: some of one slice, most of several
ECHO_BYTES, ECHO_WINDOW = 2**20, 4  # messages of the echoes, and how many are on the way
WARMUP_STEPS = 15  # in which tfps tunes itself
WORKERS = 2
ANSWER_S = 300.0


class Row(NamedTuple):
    """What is measured; `key` is in the names of figures, `settings` are variables for the workers."""

    key: str
    name: str
    role: str
    servers: int = 1
    settings: Mapping[str, str] = MappingProxyType({})
    tls: bool = False
    message_bytes: int = ECHO_BYTES  # of raw rows


SOCKETS, SMALL = {"TFPS_SHARED_MEMORY": "0"}, {"TFPS_SLICE_BYTES": "65536", "TFPS_WINDOW_BYTES": "524288"}
ROWS = (
    Row("raw", "raw", "raw"),
    Row("raw_sums", "raw + sums", "raw-sum"),
    Row("raw_sums_64k", "raw + sums, 64 KiB", "raw-sum", message_bytes=65536),
    Row("grpc", "bare gRPC", "grpc"),
    Row("floor", "gRPC + sums", "grpc-sum"),
    Row("p1", "1 pserver", "work"),
    Row("p2", "2 pservers", "work", servers=2),
    Row("p1_sockets", "1 pserver, sockets", "work", settings=SOCKETS),
    Row("p2_sockets", "2 pservers, sockets", "work", servers=2, settings=SOCKETS),
    Row("p1_sockets_64k", "1 pserver, sockets, slices of 64 KiB", "work", settings=SOCKETS | SMALL),
    Row("p1_grpc", "1 pserver, gRPC", "work", settings=SOCKETS | {"TFPS_TRANSPORT": "grpc"}),
    Row("p1_tls", "1 pserver, gRPC with TLS", "work", settings=SOCKETS, tls=True),
)


def run(quick: bool) -> Outcome:
    """Interleaves all rows; medians over the rounds."""
    rounds, steps = (3, 20) if quick else (7, 40)
    runs: list[dict[str, Json]] = []
    print(f"{'':36} {'GB/s per worker':>16} {'CPU s/GB':>9}")
    for number in range(rounds):
        for row in ROWS:
            result = measure(row, steps) | {"round": number, "what": row.name}
            runs.append(result)
            print(f"{row.name:36} {result['gb_per_s']:16.3f} {result['cpu_s_per_gb']:9.2f}", flush=True)
    headline = {}
    for key, of_kind in ((row.key, [r for r in runs if r["what"] == row.name]) for row in ROWS):
        headline[f"{key}_gb_per_s"] = median(of_kind, "gb_per_s")
        headline[f"{key}_cpu_s_per_gb"] = median(of_kind, "cpu_s_per_gb")
    return Outcome(headline, runs)


def measure(row: Row, steps: int) -> dict[str, Json]:
    """One run in fresh processes; `row.role` is what the workers do: "work" with pservers, the others with an echo."""
    with contextlib.ExitStack() as stack:
        script = str(pathlib.Path(__file__))
        settings = dict(row.settings)
        if row.role == "work":
            serve = ["-m", "tfps.pserver.cli", "--host=127.0.0.1", "--port=0", f"--workers={WORKERS}"]
        else:
            serve = [script, f"{row.role}-echo", "--message-bytes", str(row.message_bytes)]
        if row.tls:
            authority = Authority(pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())))
            own = authority.sign("pserver")
            serve += ["--tls-cert", own.cert, "--tls-key", own.key]
            settings["TFPS_TLS_CA"] = authority.file
        servers = [stack.enter_context(children.python(serve)) for _ in range(row.servers)]
        addresses = [_line(server).split()[3] for server in servers]
        work = [script, row.role, *addresses, "--steps", str(steps), "--message-bytes", str(row.message_bytes)]
        workers = [stack.enter_context(children.python(work, settings)) for _ in range(WORKERS)]
        for worker in workers:
            _line(worker)  # ready: connected and warm
        before = [children.cpu_s(server.pid) for server in servers]
        for worker in workers:
            children.tell(worker, "go")
        results = [json.loads(_line(worker)) for worker in workers]
        server_cpu_s = sum(children.cpu_s(s.pid) - b for s, b in zip(servers, before, strict=True))
    wall_s = max(result["wall_s"] for result in results)
    worker_cpu_s = sum(result["cpu_s"] for result in results)
    gigabytes = steps * STEP_BYTES / 1e9
    return {
        "gb_per_s": gigabytes / wall_s,
        "cpu_s_per_gb": (server_cpu_s + worker_cpu_s) / (gigabytes * WORKERS),
        "pserver_cpu_s_per_gb": server_cpu_s / (gigabytes * WORKERS),
        "worker_cpu_s_per_gb": worker_cpu_s / (gigabytes * WORKERS),
    }


def _line(process: subprocess.Popen[str]) -> str:
    return children.answer(process, ANSWER_S)


# The processes


def _timed(step: Callable[[], object], steps: int) -> None:
    """Warms up, waits for the others, runs and reports."""
    for _ in range(WARMUP_STEPS):
        step()
    print("ready", flush=True)
    sys.stdin.readline()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    result = {"wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s}
    print(json.dumps(result), flush=True)
    sys.stdin.readline()  # stays until it is terminated, so that nobody is lost while others still work


def _work(addresses: list[str], steps: int) -> None:
    from tfps.config import Config
    from tfps.exchange.interface import BucketSpec, Reply
    from tfps.worker.worker import Worker

    sizes = [min(BUCKET_BYTES, STEP_BYTES - start) for start in range(0, STEP_BYTES, BUCKET_BYTES)]
    worker = Worker(addresses, config=Config.from_environment())
    buckets = worker.declare([BucketSpec((f"b{i}",), "sum", size, "float32", i) for i, size in enumerate(sizes)])
    payloads = [np.ones(size // 4, np.float32) for size in sizes]

    def step() -> None:
        left = threading.Semaphore(0)

        def take(reply: Reply) -> None:
            if reply.error is not None:
                print(reply.error, file=sys.stderr)
                os._exit(1)
            left.release()

        for bucket, payload in reversed(list(zip(buckets, payloads, strict=True))):  # as backward makes them
            worker.push(bucket, payload, take)
        for _ in buckets:
            left.acquire()

    _timed(step, steps)
    worker.close()


def _raw(address: str, steps: int, message_bytes: int) -> None:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    payload, result = memoryview(b"\1" * STEP_BYTES), memoryview(bytearray(STEP_BYTES))  # no page of zeros

    def send() -> None:
        for start in range(0, STEP_BYTES, message_bytes):
            connection.sendall(payload[start : start + message_bytes])

    def step() -> None:
        sender = threading.Thread(target=send)
        sender.start()
        for start in range(0, STEP_BYTES, message_bytes):
            _fill(connection, result[start : start + message_bytes])
        sender.join()

    _timed(step, steps)


def _grpc(address: str, steps: int, sums: bool) -> None:
    import grpc

    from tfps.malloc import tune_malloc
    from tfps.wire.control import CHANNEL_OPTIONS

    tune_malloc()
    window = threading.Semaphore(ECHO_WINDOW)
    starts = range(0, STEP_BYTES, ECHO_BYTES)
    if sums:
        gradient, result = memoryview(b"\1" * STEP_BYTES), np.empty(STEP_BYTES, np.uint8)
        slices: list[Buffer] = [gradient[start : start + ECHO_BYTES] for start in starts]
    else:
        slices = [b"\1" * min(ECHO_BYTES, STEP_BYTES - start) for start in starts]
    todo: queue.SimpleQueue[Buffer] = queue.SimpleQueue()

    def messages() -> Iterator[bytes]:
        while True:
            window.acquire()
            piece = todo.get()
            yield b"".join((piece,)) if sums else piece

    echoes = grpc.insecure_channel(address, CHANNEL_OPTIONS).stream_stream("/echo/Echo")(messages())

    def step() -> None:
        for piece in slices:
            todo.put(piece)
        for start in starts:
            answer = next(echoes)
            window.release()
            if sums:
                result[start : start + ECHO_BYTES] = np.frombuffer(answer, np.uint8)

    _timed(step, steps)


def _with_sums(messages: Iterator[bytes], _: object) -> Iterator[bytes]:
    """Echoes; two workers' messages make one sum, so every second one is added to what was there."""
    for number, message in enumerate(messages):
        if number % 2:
            part = np.frombuffer(message, np.float32)
            yield (part + part).tobytes()
        else:
            yield message


def _grpc_echo(sums: bool) -> None:
    import grpc

    from tfps.config import Security
    from tfps.malloc import tune_malloc
    from tfps.wire.control import server_options

    tune_malloc()
    server = grpc.server(ThreadPoolExecutor(8), options=server_options(Security()))
    echo = grpc.stream_stream_rpc_method_handler(_with_sums if sums else lambda messages, _: messages)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", {"Echo": echo}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"echo ready at 127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


def _raw_echo() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"echo ready at 127.0.0.1:{listener.getsockname()[1]}", flush=True)
    while True:
        threading.Thread(target=_echo_back, args=(listener.accept()[0],), daemon=True).start()


def _echo_back(connection: socket.socket) -> None:
    buffer = memoryview(bytearray(1024 * 1024))
    while count := connection.recv_into(buffer):
        connection.sendall(buffer[:count])


def _raw_sums(message_bytes: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"echo ready at 127.0.0.1:{listener.getsockname()[1]}", flush=True)
    connections = [listener.accept()[0] for _ in range(WORKERS)]
    parts = [np.empty(message_bytes // 4, np.float32) for _ in connections]
    with contextlib.suppress(ConnectionError):
        while True:
            for start in range(0, STEP_BYTES, message_bytes):
                items = min(message_bytes, STEP_BYTES - start) // 4
                for connection, part in zip(connections, parts, strict=True):
                    _fill(connection, part[:items].view(np.uint8).data)
                np.add(parts[0][:items], parts[1][:items], out=parts[0][:items])
                for connection in connections:
                    connection.sendall(parts[0][:items].view(np.uint8).data)


def _fill(connection: socket.socket, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        count = connection.recv_into(buffer[done:])
        if not count:
            raise ConnectionError("the echo ended")
        done += count


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "role",
        choices=["work", *(f"{row.role}{end}" for row in ROWS if row.role != "work" for end in ("", "-echo"))],
    )
    parser.add_argument("--message-bytes", type=int, default=ECHO_BYTES)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("addresses", nargs="*")
    options = parser.parse_args()
    if options.role == "work":
        _work(options.addresses, options.steps)
    elif options.role in ("raw", "raw-sum"):
        _raw(options.addresses[0], options.steps, options.message_bytes)
    elif options.role in ("grpc", "grpc-sum"):
        _grpc(options.addresses[0], options.steps, sums=options.role == "grpc-sum")
    elif options.role in ("grpc-echo", "grpc-sum-echo"):
        _grpc_echo(sums=options.role == "grpc-sum-echo")
    elif options.role == "raw-sum-echo":
        _raw_sums(options.message_bytes)
    else:
        _raw_echo()


if __name__ == "__main__":
    _main()
