"""A real pserver and garbage of strangers at its ports: good workers are served, and nothing is kept."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import grpc
import jobs
import pytest
from jobs import DEADLINE_S, Cluster
from mutations import SEED, change_message, changed, draw, some_frame, some_parts
from watching import MIB, Training, Watched, watching

from tfps.protos import tfps_pb2 as pb
from tfps.wire import connection, control
from tfps.wire.control import CHANNEL_OPTIONS, Pserver, method, settings_of
from tfps.wire.measuring import DIRECTION_KEY

CALLS, CONNECTIONS = 5_000, 600
LONG_CALLS, LONG_CONNECTIONS = 120_000, 10_000
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
