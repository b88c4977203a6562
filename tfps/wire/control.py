"""Control calls: their names and messages, the channel they share with the streams, and what gRPC's errors mean.

Tested in tests/wire/test_control.py; clocks in tests/worker/test_captures.py and tests/doctor/test_pserver.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, NamedTuple, NoReturn, Protocol, cast, overload

import grpc
import grpc.experimental
from google.protobuf.message import Message

from tfps.compression import NONE
from tfps.config import Config, Security
from tfps.errors import ClosedError, ConnectError, ProtocolError, PserverLostError, TfpsError
from tfps.exchange.codecs import codec_of
from tfps.exchange.interface import BucketSpec
from tfps.exchange.kinds import BucketKind
from tfps.exchange.layout import Layout
from tfps.exchange.update_spec import UpdateSpec
from tfps.protos import tfps_pb2 as pb
from tfps.trace.recorder import RECORD, Recorder
from tfps.types import Argument, Function
from tfps.wire.frames import MAX_FRAME_BYTES, error_code, error_from
from tfps.wire.job_token import JobToken
from tfps.wire.reach import split, trouble, who_answers
from tfps.wire.shared_memory import Offer
from tfps.wire.tls import channel_credentials, diagnose

PROTOCOL_VERSION = 11
SERVICE = "tfps.v1.ParameterServer"
PUSH, PULL = "Push", "Pull"  # the streams, one per direction
MEASURE = "Measure"  # a stream, too; see wire/measuring.py
INCARNATION_KEY, RANK_KEY = "tfps-incarnation", "tfps-rank"  # their metadata
UID_KEY = "tfps-uid"  # metadata of all that a worker sends once it has joined: another one may have its rank by then

STATE_PIECE_BYTES = 4 * 2**20  # of what slices keep, in one call of Put or Get
_RECORDS_BYTES = 50_000 * RECORD.itemsize  # of a capture, in one message
_CLOCK_TIMEOUT_S, _ROUND_TRIPS = 10.0, 20
_OTHERS = {"http": "an HTTP server or a proxy", "data_port": "the data port of one", "other": "another server"}
_GOES_ON_S = 0.2  # between two looks whether a call is wanted still
_LOOK_S = 1.0  # how long a Join may go unanswered before the worker looks whether both ends agree on TLS

_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    # The send queues' window does the flow control, gRPC's own only adds messages; larger HTTP/2 frames are fewer
    # pieces to join. Saves at most a few percent of the CPU (tools/bench.py wire).
    ("grpc.http2.max_frame_size", 2**24 - 1),
    ("grpc.http2.bdp_probe", 0),
    # A host that vanishes without closing its connections is noticed after 30 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER_OPTIONS = [
    *_OPTIONS,
    # A little more than the largest frame: frames.decode names what is wrong, gRPC only breaks the stream.
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES + 1024),
    ("grpc.max_concurrent_streams", 32),  # of one connection; a worker has two streams and a few calls
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    ("grpc.server_handshake_timeout_ms", 5_000),
    # No "max_connection_idle_ms", though strangers may keep connections: a call that begins while it closes one fails.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),  # else the workers' keepalive is taken for abuse
    ("grpc.so_reuseport", 0),  # else a second pserver on the same port starts and takes half of the workers
]
CHANNEL_OPTIONS = [
    *_OPTIONS,
    ("grpc.max_receive_message_length", -1),
    ("grpc.http2.lookahead_bytes", 64 * 2**20),
    ("grpc.enable_http_proxy", 0),  # pservers are inside the cluster
    ("grpc.use_local_subchannel_pool", 1),  # two workers of one process do not share a connection
    (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),  # replies skip a detour through another thread
    ("grpc.enable_retries", 0),  # retries keep a copy of what is sent
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

# What gRPC takes of each call before anybody has looked at it, so a stranger's connection costs 4 MiB at most. What is
# waited for gets all it needs, one round trip later.
_LOOKAHEAD_BYTES, _LOOKAHEAD_OF_STRANGERS = 4 * 2**20, 128 * 1024

_UNARY = (
    *("Join", "Declare", "Put", "Get", "Rest", "Take", "Waiting", "Busy", "Tune"),
    *("Trace", "Clock", "Upload", "Collect", "Status", "Probe", "Leave"),
    *("Declared", "Ready", "Admit", "Regroup", "Offer", "SaveRows", "RestoreRows", "PutRows"),
)
_TYPES: dict[str, tuple[type[Message], type[Message]]] = {
    name: (getattr(pb, f"{name}Request"), getattr(pb, f"{name}Reply")) for name in _UNARY
}
CALLS = frozenset([*_UNARY, PUSH, PULL, MEASURE])  # the names of all that a pserver answers


def server_options(security: Security) -> list[tuple[str, int]]:
    """gRPC's options for a pserver. Where strangers can call, all of them together must not take its memory."""
    # With certificates of workers they cannot; without a job token there are none: whoever calls may join.
    strangers = bool(security.token_file) and not security.tls_ca
    lookahead = _LOOKAHEAD_OF_STRANGERS if strangers else _LOOKAHEAD_BYTES
    return [*_SERVER_OPTIONS, ("grpc.http2.lookahead_bytes", lookahead)]


