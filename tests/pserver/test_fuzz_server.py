"""A real pserver and garbage at its ports: strangers', and of members. Good workers are served, and nothing is kept."""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import grpc
import jobs
import pytest
from jobs import DEADLINE_S, Cluster, RawWorker
from mutations import SEED, change_message, changed, draw, some_frame, some_header, some_parts
from watching import MIB, Training, Watched, watching

from tfps.config import Config
from tfps.errors import ConnectError, MismatchError, TfpsError
from tfps.exchange.codecs import codec_of
from tfps.exchange.interface import BucketSpec
from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.protos import tfps_pb2 as pb
from tfps.types import Argument
from tfps.wire import connection, control, frames
from tfps.wire.control import CHANNEL_OPTIONS, Pserver, bucket_message, method, settings_of
from tfps.wire.frames import Header, Kind
from tfps.wire.measuring import DIRECTION_KEY

CALLS, CONNECTIONS, SESSIONS = 5_000, 600, 120
LONG_CALLS, LONG_CONNECTIONS, LONG_SESSIONS = 120_000, 10_000, 3_000
BATCH = 100  # inputs between two looks at the log
WORKERS = 2
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
# Threads: the pool of calls never shrinks, so it may not have been full before; gRPC's own come and go. Descriptors:
# gRPC keeps some of its own. Memory: arenas of gRPC and Python that inputs of a few kB fragment. One of each that were
# kept for a hundredth of the inputs would be more.
THREADS, DESCRIPTORS, RESIDENT = 6 * WORKERS + 8, 8, 24 * MIB
RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: closing resets the connection
SECRETS = ("", "x", "0" * 32, "measure push", "é")


def stranger_call(random_: random.Random) -> tuple[str, bytes]:
    """The name and the bytes of a call that no member makes."""
    name = random_.choice(sorted(control._TYPES))
    request = control.request_type(name)()
    if hasattr(request, "incarnation"):
        request.incarnation = random_.choice(SECRETS)
    if isinstance(request, pb.JoinRequest):
        request.protocol_version, request.pservers = random_.choice((control.PROTOCOL_VERSION,) * 9 + (7,)), 1
        request.rank = random_.choice((-1, 0, 1, 2))
        request.settings.CopyFrom(settings_of(jobs.CONFIG))
    for _ in range(random_.choice((0, 1, 2))):
        change_message(random_, request)
    data = request.SerializeToString()
    return name, changed(random_, data) if random_.random() < 0.3 else data


def calls(channel: grpc.Channel, number: int) -> tuple[grpc.Future, str, bytes]:
    """Begins call `number` of strangers; its name and bytes."""
    random_ = draw("calls", number)
    if random_.random() < 0.8:
        name, data = stranger_call(random_)
        return channel.unary_unary(method(name)).future(data, timeout=DEADLINE_S), name, data
    name = random_.choice((control.PUSH, control.PULL, control.MEASURE, "Nothing"))
    messages = [changed(random_, some_frame(random_)) for _ in range(random_.choice((0, 1, 3)))]
    rank = random_.choice(("0", "1", "-1", "9" * 4500, "x", "4294967296"))
    metadata = [(control.RANK_KEY, rank), (control.INCARNATION_KEY, random_.choice(("", "x", "0" * 32, "/" * 300)))]
    metadata += [(DIRECTION_KEY, random_.choice(("push", "pull", "x")))]
    call = channel.stream_unary(method(name)).future(iter(messages), metadata=metadata, timeout=DEADLINE_S)
    return call, name, b"".join(messages)


def check_calls(watched: Watched, begin: int, end: int) -> None:
    for batch in range(begin, end, BATCH):
        with grpc.insecure_channel(watched.address, CHANNEL_OPTIONS) as channel:
            made = [calls(channel, number) for number in range(batch, min(batch + BATCH, end))]
            for call, _, _ in made:
                # Waits until it is answered, refused or broken.
                assert call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        with _naming("calls", batch, [f"{name} of {data.hex()}" for _, name, data in made]):
            watched.check()


@contextlib.contextmanager
def _naming(what: str, batch: int, inputs: list[str]) -> Iterator[None]:
    """Says after which inputs a pserver went wrong."""
    try:
        yield
    except AssertionError as error:
        texts = "\n".join(each[:2000] for each in inputs)
        raise AssertionError(f"seed {SEED}, {what} from {batch} on:\n{error}\n{texts}") from error


def greeting(random_: random.Random) -> bytes:
    """Something that a stranger may say to a data port."""
    incarnation = random_.choice((*SECRETS, "a" * 256)).encode()
    hello = connection._HELLO.pack(b"tfps", connection._VERSION, 0, len(incarnation), random_.choice((0, 1, 2**32 - 1)))
    how = random_.randrange(5)
    if how == 0:
        return random_.randbytes(random_.choice((0, 1, 13, 14, 300, 5000)))
    if how == 1:
        return changed(random_, hello + incarnation)
    if how == 2:
        return (hello + incarnation)[: random_.randrange(1, 40)]
    return hello + incarnation + b"".join(some_parts(random_))


