"""Starts pservers and workers for tests: real ones, in this process, on free ports."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import secrets
import socket
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import pytest

from tfps.config import Config, Security
from tfps.exchange.interface import BucketSpec, Exchange, Payload, Reply
from tfps.protos import tfps_pb2 as pb
from tfps.pserver import server
from tfps.pserver.server import ParameterServer
from tfps.types import Argument, Array
from tfps.wire import frames
from tfps.wire.connection import dial
from tfps.wire.control import INCARNATION_KEY, PROTOCOL_VERSION, PULL, PUSH, RANK_KEY, Pserver, method, settings_of
from tfps.wire.frames import PART_BYTES, decode_part
from tfps.wire.paths import Opening
from tfps.worker import worker as worker_module
from tfps.worker.worker import Worker

if TYPE_CHECKING:
    import grpc

ROOT = Path(__file__).resolve().parent.parent.parent
DEADLINE_S = 60.0  # how long a test waits for what must happen; never reached if all is well
Transport = Literal["tcp", "grpc", "shared memory", "both"]
CONFIG = Config(slice_bytes=1024, window_bytes=4096, connect_timeout_s=DEADLINE_S, step_timeout_s=DEADLINE_S)
_T = TypeVar("_T")
# For a test that is to run over each data path; its `cluster` must take one.
OVER_ALL = pytest.mark.parametrize("cluster", ["tcp", "grpc", "shared memory"], indirect=True)


def expected(error: Exception | None, kind: type[Exception] | UnionType, text: str) -> Exception:
    """The error, which must be of this kind and say this text."""
    assert isinstance(error, kind), error
    assert text in str(error)
    return error


class Pending:
    """An `on_reply` that can be waited for."""

    def __init__(self) -> None:
        self._replied = threading.Event()
        self.replies: list[Reply] = []

    def __call__(self, reply: Reply) -> None:
        self.replies.append(reply)
        self._replied.set()

    @property
    def replied(self) -> bool:
        return self._replied.is_set()

    def wait(self) -> Reply:
        """The reply, or raises its error."""
        if not self._replied.wait(DEADLINE_S):
            raise TimeoutError("no reply")
        reply = self.replies[0]
        if reply.error is not None:
            raise reply.error
        return reply

    def error(self, kind: type[Exception] | UnionType = Exception, text: str = "") -> Exception:
        """The error of a reply that must be one, of this kind and with this text."""
        try:
            reply = self.wait()
        except TimeoutError:
            if not self.replied:
                raise
        except Exception:
            pass
        else:
            raise AssertionError(f"expected an error, got {reply}")
        return expected(self.replies[0].error, kind, text)


def push(exchange: Exchange, bucket: int, payload: Payload | None) -> Pending:
    """Pushes without waiting."""
    pending = Pending()
    exchange.push(bucket, payload, pending)
    return pending


def summed(reply: Reply, dtype: str = "float32") -> Array:
    """The items of a sum."""
    return np.frombuffer(memoryview(reply.sum).cast("B"), np.uint8).view(dtype)


class Failed:
    """A failure listener that can be waited for."""

    def __init__(self, exchange: Exchange) -> None:
        self._failed = threading.Event()
        self.errors: list[Exception] = []
        exchange.add_failure_listener(self._take)

    def _take(self, error: Exception) -> None:
        self.errors.append(error)
        self._failed.set()

    def wait(self, kind: type[Exception] | UnionType = Exception, text: str = "") -> Exception:
        if not self._failed.wait(DEADLINE_S):
            raise TimeoutError("no failure")
        return expected(self.errors[0], kind, text)


def attempt(*calls: Callable[[], _T]) -> list[_T | Exception]:
    """Runs the calls at the same time, each on a thread; what each returned or raised."""
    results: list[_T | Exception] = [TimeoutError("did not end")] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S * 2)
    return results


def together(*calls: Callable[[], _T]) -> list[_T]:
    """As `attempt`, for calls that must succeed."""
    results = attempt(*calls)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return [result for result in results if not isinstance(result, Exception)]


class Cluster(contextlib.ExitStack):
    """Pservers and workers that end with the test: workers first, as they would wait for pservers that are gone."""

    def __init__(self) -> None:
        super().__init__()
        self._servers = self.enter_context(contextlib.ExitStack())

    def pserver(self, workers: int, port: int = 0, **options: Argument) -> ParameterServer:
        server = ParameterServer("127.0.0.1", port, workers=workers, **options)
        self._servers.callback(server.stop, 0.2)
        return server

    def pservers(self, count: int, workers: int) -> list[str]:
        return [self.pserver(workers).address for _ in range(count)]

    def worker(self, addresses: Sequence[str], rank: int | None = None, **options: Argument) -> Worker:
        worker = Worker(addresses, rank=rank, **{"config": CONFIG, **options})
        self.callback(worker.close)
        return worker

    def workers(self, addresses: Sequence[str], count: int, **options: Argument) -> list[Worker]:
        return together(*(functools.partial(self.worker, addresses, rank, **options) for rank in range(count)))

    def raw(self, address: str, rank: int = -1, **options: Argument) -> RawWorker:
        raw = RawWorker(address, rank, **options)
        self.callback(raw.close)
        return raw


def bucket(nbytes: int, priority: int = 0, name: str = "b") -> BucketSpec:
    """A sum of float32."""
    return BucketSpec((name,), "sum", nbytes, "float32", priority)


def declare(workers: Sequence[Worker], *specs: BucketSpec) -> list[int]:
    """On all workers at the same time; the numbers of the buckets."""
    ids: list[int] = together(*(functools.partial(worker.declare, specs) for worker in workers))[0]
    return ids


def job(cluster: Cluster, workers: int, *specs: BucketSpec, pservers: int = 1, **options: Argument) -> list[Worker]:
    """New workers with new pservers, which have declared `specs`."""
    members = cluster.workers(cluster.pservers(pservers, workers), workers, **options)
    declare(members, *specs)
    return members


def unused_ports(count: int) -> int:
    """The first of so many neighbours that nobody listens on, nor will: the system gives out others by itself."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))  # each of pytest's has its own
    while True:
        port = 20_000 + 1_500 * (process % 8) + secrets.randbelow(1_500 - count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for each in range(port, port + count):
                stack.enter_context(socket.create_server(("127.0.0.1", each)))
            return port


def use(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    """What slices pass through from now on, to pservers in this process; "both": TCP to the first of them."""
    attached = server._attached
    if transport != "shared memory":
        monkeypatch.setattr(
            server, "_attached", lambda join: attached(join) if transport == "both" and join.pserver_index else None
        )
    if transport == "grpc":
        monkeypatch.setattr(worker_module, "Opening", lambda _, when: Opening("grpc", when))
    monkeypatch.setattr(RawWorker, "over_tcp", transport == "tcp")


def _as_part(message: bytes) -> bytes:
    """A frame, maybe a malformed one, as one part."""
    header, payload = message[: frames.HEADER_BYTES], message[frames.HEADER_BYTES :]
    return header + struct.pack("<III", len(payload), 0, len(payload)) + payload


class RawWorker:
    """Speaks the protocol by hand, so that it can be spoken wrongly; over TCP or, if not `over_tcp`, over gRPC."""

    over_tcp = False

    def __init__(self, address: str, rank: int = -1, config: Config = CONFIG, **join: Argument) -> None:
        self.pserver = Pserver(address, Security.of_worker(config, {}))
        fields: dict[str, Argument] = {
            "protocol_version": PROTOCOL_VERSION,
            "rank": rank,
            "uid": uuid.uuid4().hex,
            "host": "rawhost",
            "pid": os.getpid(),
            "pservers": 1,
            "settings": settings_of(config),
        }
        self.joined = self.pserver.join(pb.JoinRequest(**{**fields, **join}), DEADLINE_S, DEADLINE_S)
        self.rank: int = self.joined.rank
        self.incarnation: str = self.joined.incarnation
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.pulling: grpc.Call = None
        self.pushing: grpc.Future = None

    def open(self) -> RawWorker:
        """Opens both streams."""
        if self.over_tcp:
            self.data: socket.socket = dial(
                self.pserver.address, self.joined.data_port, self.pserver.token, self.incarnation, self.rank, DEADLINE_S
            )._socket
            self.data.settimeout(DEADLINE_S)
            return self
        self.pulling = self._pull(self.incarnation, str(self.rank))
        self.pushing = self._push(self._outbox, self.incarnation, str(self.rank))
        return self

    def open_pull(self) -> RawWorker:
        """Opens the one stream only."""
        self.pulling = self._pull(self.incarnation, str(self.rank))
        return self

    def second_streams(self, incarnation: str | None, rank: str) -> list[Exception]:
        """Tries to open others; the errors that they get."""
        incarnation, outbox = (
            self.incarnation if incarnation is None else incarnation,
            queue.SimpleQueue[bytes | None](),
        )
        answers = [next(self._pull(incarnation, rank)), self._push(outbox, incarnation, rank).result(DEADLINE_S)]
        outbox.put(None)
        return [frames.decode_error(*frames.decode(answer)) for answer in answers]

    def _pull(self, incarnation: str, rank: str) -> grpc.Call:
        pull = self.pserver.channel.unary_stream(method(PULL))
        return pull(
            b"", metadata=(*self.pserver.metadata, (INCARNATION_KEY, incarnation), (RANK_KEY, rank)), timeout=DEADLINE_S
        )

    def _push(self, outbox: queue.SimpleQueue[bytes | None], incarnation: str, rank: str) -> grpc.Future:
        push = self.pserver.channel.stream_unary(method(PUSH))
        return push.future(
            iter(outbox.get, None),
            metadata=(*self.pserver.metadata, (INCARNATION_KEY, incarnation), (RANK_KEY, rank)),
            timeout=DEADLINE_S,
        )

    def declare(
        self, *buckets: pb.Bucket, number: int = 0, details: Sequence[str] = (), timeout_s: float = DEADLINE_S
    ) -> RawWorker:
        request = pb.DeclareRequest(
            incarnation=self.incarnation,
            rank=self.rank,
            number=number,
            buckets=buckets,
            details=details,
            timeout_s=timeout_s,
        )
        self.pserver.call("Declare", request, DEADLINE_S)
        return self

    def send(self, message: bytes) -> None:
        """Sends a frame; one of a round that says no generation gets that of the job's first view."""
        if message[2:4] == b"\0\0" and message[0] not in (frames.Kind.ACK, frames.Kind.ERROR):
            message = message[:2] + b"\1\0" + message[4:]
        if self.over_tcp:
            with contextlib.suppress(OSError):  # the pserver has heard enough
                self.data.sendall(_as_part(message))
        else:
            self._outbox.put(message)

    def read(self) -> tuple[frames.Header, bytes]:
        """The next frame."""
        if self.over_tcp:
            received = b""
            while True:
                part = decode_part(self.data.recv(PART_BYTES, socket.MSG_WAITALL))
                received += self.data.recv(part.nbytes, socket.MSG_WAITALL)
                if len(received) == part.total:
                    return part.header, received
        header, payload = frames.decode(next(self.pulling))
        return header, bytes(payload)

    def read_error(self, kind: type[Exception] | UnionType = Exception, text: str = "") -> Exception:
        """The ERROR frame at the end; frames before it are skipped."""
        while True:
            header, payload = self.read()
            if header.kind == frames.Kind.ERROR:
                return expected(frames.decode_error(header, memoryview(payload)), kind, text)

    def leave(self) -> None:
        self.pserver.call("Leave", pb.LeaveRequest(incarnation=self.incarnation, rank=self.rank), DEADLINE_S)

    def close(self) -> None:
        self._outbox.put(None)
        if (data := getattr(self, "data", None)) is not None:
            data.close()
        self.pserver.close()


@contextlib.contextmanager
def python(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process with the package on its path; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def overdue(worker: Worker, missing: int, bucket: int = 0) -> None:
    """Makes a push of `bucket` last too long, as soon as its pservers say that they wait for rank `missing` alone."""
    target = worker._buckets[bucket]
    request = pb.WaitingRequest(incarnation=worker.client.membership.incarnation, rank=worker.rank, bucket=bucket)

    def said(pserver: int) -> bool:
        ranks = worker._pservers[pserver].call("Waiting", request, DEADLINE_S).missing
        return [each.partition(" (")[0] for each in ranks] == [f"rank {missing}"]

    poll(lambda: all(map(said, set(target.cutting.owners))))
    with target.lock:
        assert target.current is not None
        target.current.started_s -= 2 * worker.config.step_timeout_s


def poll(done: Callable[[], bool]) -> None:
    """Returns as soon as `done` says so (polled, with a deadline)."""
    tick = threading.Event()
    for _ in range(int(DEADLINE_S * 100)):
        if done():
            return
        tick.wait(0.01)
    raise TimeoutError("what the test waits for did not happen")
