"""Changed parts and control messages: each decodes, or is refused by name; none takes or keeps memory."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import socket
import tracemalloc

import pytest
from mutations import TEXTS, change_message, changed, draw, replayable, some_parts
from receivers import Taking

from tfps.config import MAX_SLICE_BYTES, Config
from tfps.errors import ProtocolError, TfpsError
from tfps.exchange.interface import BucketSpec
from tfps.exchange.update_spec import UpdateSpec
from tfps.membership.members import Applicant
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.guard import parse
from tfps.trace.recorder import Recorder
from tfps.wire import connection, control
from tfps.wire.connection import Connection
from tfps.wire.control import bucket_message, settings_of
from tfps.wire.frames import PART_BYTES, Assembler, Header, Kind, decode_part
from tfps.wire.job_token import JobToken
from tfps.wire.send_queue import SendQueue

KEPT = 256 * 1024  # bytes: caches of regular expressions, of numpy and of the interpreter; inputs are up to 5 kB each
CONSTANTS = ("beta_1", 0.5), ("beta_2", 0.5), ("epsilon", 1e-7)
SPEC = UpdateSpec("adam", CONSTANTS, (("momentum", 0.0), ("velocity", 0.0)), (4,), (False,))
JSON_VALUES = (
    *("Infinity", "-Infinity", "NaN", "1e400", "1" + "0" * 400, "-1", "0", "true", "null", "{}", "[]", '""'),
    *("[" * 3000, '{"a":' * 3000, "1" + "0" * 5000, '"\\ud800"', "[[1,2]]", "9" * 30, '["x"]', '[["momentum",1e400]]'),
)


def parts_once(random_: random.Random, sent: list[bytes]) -> None:
    """Assembles changed parts."""
    found, asked = some_parts(random_), list[int]()
    sent += found

    def asks(_: Header, nbytes: int) -> None:
        asked.append(nbytes)

    assembler, so_far = Assembler(asks), dict[tuple[int, ...], bytes]()
    try:
        for data in found:
            if len(data) < PART_BYTES:
                break
            part = decode_part(data)
            if not part.nbytes:
                continue
            memory, end = assembler.begin(part), part.offset + part.nbytes
            memory[part.offset : end] = payload = data[PART_BYTES:][: part.nbytes].ljust(part.nbytes)
            key = part.header.kind, part.header.bucket, part.header.index, part.header.step
            so_far[key] = so_far.get(key, b"") + payload
            if assembler.end(part, memory, end):
                assert memory == so_far.pop(key)
    except ProtocolError:
        pass
    assert all(nbytes <= MAX_SLICE_BYTES for nbytes in asked)


def _update_text(random_: random.Random) -> str:
    """The JSON of an update, with one value replaced."""
    found = json.loads(SPEC.text())
    name = random_.choice([*found, "more"])
    found[name] = "HERE" if random_.random() < 0.4 or not found.get(name) else [*found[name], "HERE"]
    if random_.random() < 0.3:
        found["constants"] = [["beta_1", "HERE"], ["beta_2", 0.5], ["epsilon", 0.5]]
    text = json.dumps(found).replace('"HERE"', random_.choice(JSON_VALUES))
    return changed(random_, text.encode()).decode("utf-8", "replace") if random_.random() < 0.3 else text


def _bucket(random_: random.Random) -> pb.Bucket:
    found = bucket_message(BucketSpec(("b",), "sum", 16, "float32", 0, update=SPEC))
    if (how := random_.random()) < 0.4:
        found.update = _update_text(random_)
    elif how < 0.6:
        found.update = ""
        found.dtype = random_.choice(TEXTS)
    elif how < 0.8:
        change_message(random_, found)
    return found


def _applicant(request: pb.JoinRequest) -> object:
    fields = ("job", "rank", "workers", "uid", "host", "pid", "pserver_index", "pservers", "incarnation")
    return Applicant(**{name: getattr(request, name) for name in fields}), control.config_of(request.settings)


def control_once(random_: random.Random, sent: list[bytes]) -> None:
    """Parses a changed control message."""
    name = random_.choice(sorted(control._TYPES))
    request = control.request_type(name)()
    if isinstance(request, pb.JoinRequest):
        request.pservers = 1
        request.settings.CopyFrom(settings_of(random_.choice(CONFIGS)))
    elif isinstance(request, pb.DeclareRequest):
        request.buckets.append(_bucket(random_))
    elif isinstance(request, pb.TuneRequest):
        request.layout.CopyFrom(pb.Layout(slice_bytes=4, window_bytes=4, buckets=[0], steps=[1]))
    if random_.random() < 0.5:
        change_message(random_, request)
    data = request.SerializeToString()
    if random_.random() < 0.3:
        data = changed(random_, data)
    sent.append(data)
    try:
        received = parse(name, data)
        if isinstance(received, pb.JoinRequest):
            _applicant(received)
        elif isinstance(received, pb.DeclareRequest):
            for bucket in received.buckets:
                str(control.bucket_of(bucket))
        elif isinstance(received, pb.TuneRequest):
            control.layout_of(received.layout)
    except TfpsError:
        pass


CONFIGS = [
    Config(),
    Config(update="server", mode="async"),
    Config(mode="diloco"),
    Config(compression="topk:0.1,b=none"),
]
PER_TEST, LONG_PER_TEST = 24_000, 240_000  # inputs
STREAMS, LONG_STREAMS = 1_500, 15_000  # of several inputs each, over sockets


def check(what: str, begin: int, end: int) -> None:
    once = {"parts": parts_once, "control": control_once}[what]
    for number in range(begin, end):
        sent: list[bytes] = []
        with replayable(what, number, sent):
            once(draw(what, number), sent)


def check_and_measure(what: str, inputs: int) -> None:
    check(what, 0, inputs // 10)  # caches fill
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        check(what, inputs // 10, inputs // 5)
        gc.collect()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < KEPT, f"{after - before} bytes are kept of {inputs // 10} inputs"
    # Parts of three frames may be under way, whose totals were declared; tracing shows what nobody has written to, too.
    most = 3 * MAX_SLICE_BYTES if what == "parts" else 0
    assert peak - before < most + 4 * 2**20, f"{peak - before} bytes were taken at a time"
    check(what, inputs // 5, inputs)


@pytest.mark.parametrize("what", ["parts", "control"])
def test_what_is_nearly_valid_is_taken_or_refused_by_name_and_not_kept(what: str) -> None:
    check_and_measure(what, PER_TEST)


@pytest.mark.busy
@pytest.mark.long
@pytest.mark.parametrize("what", ["parts", "control"])
def test_much_that_is_nearly_valid_is_taken_or_refused_by_name_and_not_kept(what: str) -> None:
    check_and_measure(what, LONG_PER_TEST)


# Through sockets


def check_streams(streams: int) -> None:
    """A peer that sends changed parts, and ends anywhere: what receives ends by name, or as the connection does."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for number in range(streams):
            random_ = draw("streams", number)
            sent = some_parts(random_)
            with replayable("streams", number, sent), socket.create_connection(listening.getsockname()) as peer:
                receiving = Connection(listening.accept()[0])
                queue = SendQueue(2**20, "fifo", piggyback=True, recorder=Recorder())
                peer.sendall(b"".join(sent)[: random_.choice((None, None, random_.randrange(1, 200)))])
                peer.shutdown(socket.SHUT_WR)
                try:
                    receiving.receive(random_.choice((Kind.PUSH, Kind.REPLY)), queue, Taking())
                except (ProtocolError, connection.BrokenConnectionError):
                    pass
                finally:
                    receiving.close()


def check_greetings(greetings: int) -> None:
    """Changed greetings: each is taken, or refused by name, or the connection ends."""
    valid = connection._HELLO.pack(b"tfps", connection._VERSION, 0, 32, 1) + b"a" * 32
    for number in range(greetings):
        random_ = draw("greetings", number)
        sent = changed(random_, valid)
        with replayable("greetings", number, [sent]):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                theirs.sendall(sent)
                theirs.shutdown(socket.SHUT_WR)
                with contextlib.suppress(TfpsError, OSError):
                    connection.greet(ours, JobToken(), 5.0)


@pytest.mark.parametrize("code", ["C", "Python"])
def test_streams_of_changed_parts_end_by_name(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if code == "Python":
        monkeypatch.setattr("tfps.wire.connection._native", None)
    check_streams(STREAMS)
    check_greetings(STREAMS)


@pytest.mark.busy
@pytest.mark.long
def test_many_streams_of_changed_parts_end_by_name() -> None:
    check_streams(LONG_STREAMS)
    check_greetings(LONG_STREAMS)
