"""Members that send garbage, in this process: nothing but named errors comes out, and nothing is kept afterwards."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import tracemalloc

import jobs
import pytest
from mutations import change_message, changed, draw, replayable, some_header

from tfps.config import Config
from tfps.errors import ClosedError, ProtocolError, TfpsError
from tfps.exchange.codecs import codec_of
from tfps.exchange.interface import BucketSpec, parse_dtype
from tfps.exchange.layout import Layout
from tfps.exchange.update_spec import CONSTANTS, SLOTS, StepScalars, UpdateSpec
from tfps.membership.members import Applicant
from tfps.membership.view import View
from tfps.protos import tfps_pb2 as pb
from tfps.pserver import server
from tfps.pserver.async_slice import AsyncSlice
from tfps.pserver.counters import ErrorCounts
from tfps.pserver.guard import parse
from tfps.pserver.job import Job, Session
from tfps.pserver.slices import GatherSlice, RoundScalars, RoundSlice
from tfps.trace.recorder import Recorder
from tfps.types import Argument
from tfps.wire import control, frames
from tfps.wire.connection import receive
from tfps.wire.control import PULL, PUSH, bucket_message, layout_message, request_type
from tfps.wire.frames import Header, Kind
from tfps.wire.send_queue import Outgoing

INPUTS, MANY_INPUTS = 20_000, 200_000
WORKERS = 2
DTYPES = (
    *("float32", "float32", "float64", "bool", "int8", "uint64", "complex64", "longdouble", "float16"),
    *("bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn", "int4", "uint2"),
)
NUMBERS = (0.0, 1.0, 0.5)
MEMORY = 2**22  # bytes that a job may declare
KEPT = 256 * 1024  # bytes: caches of the interpreter and of numpy
CONFIGS = [
    Config(slice_bytes=64, window_bytes=4096),
    Config(slice_bytes=64, window_bytes=64, deterministic=True, policy="fifo", placement="round_robin"),
    Config(slice_bytes=64, update="server"),
    Config(slice_bytes=64, update="server", mode="async", staleness=1),
    Config(slice_bytes=64, update="server", mode="async", delay_compensation=0.5),
]
OTHER = concurrent.futures.ThreadPoolExecutor(1)  # declares for the other rank
CALLS = sorted(server._JOB_CALLS)


class Case:
    """A job of two members, and what they send: valid mostly, so that it gets far."""

    def __init__(self, number: int, recorder: Recorder) -> None:
        self.random = draw("members", number)
        self.config = self.random.choice(CONFIGS)
        self.sent: list[object] = []
        self.job = Job(View.first(WORKERS), "", recorder, ErrorCounts(), MEMORY)
        self.sessions: list[Session] = []
        for rank in range(WORKERS):
            self.job.join(Applicant("", rank, 0, str(rank), "h", 1, 0, 1, ""), self.config)
            self.job.open_stream(rank, PUSH)
            self.sessions.append(Session(self.job, rank, self.job.open_stream(rank, PULL), _unexpected))
        self.specs = [self._spec(number) for number in range(3)]
        for number, specs in enumerate(([], self.specs)):
            other = OTHER.submit(self.job.declarations.declare, 0, number, [], specs, jobs.DEADLINE_S)
            self.job.declarations.declare(1, number, [], specs, jobs.DEADLINE_S)
            other.result(jobs.DEADLINE_S)
        for bucket in self.job._state.shard.buckets if self.random.random() < 0.9 else ():
            for item in bucket.slices.values():
                if item.parameters is not None:
                    item.parameters.put(0, 0, bytes(item.nbytes))

    def _spec(self, number: int) -> BucketSpec:
        items = self.random.choice((0, 1, 16, 40))
        if self.random.random() < 0.2:
            return BucketSpec((f"b{number}",), "gather", 0, "uint8", number)
        update, dtype = None, "float32"
        if self.config.update == "server" and number:
            rule = self.random.choice(sorted(CONSTANTS))
            constants = tuple((name, self.random.choice((0.5, 0.0, 1.0))) for name in CONSTANTS[rule])
            more = ("momentum",) if rule in ("sgd", "rmsprop") else ()
            slots = tuple((name, 0.0) for name in (*SLOTS.get(rule, ()), *more))
            update = UpdateSpec(rule, constants, slots, (items,), (False,))
        codec = codec_of(self.random.choice(("none", "none", "int8", "onebit", "topk:0.1", "bfloat16", "float16")))
        if update is None and codec is None:
            dtype = self.random.choice(DTYPES)
        nbytes = items * parse_dtype(dtype).itemsize
        return BucketSpec((f"b{number}",), "sum", nbytes, dtype, number, codec=codec, update=update)

    def _frame(self, rank: int) -> bytes:
        """One that the job waits for, if it waits for any of this rank."""
        number = self.random.randrange(3)
        spec, bucket = self.specs[number], self.job._state.shard.buckets[number]
        index, item = self.random.choice(sorted(bucket.slices.items(), key=lambda each: each[0]))
        if isinstance(item, AsyncSlice):
            step = item._steps.get(rank, 0)
        else:
            assert isinstance(item, RoundSlice)
            step = item.round.step
            if isinstance(item, GatherSlice):
                index = len(item.round._pieces.get(rank, ()))  # none of a rank that has been lost
        scalars = bucket.scalars
        if spec.update is not None and scalars is not None:
            came = scalars._by_rank if isinstance(scalars, RoundScalars) else scalars._latest
            known = scalars._step == step if isinstance(scalars, RoundScalars) else scalars.at(rank, step) is not None
            if not known or rank not in came:
                numbers = tuple(self.random.choice(NUMBERS) for _ in spec.update.scalars)
                payload = StepScalars(int(step == 0), numbers, wrote=True)
                if step < 2**64:
                    return frames.encode(Header(Kind.SCALARS, bucket=number, step=step, generation=1), payload.pack())
        flags = self.random.choice((0, 0, 0, frames.EMPTY))
        nbytes = item.nbytes
        if spec.kind == "gather":
            nbytes = self.random.choice((10, 64))
            flags = frames.LAST if nbytes < 64 else 0
        elif spec.codec is not None:
            nbytes = spec.codec.wire_bytes(nbytes // 4)
        payload_ = b"" if flags & frames.EMPTY else self.random.randbytes(nbytes)
        return frames.encode(Header(Kind.PUSH, flags, number, index, spec.priority, step % 2**64, 0, 1), payload_)

    def _request(self, name: str) -> bytes:
        """One that would do, or nearly."""
        known: dict[str, object] = {"rank": self.random.randrange(WORKERS), "bucket": self.random.randrange(3)}
        known |= {"slice": self.random.randrange(3), "number": 1, "on": True, "counter": "c", "nbytes": 16}
        if name == "Declare":
            known["number"] = 2
            known["buckets"] = [bucket_message(self._spec(3 + n)) for n in range(self.random.randrange(3))]
        elif name == "Tune":
            steps = {number: self.random.choice((1, 2, 3, 2**63)) for number in range(3) if self.random.random() < 0.5}
            known["layout"] = layout_message(Layout(self.random.choice((4, 16, 128)), 64, steps))
        elif name == "Put":
            known |= {"rank": 0, "number": self.random.choice((0, 0, 1, 2)), "values": bytes(16)}
        elif name == "Upload":
            known["records"] = pb.Records(records=bytes(200), last=self.random.random() < 0.3)
        fields = request_type(name).DESCRIPTOR.fields_by_name
        request = request_type(name)(**{each: value for each, value in known.items() if each in fields})
        if self.random.random() < 0.6:
            change_message(self.random, request)
        data = request.SerializeToString()
        return changed(self.random, data) if self.random.random() < 0.3 else data

    def act(self) -> None:
        """Sends one input; raises what a member would be told, and anything else that it causes."""
        if self.random.random() < 0.3:
            name = self.random.choice(CALLS)
            data = self._request(name)
            self.sent += [f"{name} of", data]
            request: Argument = parse(name, data)
            if name in ("Declare", "Collect", "Admit"):
                request.timeout_s = 0.0  # a wait is not what is tested
            control.reply_type(name)(**server._JOB_CALLS[name](self.job, request) or {}).SerializeToString()
            return
        rank = self.random.randrange(WORKERS)
        message = self._frame(rank)
        if (how := self.random.random()) < 0.06:
            message = changed(self.random, message)
        elif how < 0.08:
            message = frames.encode(some_header(self.random), message[frames.HEADER_BYTES :])
        self.sent += [f"a frame of rank {rank}", message]
        session = self.sessions[rank]
        try:
            receive([message], Kind.PUSH, session.queue, session)
        except ProtocolError as error:
            session.fail(error, "")

    def drain(self) -> None:
        """Encodes what was answered, as a sender would."""
        for session in self.sessions:
            while session.queue.waiting and session.queue._ready():
                taken = session.queue.take()
                if taken is not None and isinstance(taken.item, Outgoing) and taken.item.encoding is not None:
                    taken.item.encoding.data()
                session.queue.acked(session.queue.load.sent_bytes)

    @property
    def over(self) -> bool:
        return self.job.over


def _unexpected(when: str, error: Exception, *, logged: bool = True) -> TfpsError:
    raise error


def fuzz(inputs: int, number: int) -> int:
    """Plays cases from `number` on until so many inputs have been sent; returns the number of the next case."""
    recorder, done = Recorder(capacity=100), 0
    while done < inputs:
        case = Case(number, recorder)
        with replayable("members", number, case.sent):
            for _ in range(100):
                done += 1
                with contextlib.suppress(TfpsError):
                    case.act()
                if case.over:
                    break
                case.drain()
            case.job.fail(ClosedError("the case is over"))
        number += 1
    return number


def check(inputs: int) -> None:
    following = fuzz(inputs // 4, 0)  # caches fill
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        following = fuzz(inputs // 4, following)
        gc.collect()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < KEPT, f"{after - before} bytes are kept of {inputs // 4} inputs"
    # What a job declares, all that its members have sent, and the copies that answers are.
    assert peak - before < 2 * MEMORY, f"{peak - before} bytes were taken at a time"
    fuzz(inputs // 2, following)


@pytest.mark.filterwarnings("error::RuntimeWarning")  # what diverges is no business of a log
def test_members_that_send_garbage_get_errors_by_name() -> None:
    check(INPUTS)


@pytest.mark.busy
@pytest.mark.long
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_members_that_send_much_garbage_get_errors_by_name() -> None:
    check(MANY_INPUTS)