def method(name: str) -> str:
    return f"/{SERVICE}/{name}"


def request_type(name: str) -> type[Message]:
    """The protobuf class of the requests of a control call."""
    return _TYPES[name][0]


def reply_type(name: str) -> Function:
    """The protobuf class of the replies to a control call."""
    return _TYPES[name][1]


def settings_of(config: Config) -> pb.Settings:
    """The part of the configuration on which all workers must agree, as a message."""
    values = {field.name: getattr(config, field.name) for field in pb.Settings.DESCRIPTOR.fields}
    # A pserver need not know what "auto" starts with.
    values |= {"slice_bytes": config.first_slice_bytes, "window_bytes": config.first_window_bytes}
    return pb.Settings(**{**values, "compression": str(config.compression)})


def memory_message(offer: Offer | None) -> pb.SharedMemory | None:
    return None if offer is None else pb.SharedMemory(host=offer.host, fd=offer.fd, secret=offer.secret)


def config_of(settings: pb.Settings) -> Config:
    """The reverse of `settings_of`, with the first sizes in place of "auto"."""
    values = {field.name: getattr(settings, field.name) for field in settings.DESCRIPTOR.fields}
    unset = {name: None for name in values if getattr(Config, name, 0) is None and not settings.HasField(name)}
    return Config(**{**values, **unset})


def bucket_message(spec: BucketSpec) -> pb.Bucket:
    return pb.Bucket(
        names=spec.common_names,
        kind=spec.kind,
        nbytes=spec.nbytes,
        dtype=spec.dtype,
        priority=spec.priority,
        occasional=spec.occasional,
        codec=NONE if spec.codec is None else spec.codec.name,
        update="" if spec.update is None else spec.update.text(),
        table=spec.table,
        replaces=spec.replaces,
    )


def bucket_of(message: pb.Bucket) -> BucketSpec:
    """A declared bucket. Here, and only here, the texts of its codec and update are parsed."""
    return BucketSpec(
        names=tuple(message.names),
        kind=cast("BucketKind", message.kind),
        nbytes=message.nbytes,
        dtype=message.dtype,
        priority=message.priority,
        occasional=message.occasional,
        codec=codec_of(message.codec or NONE),
        update=UpdateSpec.parse(message.update) if message.update else None,
        table=message.table,
        replaces=message.replaces if message.HasField("replaces") else None,
    )


def layout_message(layout: Layout) -> pb.Layout:
    buckets = sorted(layout.steps)
    steps = [layout.steps[bucket] for bucket in buckets]
    return pb.Layout(slice_bytes=layout.slice_bytes, window_bytes=layout.window_bytes, buckets=buckets, steps=steps)


def layout_of(message: pb.Layout) -> Layout:
    """The reverse of `layout_message`."""
    buckets, steps = message.buckets, message.steps
    if len(buckets) != len(steps):
        raise ProtocolError(f"a layout must have one step per bucket, got {len(steps)} for {len(buckets)} buckets")
    return Layout(message.slice_bytes, message.window_bytes, dict(zip(buckets, steps, strict=True)))


def record_messages(recorder: Recorder, **fields: Argument) -> list[pb.Records]:
    """What a recorder holds, as messages of a few MB; `fields` are those of Records that name its owner."""
    records, size = recorder.records(), _RECORDS_BYTES
    return [
        pb.Records(records=records[at : at + size], last=at + size >= len(records), full=recorder.full, **fields)
        for at in range(0, max(len(records), 1), size)
    ]


def failure_of(error: TfpsError) -> pb.Failure:
    return pb.Failure(code=error_code(error), text=str(error))


class Fallible(Protocol):
    """A reply that may carry an error: all but Leave's."""

    failure: pb.Failure

    def HasField(self, field_name: str) -> bool: ...


def raise_failure(reply: Fallible, prefix: str = "") -> None:
    """Raises the error that a reply carries, if any."""
    if reply.HasField("failure"):
        raise error_from(reply.failure.code, prefix + reply.failure.text)