@contextlib.contextmanager
def _patient(text: bytes) -> Iterator[None]:
    """Connections may be refused or reset, but none is left to itself."""
    try:
        yield
    except TimeoutError as error:
        raise AssertionError(f"the pserver neither answers nor closes a connection that said {text.hex()}") from error
    except OSError:
        pass


def check_connections(watched: Watched, data_port: int, begin: int, end: int) -> None:
    port = int(watched.address.rpartition(":")[2])
    for batch in range(begin, end, BATCH):
        said: list[str] = []
        for number in range(batch, min(batch + BATCH, end)):
            random_ = draw("connections", number)
            text, where = greeting(random_), port if random_.random() < 0.1 else data_port
            said.append(text.hex())
            with _patient(text), socket.create_connection(("127.0.0.1", where), DEADLINE_S) as stranger:
                stranger.sendall(text)
                if random_.random() < 0.3:
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                elif random_.random() < 0.3:
                    stranger.shutdown(socket.SHUT_WR)
                    stranger.settimeout(DEADLINE_S)
                    while stranger.recv(4096):
                        pass
        with _naming("connections", batch, said):
            watched.check()


def data_port_of(address: str) -> int:
    with contextlib.closing(Pserver(address)) as pserver:
        return pserver.call("Probe", pb.ProbeRequest(), DEADLINE_S).data_port