class Pserver:
    """A worker's connection to one pserver; control calls may come from any thread."""

    def __init__(self, address: str, security: Security = Security()) -> None:  # noqa: B008 (it is immutable)
        self.address = address
        # Called when a connection has broken in a call; may raise a better error than that.
        self.explain: Callable[[], object] = lambda: None
        self.token = JobToken.read(security.token_file)
        self.metadata = self.token.metadata()  # of every call and stream
        self._security = security
        if security.tls_ca:
            self.channel = grpc.secure_channel(address, channel_credentials(security), CHANNEL_OPTIONS)
        else:
            self.channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
        self._calls = {
            name: self.channel.unary_unary(
                method(name), request_serializer=request.SerializeToString, response_deserializer=reply.FromString
            )
            for name, (request, reply) in _TYPES.items()
        }

    def sign(self, uid: str) -> None:
        """From now on calls and streams say which worker is the caller, by the `uid` with which it has joined."""
        self.metadata = (*self.metadata, (UID_KEY, uid))

    def join(self, request: pb.JoinRequest, timeout_s: float, limit_s: float) -> pb.JoinReply:
        """Calls Join, waiting for the pserver to come up: `timeout_s`, the rest of the user's `limit_s`."""
        join = self._calls["Join"]
        try:
            reply = self._answer(join.future(request, timeout=timeout_s, wait_for_ready=True, metadata=self.metadata))
        except grpc.RpcError as error:
            self._raise_stranger(error)
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise ConnectError(f"pserver {self.address}: what answers there is not a tfps pserver") from error
            self._raise_other(error)
            why = trouble(self.address) or f"{error.code().name}: {error.details()}"
            raise ConnectError(
                f"pserver {self.address}: no answer within {limit_s:.3g} s ({why}); is tfps_pserver running there, and "
                "is the address right? TFPS_CONNECT_TIMEOUT_S (connect_timeout_s) sets how long workers wait"
            ) from error
        if reply.protocol_version != PROTOCOL_VERSION:
            raise ConnectError(f"pserver {self.address}: {version_text(reply.protocol_version, PROTOCOL_VERSION)}")
        raise_failure(reply, f"pserver {self.address}: ")
        return reply

    def _answer(self, call: grpc.Future) -> pb.JoinReply:
        """Waits for the answer to `call`, and looks meanwhile whether both ends agree on TLS."""
        agreed = False
        try:
            while True:
                try:
                    reply: pb.JoinReply = call.result(None if agreed else _LOOK_S)
                    return reply
                except grpc.FutureTimeoutError:
                    wrong = self.misunderstanding()
                    if wrong and self.misunderstanding():  # looked at twice: it may just have been stopped
                        raise ConnectError(f"pserver {self.address} {wrong}") from None
                    agreed = wrong == ""
        finally:
            call.cancel()

    def misunderstanding(self) -> str | None:
        """What of TLS keeps the two ends from understanding each other; "" if nothing, None if unknown."""
        return diagnose(self.address, self._security)

    def check_reached(self, error: Exception) -> None:
        """After the `error` of a first call: raises ConnectError if nothing answers there, or something else."""
        if why := trouble(self.address):
            raise ConnectError(
                f"pserver {self.address}: {why}; is tfps_pserver running there, and is the address right?"
            ) from error
        self._raise_other(error)

    def _raise_other(self, error: Exception) -> None:
        """Raises ConnectError if what answers is known to be something else."""
        host, port = split(self.address)
        who, said = who_answers(host, port, _LOOK_S)
        if (name := _OTHERS.get(who)) and not (self._security.tls_ca and who == "other"):  # it may be TLS
            raise ConnectError(
                f"pserver {self.address}: what answers there is not a tfps pserver but {name} (it says {said}): "
                "correct the address; it is that of --port, 7070 by default"
            ) from error

    def _raise_stranger(self, error: grpc.RpcError) -> None:
        """Raises ConnectError if the pserver refuses this client's job token."""
        if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise ConnectError(f"pserver {self.address} {error.details()}") from error

    @overload
    def call(self, name: Literal["Clock"], request: pb.ClockRequest, timeout_s: float) -> pb.ClockReply: ...
    @overload
    def call(self, name: Literal["Collect"], request: pb.CollectRequest, timeout_s: float) -> pb.CollectReply: ...
    @overload
    def call(self, name: Literal["Declared"], request: pb.DeclaredRequest, timeout_s: float) -> pb.DeclaredReply: ...
    @overload
    def call(self, name: Literal["Ready"], request: pb.ReadyRequest, timeout_s: float) -> pb.ReadyReply: ...
    @overload
    def call(self, name: Literal["Admit"], request: pb.AdmitRequest, timeout_s: float) -> pb.AdmitReply: ...
    @overload
    def call(self, name: Literal["Get"], request: pb.GetRequest, timeout_s: float) -> pb.GetReply: ...
    @overload
    def call(self, name: Literal["Probe"], request: pb.ProbeRequest, timeout_s: float) -> pb.ProbeReply: ...
    @overload
    def call(self, name: Literal["Regroup"], request: pb.RegroupRequest, timeout_s: float) -> pb.RegroupReply: ...
    @overload
    def call(self, name: Literal["Status"], request: pb.StatusRequest, timeout_s: float) -> pb.StatusReply: ...
    @overload
    def call(self, name: Literal["Take"], request: pb.TakeRequest, timeout_s: float) -> pb.TakeReply: ...
    @overload
    def call(self, name: Literal["Waiting"], request: pb.WaitingRequest, timeout_s: float) -> pb.WaitingReply: ...
    @overload
    def call(self, name: str, request: Message, timeout_s: float) -> Message: ...

    def call(self, name: str, request: Message, timeout_s: float) -> Message:
        """Makes any other control call; raises the error that the pserver answers, or that `explain` raises."""
        try:
            reply = self._begin(self._calls[name], name, request, timeout_s)
        except grpc.RpcError as error:
            self._end(name, error)
        if name != "Leave":
            raise_failure(reply)
        return reply

    def call_while(self, goes_on: Callable[[], bool], name: str, request: Message, timeout_s: float) -> Message:
        """As `call`, until it `goes_on` no more: who has failed does not wait for a pserver that is silent."""
        call = self._begin(self._calls[name].future, name, request, timeout_s)
        while True:
            try:
                reply = call.result(_GOES_ON_S)
            except grpc.FutureTimeoutError:
                if goes_on():
                    continue
                call.cancel()
                self.explain()
                raise PserverLostError(f"pserver {self.address}: {name} was given up") from None
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                self._end(name, error)
            raise_failure(reply)
            return reply

    def _begin(self, call: Callable[..., Argument], name: str, request: Message, timeout_s: float) -> Argument:
        try:
            return call(request, timeout=timeout_s, metadata=self.metadata)
        except ValueError as error:  # gRPC's, after `close`
            if "Cannot invoke RPC" not in str(error):
                raise
            raise ClosedError(f"pserver {self.address}: {name} came after the connection was closed") from error

    def _end(self, name: str, error: grpc.RpcError | grpc.FutureCancelledError) -> NoReturn:
        """Raises why a call has failed."""
        self._raise_stranger(error)
        self.explain()
        raise lost(self.address, error, f"in {name}") from error

    def close(self) -> None:
        self.channel.close()


def version_text(pserver: int, worker: int) -> str:
    """The message for differing protocol versions."""
    return (
        f"the pserver speaks protocol version {pserver}, the worker version {worker}; "
        "install the same version of tfps on both"
    )


def lost(address: str, error: grpc.RpcError | grpc.FutureCancelledError, when: str) -> PserverLostError:
    """Converts a gRPC error of an established connection."""
    code = error.code() if isinstance(error, grpc.Call) else None
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    return PserverLostError(f"pserver {address}: {code.name if code else 'connection lost'} {when}: {details}")


class ClockOffset(NamedTuple):
    """From the shortest of several round trips."""

    offset_ns: int  # to add to the pserver's times of captures to get this process's
    error_ns: int  # the most by which the two offsets may be wrong
    round_trip_ns: int
    wall_offset_ns: int  # of the times of day


def compare_clocks(pserver: Pserver, clock: Callable[[], int], timeout_s: float = _CLOCK_TIMEOUT_S) -> ClockOffset:
    """Compares this process's clocks, that of captures being `clock` (ns), with a pserver's; `timeout_s` per call."""
    found: list[ClockOffset] = []
    for _ in range(_ROUND_TRIPS):
        before_ns, wall_ns = clock(), time.time_ns()
        there = pserver.call("Clock", pb.ClockRequest(), timeout_s)
        after_ns = clock()
        took_ns = after_ns - before_ns
        wall_offset_ns = wall_ns + took_ns // 2 - there.wall_ns
        offset_ns = (before_ns + after_ns) // 2 - there.time_ns
        found.append(ClockOffset(offset_ns, (took_ns + 1) // 2, took_ns, wall_offset_ns))
    return min(found, key=lambda each: each.round_trip_ns)