def check_strangers(calls: int, connections: int) -> None:
    with watching(f"--workers={WORKERS}") as watched, Cluster() as cluster:
        port = data_port_of(watched.address)
        training = Training(cluster, watched.address, WORKERS)
        check_calls(watched, 0, calls // 5)
        check_connections(watched, port, 0, connections // 5)
        training.goes_on()
        before = watched.use()
        check_calls(watched, calls // 5, calls)
        check_connections(watched, port, connections // 5, connections)
        training.goes_on()
        watched.comes_back_to(before, THREADS, DESCRIPTORS, RESIDENT)
        assert training.stop() > 10
        watched.check()


def test_strangers_that_send_garbage_disturb_no_job_and_leave_nothing() -> None:
    check_strangers(CALLS, CONNECTIONS)


@pytest.mark.busy
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_strangers_that_send_garbage_disturb_no_job_and_leave_nothing() -> None:
    check_strangers(LONG_CALLS, LONG_CONNECTIONS)


# Members

SGD = UpdateSpec("sgd", (("momentum", 0.0), ("nesterov", 0.0)), (), (100,), (False,))
OF_JOBS = [
    jobs.CONFIG,
    Config(slice_bytes=1024, window_bytes=4096, update="server"),
    Config(slice_bytes=1024, update="server", mode="async", staleness=1),
    Config(slice_bytes=64, window_bytes=64, deterministic=True, policy="fifo"),
]


class Member:
    """Two members of one job, who agree on buckets, and then send what is valid, and what is not."""

    def __init__(self, cluster: contextlib.ExitStack, address: str, number: int) -> None:
        self.random = draw("sessions", number)
        self.config = self.random.choice(OF_JOBS)
        self.sent: list[str] = []
        update = SGD if self.config.update == "server" else None
        self.specs = [
            BucketSpec(("a",), "sum", 4000, "float32", 0),
            BucketSpec(("b",), "gather", 0, "uint8", 1),
            BucketSpec(("c",), "sum", 400, "float32", 2, update=update),
            BucketSpec(("d",), "sum", 4000, "float32", 3, codec=codec_of("int8")),
        ]
        self.ranks = [self._join(cluster, address, rank) for rank in range(WORKERS)]
        self.steps = dict.fromkeys(range(len(self.specs)), 0)
        tcp = self.random.random() < 0.5
        opened = 0
        for raw in self.ranks:
            raw.over_tcp = tcp
            if self.random.random() < 0.9:
                raw.open()
                opened += 1
            elif self.random.random() < 0.5:
                raw.open_pull()
            else:
                raw.pushing = raw._push(raw._outbox, raw.incarnation, str(raw.rank))
        self.agreed = opened == WORKERS
        for number_, buckets in enumerate(([], [bucket_message(spec) for spec in self.specs])):
            if self.agreed:
                jobs.together(*(functools.partial(raw.declare, *buckets, number=number_) for raw in self.ranks))

    def _join(self, cluster: contextlib.ExitStack, address: str, rank: int) -> RawWorker:
        found: list[RawWorker] = []

        def joined() -> bool:
            try:
                found.append(RawWorker(address, rank, self.config))
            except (ConnectError, MismatchError):  # the job before is not over yet, or too many join at once
                return False
            return True

        jobs.poll(joined)
        cluster.callback(found[0].close)
        return found[0]

    def _frames(self) -> list[tuple[RawWorker, bytes]]:
        """A step of one slice, of both ranks."""
        number = self.random.randrange(len(self.specs))
        spec, step, found = self.specs[number], self.steps[number], list[tuple[RawWorker, bytes]]()
        nbytes = min(spec.nbytes, self.config.first_slice_bytes)
        flags = 0
        if spec.kind == "gather":
            nbytes, flags = 10, frames.LAST
        elif spec.codec is not None:
            nbytes = spec.codec.wire_bytes(nbytes // 4)
        self.steps[number] += 1
        for raw in self.ranks:
            if spec.update is not None:
                scalars = StepScalars(int(step == 0), (float(step), 0.5), wrote=raw is self.ranks[0]).pack()
                header = Header(Kind.SCALARS, bucket=number, step=step, generation=1)
                found.append((raw, frames.encode(header, scalars)))
            header = Header(Kind.PUSH, flags, number, 0, spec.priority, step, 0, 1)
            found.append((raw, frames.encode(header, self.random.randbytes(nbytes))))
        return found

    def _call(self) -> None:
        name = self.random.choice([name for name in sorted(control._TYPES) if name not in ("Join", "Leave")])
        raw = self.random.choice(self.ranks)
        known: dict[str, Argument] = {"rank": raw.rank, "bucket": self.random.randrange(4), "slice": 0, "number": 1}
        known |= {"incarnation": raw.incarnation, "on": True, "nbytes": 16, "values": bytes(400), "counter": "c"}
        if name == "Tune":
            known["layout"] = pb.Layout(
                slice_bytes=100, window_bytes=100, buckets=[0], steps=[self.random.randrange(9)]
            )
        if name == "Declare":
            known |= {"number": 2, "buckets": [bucket_message(spec) for spec in self.specs]}
        if name == "Put":
            known |= {"rank": 0, "bucket": 2, "number": 0}
        request = control.request_type(name)()
        fields = request.DESCRIPTOR.fields_by_name
        request = control.request_type(name)(**{each: value for each, value in known.items() if each in fields})
        if self.random.random() < 0.5:
            change_message(self.random, request)
        if "timeout_s" in fields:
            request.timeout_s = self.random.choice((0.0, -1.0, float("nan")) if name == "Declare" else (0.0, -1.0))  # type: ignore[attr-defined]
        data = request.SerializeToString()
        self.sent.append(f"{name} of {data.hex()}")
        with contextlib.suppress(grpc.RpcError):
            raw.pserver.channel.unary_unary(method(name))(data, timeout=2.0, metadata=raw.pserver.metadata)

    def act(self) -> None:
        if (how := self.random.random()) < 0.4:
            self._call()
            return
        for raw, message in self._frames():
            sent = message
            if how < 0.55:
                sent = changed(self.random, message)
            elif how < 0.6:
                sent = frames.encode(some_header(self.random), message[frames.HEADER_BYTES :])
            self.sent.append(f"rank {raw.rank}: {sent.hex()}")
            if raw.over_tcp and how < 0.7 and hasattr(raw, "data"):
                with contextlib.suppress(OSError):
                    raw.data.sendall(changed(self.random, jobs._as_part(message)))
            elif hasattr(raw, "data") or not raw.over_tcp:
                raw.send(sent if len(sent) >= 4 else bytes(4))

    def end(self) -> None:
        """Ends the membership in one of the ways in which it may end; the job is over, or will be."""
        how = self.random.random()
        for raw in self.ranks:
            if how < 0.5 or not self.agreed:
                request = pb.LeaveRequest(incarnation=raw.incarnation, rank=raw.rank)
                if how < 0.3:
                    change_message(self.random, request.failure)
                with contextlib.suppress(TfpsError):
                    raw.pserver.call("Leave", request, DEADLINE_S)
        for raw in self.ranks:
            raw._outbox.put(None)
        for raw in self.ranks:
            if raw.pulling is not None:  # gRPC's client keeps the connection of a stream that is not read to its end
                with contextlib.suppress(grpc.RpcError):
                    collections.deque(raw.pulling, maxlen=0)
            raw.close()


def check_sessions(watched: Watched, begin: int, end: int) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(begin, end):
            members = Member(stack, watched.address, number)
            for _ in range(members.random.randrange(1, 16)):
                members.act()
            members.end()
            stack.pop_all().close()
            with _naming("sessions", number, members.sent):
                watched.check()


def check_members(sessions: int) -> None:
    with watching(f"--workers={WORKERS}", "--max-memory=0.0625") as watched, Cluster() as cluster:
        check_sessions(watched, 0, sessions // 4)
        before = watched.use()
        check_sessions(watched, sessions // 4, sessions)
        watched.comes_back_to(before, THREADS, DESCRIPTORS, RESIDENT)
        training = Training(cluster, watched.address, WORKERS)
        training.reaches(50)
        training.stop()
        watched.check()


def test_after_members_that_sent_garbage_a_good_job_is_served_and_nothing_is_kept() -> None:
    check_members(SESSIONS)


@pytest.mark.busy
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_after_many_members_that_sent_garbage_a_good_job_is_served_and_nothing_is_kept() -> None:
    check_members(LONG_SESSIONS)
