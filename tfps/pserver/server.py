"""A pserver: the gRPC side of `Job`, its streams and the calls of its members."""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import grpc
from google.protobuf.message import Message

from tfps import __version__
from tfps.config import Security, check_address
from tfps.errors import (
    ClosedError,
    ConfigError,
    ConnectError,
    ProtocolError,
    PserverLostError,
    TfpsError,
    WaitTimeoutError,
    WorkerLostError,
)
from tfps.exchange.parameter_shard import ParameterShard
from tfps.exchange.requests import Assign, Load, Save, SavedRows
from tfps.malloc import tune_malloc
from tfps.membership.members import Applicant, Resumed
from tfps.membership.view import View
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.counters import ErrorCounts
from tfps.pserver.data_port import DataPort
from tfps.pserver.guard import Guard, Rate, check_host, parse, reachable, try_to_listen, why_not_listening
from tfps.pserver.job import Job, Session
from tfps.pserver.rendezvous import RendezvousHost
from tfps.pserver.slices import OwnedSlice
from tfps.pserver.table_slice import TableSlice
from tfps.tables.messages import decode_plain_ids, decode_rows
from tfps.threads import DaemonPool
from tfps.trace.recorder import Recorder
from tfps.types import Argument
from tfps.wire import control, frames, shared_memory
from tfps.wire.connection import outgoing, receive
from tfps.wire.frames import error_from
from tfps.wire.job_token import JobToken
from tfps.wire.measuring import Measuring
from tfps.wire.shared_memory import Attached, Offer, machine_bytes, resident_bytes
from tfps.wire.tls import server_credentials

logger = logging.getLogger("tfps")
_MAX_JOIN_S = 600.0  # that a Join may wait, whatever its client says
_MAX_ROWS_S = 24 * 3600.0  # that a call about a whole table may wait for other ranks
_MAX_WAIT_S = 60.0  # of another call
_JOIN_MARGIN_S = 1.0  # before a caller's deadline: tells it why it waits instead of timing out
_PROBES_PER_S, _PROBES = 20.0, 200.0  # that are answered, in the long run and at once
_OF_APPLICANT = ("job", "workers", "uid", "host", "pid", "pserver_index", "pservers", "incarnation")  # fields of a Join
_UNREAD_S = 5.0  # for a worker to read the rest of a stream over gRPC whose job is over: until then it holds threads
_RANK_DIGITS = 10  # of a rank, at most
_ASKED_AGAIN = ("Declare", "Join")  # calls that wait in pieces: one that ends without the others is no error
_MEASURED_PER_S, _MEASURED = 0.2, 32.0  # measurements, one direction each, in the long run and at once


class ParameterServer:
    """Serves jobs of `workers` workers, one after another, from construction until `stop`.

    Port 0 picks a free one; with TLS there is no data port. `job`: the only name served. `max_memory`: bytes that jobs
    may declare, by default the machine's. `on_job` is called with "job begins" when all workers have joined, with
    "worker N takes part" when one has joined that came later, and with "job ends", "job fails" or "job moves" (to other
    pservers) before any of them hears of that.
    ConfigError: an argument, a port, or a file of `security` cannot be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        workers: int,
        job: str = "",
        data_port: int = 0,
        security: Security = Security(),  # noqa: B008 (it is immutable)
        max_memory: int | None = None,
        recorder: Recorder | None = None,
        on_job: Callable[[str], object] = lambda what: None,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"workers must be at least 1, got {workers}")
        if max_memory is not None and max_memory < 1:
            raise ConfigError(f"max_memory must be a positive number of bytes, got {max_memory}")
        if security.tls_cert and data_port:
            raise ConfigError(f"data_port must be 0 with TLS, which data connections do not have, got {data_port}")
        check_host(host, security)
        token = JobToken.read(security.token_file)
        credentials = server_credentials(security) if security.tls_cert else None
        tune_malloc()
        self.workers = workers
        self._job_name, self._on_job = job, on_job
        self._recorder = recorder or Recorder()
        self._started_s = time.monotonic()
        self._measuring = Measuring(lambda: self._job.under_way, Rate(_MEASURED_PER_S, _MEASURED).take)
        self._probe_rate = Rate(_PROBES_PER_S, _PROBES)
        self._errors = ErrorCounts()
        self._rendezvous = RendezvousHost()
        self._max_memory = machine_bytes() if max_memory is None else max_memory
        self._guard = Guard(token, self._errors.add)
        self._pool = DaemonPool(0, "tfps-server")
        self._make_room(workers)
        self._lock = threading.Lock()  # guards all below
        self._job = self._new_job()
        self._jobs = 0
        self.stopped = False
        self._server = grpc.server(self._pool, interceptors=(self._guard,), options=control.server_options(security))
        self._server.add_generic_rpc_handlers((self._handlers(),))
        where = f"[{host}]" if ":" in host else host
        try:
            try_to_listen(host, port)
            add = self._server.add_insecure_port
            if credentials is not None:
                add = functools.partial(self._server.add_secure_port, server_credentials=credentials)
            self.port = int(add(f"{where}:{port}"))
        except (OSError, RuntimeError) as error:
            reason = why_not_listening(error, port) if isinstance(error, OSError) else "the port is not available"
            raise ConfigError(f"cannot listen on {where}:{port}: {reason}") from error
        self.address = f"{reachable(host)}:{self.port}"
        self._data: DataPort | None = None
        self._data_port = 0
        if credentials is None:
            refused = functools.partial(self._errors.add, "Push")
            self._data = DataPort(host, data_port, token, self._open_session, refused, self._measuring.connection)
            self._data_port = self._data.port
        self._server.start()

    def _make_room(self, workers: int) -> None:
        """Serves jobs of up to so many workers from now on."""
        self._join_rate = Rate(10 * workers + 40, 20 * workers + 100)
        self._joining = threading.Semaphore(2 * workers)  # joins that may wait for the end of a job
        # A worker holds two threads for its streams and maybe one for a call; twice that, as a new job's workers may
        # come before the last job's stream threads have ended.
        self._pool.limit = 6 * workers + 8
        self._room = workers

    def _new_job(self) -> Job:
        view = View.first(self.workers)
        return Job(view, self._job_name, self._recorder, self._errors, self._max_memory, self._on_job)

    def stop(self, grace_s: float = 2.0) -> None:
        """Fails the current job, if any, and stops the server. May be called again."""
        with self._lock:
            self.stopped = True
            job = self._job
        job.fail(PserverLostError(f"pserver {self.address} was stopped"))
        self._measuring.close()
        stopping = self._server.stop(grace_s)
        if self._data is not None:
            self._data.close(grace_s)
        stopping.wait()
        self._guard.close()
        self._pool.shutdown(wait=False)

    def status(self) -> pb.StatusReply:
        """The pserver's status, computed on request: nothing is measured in between."""
        with self._lock:
            job, jobs = self._job, self._jobs
        status = job.status()
        if not job.under_way and (met := self._rendezvous.under_way):
            status.state, status.reason = "rendezvous", f"{status.reason}; {met}" if status.reason else met
        status.version, status.jobs, status.memory_bytes = __version__, jobs, resident_bytes()
        status.cpu_s, status.uptime_s = time.process_time(), time.monotonic() - self._started_s
        status.errors.extend(self._errors.all())
        return status

    def _handlers(self) -> grpc.GenericRpcHandler:
        calls: dict[str, Callable[..., Message]] = {
            "Join": self._join,
            "Clock": lambda *_: pb.ClockReply(time_ns=self._recorder.clock(), wall_ns=time.time_ns()),
            "Status": lambda request, _: (
                self.status() if request.details else pb.StatusReply(cpu_s=time.process_time())
            ),
            "Probe": self._probe,
            "Leave": self._leave,
            "Regroup": self._regroup,
            "Offer": self._offer,
        }
        calls |= {name: functools.partial(self._of_job, name) for name in _JOB_CALLS}
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                functools.partial(self._answer, name, call), response_serializer=lambda reply: reply.SerializeToString()
            )
            for name, call in calls.items()
        }
        handlers[control.PUSH] = grpc.stream_unary_rpc_method_handler(self._push)
        handlers[control.PULL] = grpc.unary_stream_rpc_method_handler(self._pull)
        handlers[control.MEASURE] = grpc.stream_stream_rpc_method_handler(self._measuring.call)
        return grpc.method_handlers_generic_handler(control.SERVICE, handlers)

    def _job_of(self, incarnation: str) -> Job:
        with self._lock:
            if incarnation and hmac.compare_digest(incarnation.encode(), self._job.incarnation.encode()):
                return self._job
        raise ClosedError("the pserver does not know this job, or not any more")

    # Control calls; on gRPC's threads

    def _answer(
        self, name: str, call: Callable[..., Message], request: bytes, context: grpc.ServicerContext
    ) -> Message:
        try:
            reply = call(parse(name, request), context)
        except Exception as error:
            failure = control.failure_of(error if isinstance(error, TfpsError) else self._failed(f"in {name}", error))
            reply = control.reply_type(name)()
            if name in ("Join", "Probe"):  # a refusal says it, too
                reply.protocol_version = control.PROTOCOL_VERSION
            if name != "Leave":
                reply.failure.CopyFrom(failure)
                if not (name in _ASKED_AGAIN and isinstance(error, WaitTimeoutError)):
                    self._errors.add(name, error_from(failure.code, failure.text))
        return reply

    def _join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinReply:
        if request.protocol_version != control.PROTOCOL_VERSION:
            raise ConnectError(control.version_text(control.PROTOCOL_VERSION, request.protocol_version))
        if wait_s := self._join_rate.take():
            raise ConnectError(f"too many workers join this pserver at once; the next may in {wait_s:.2g} s")
        config = control.config_of(request.settings)
        applicant = Applicant(
            rank=request.rank if request.rank >= 0 else None,
            settings={field.name: getattr(request.settings, field.name) for field in pb.Settings.DESCRIPTOR.fields},
            **{name: getattr(request, name) for name in _OF_APPLICANT},
            resumed=_resumed(request),
        )
        waited = self._wait_for_end(context, applicant)
        with self._lock:
            if self.stopped:
                raise ConnectError("the pserver is stopping")
            if applicant.resumed is None and self._job is not waited and self._job.moving.generation is not None:
                raise PserverLostError(f"the job on pserver {self.address} is about to go on with other pservers")
            if self._job.abandoned:
                self._job.fail(WorkerLostError("all workers died before they had opened their streams"))
            if self._job.over:
                self._job = self._new_job()
            first = not self._job.incarnation
            joined = self._job.join(applicant, config, _attached(request))
            if applicant.resumed is not None:
                self._rendezvous.resume(applicant.resumed.incarnation)
            self._jobs += first
            if (most := config.max_workers or 0) > self._room:
                self._make_room(most)
            return pb.JoinReply(
                protocol_version=control.PROTOCOL_VERSION,
                rank=joined.rank,
                shared_memory=joined.shared_memory,
                candidate=joined.pending,
                present=joined.present,
                generation=joined.generation,
                workers=self.workers,
                incarnation=self._job.incarnation,
                first_incarnation=self._job.moving.first_incarnation,
                data_port=self._data_port,
            )

    def _regroup(self, request: pb.RegroupRequest, context: grpc.ServicerContext) -> pb.RegroupReply:
        with self._lock:
            job, stopped = self._job, self.stopped
        own = job.moving.is_of(request.incarnation)
        known = own or self._rendezvous.knows(request.incarnation)
        if request.asks:
            if own:
                job.elastic.check_present(request.rank, _uid(context))
            busy = job.under_way and not own
            workers, addresses = self.workers, job.moving.addresses
            return pb.RegroupReply(
                known=known,
                busy=busy or stopped,
                workers=workers,
                pservers=addresses,
                moving=not stopped and (job.moving.generation is not None or bool(self._rendezvous.under_way)),
            )
        if stopped:
            raise PserverLostError(f"pserver {self.address} is stopping")
        if own:
            job.elastic.check_present(request.rank, _uid(context))

        def begin() -> None:
            if own:  # its other workers come, too
                job.fail(PserverLostError(request.report.reason))
            elif job.under_way:
                raise PserverLostError(f"pserver {self.address} has another job")

        was_of = own or self._rendezvous.was_of(request.incarnation)
        decision = self._rendezvous.meet(request, was_of, _bounded(request.timeout_s), begin)
        return pb.RegroupReply(known=True, decision=decision)

    def _offer(self, request: pb.OfferRequest, context: grpc.ServicerContext) -> pb.OfferReply:
        if request.workers != self.workers:
            raise ConfigError(
                f"pserver {request.address} was started with --workers {request.workers}, pserver {self.address} with "
                f"{self.workers}; start both with the same number"
            )
        check_address(request.address)
        with self._lock:
            job = self._job
        job.moving.offer(request.address)
        return pb.OfferReply()

    def _wait_for_end(self, context: grpc.ServicerContext, applicant: Applicant) -> Job | None:
        """Waits, while a job ends, or for the place of a worker that seems to be lost, for as long as a Join may.

        Returns a job that its workers have not gone on with in time.
        """
        joining = self._joining
        if not joining.acquire(blocking=False):
            raise ConnectError("too many workers wait for the end of this pserver's job")
        try:
            with self._lock:
                job = self._job
            if applicant.resumed is not None:
                job.moving.end_before(applicant.resumed)
            limit_s = min(max((context.time_remaining() or 0.0) - _JOIN_MARGIN_S, 0.0), _MAX_JOIN_S)
            waited = None
            if applicant.resumed is None:
                if (moving := job.moving.generation) is not None:
                    self._rendezvous.expect(job.moving.first_incarnation, moving)
                    waited = job
                self._rendezvous.wait_resumed(limit_s)
                with self._lock:
                    job = self._job
            job.wait_over(limit_s)
            job.elastic.wait_for_place(applicant, limit_s)
            return waited
        finally:
            joining.release()

    def _of_job(self, name: str, request: Argument, context: grpc.ServicerContext) -> Message:
        job = self._job_of(request.incarnation)
        job.elastic.check_present(request.rank, _uid(context))
        fields = _JOB_CALLS[name](job, request)
        reply: Message = control.reply_type(name)(**fields or {})
        return reply

    def _probe(self, request: pb.ProbeRequest, context: grpc.ServicerContext) -> pb.ProbeReply:
        if wait_s := self._probe_rate.take():
            raise ConnectError(f"too many clients probe this pserver at once; the next may in {wait_s:.2g} s")
        return pb.ProbeReply(
            protocol_version=control.PROTOCOL_VERSION,
            version=__version__,
            workers=self.workers,
            job=self._job_name,
            data_port=self._data_port,
            same_host=bool(request.memory.host) and request.memory.host == shared_memory.host(),
            shared_memory=_attached(request) is not None,
        )

    def _leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.LeaveReply:
        failure = error_from(request.failure.code, request.failure.text) if request.HasField("failure") else None
        with contextlib.suppress(ClosedError, WorkerLostError):
            job = self._job_of(request.incarnation)
            job.elastic.check_present(request.rank, _uid(context))
            job.leave(request.rank, failure, request.reason)
        return pb.LeaveReply()

    # Streams

    def _open(
        self, stream: str, context: grpc.ServicerContext, end: Callable[[], object] | None = None
    ) -> Session | TfpsError:
        """The session of a stream that a worker opens; an error is for this worker alone: the job goes on."""
        try:
            metadata = dict(context.invocation_metadata())
            text = str(metadata.get(control.RANK_KEY, ""))
            if not (text.isascii() and text.isdigit() and len(text) <= _RANK_DIGITS):  # else int() may raise
                raise ConnectError(f"metadata {control.RANK_KEY} must be a number, got {text[:20]!a}")
            job, rank = self._job_of(metadata.get(control.INCARNATION_KEY, "")), int(text)
            return Session(job, rank, job.open_stream(rank, stream, end), self._failed)
        except TfpsError as error:
            self._errors.add(stream, error)
            return error

    def _push(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        session = self._open(control.PUSH, context, context.cancel)
        if isinstance(session, TfpsError):
            return frames.encode_error(session)
        session.receive(functools.partial(receive, _until_broken(messages)))
        return b""

    def _pull(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        session = self._open(control.PULL, context)
        if isinstance(session, TfpsError):
            yield frames.encode_error(session)
            return
        unread = threading.Timer(_UNREAD_S, context.cancel)
        unread.daemon = True

        def begin() -> None:
            with contextlib.suppress(RuntimeError):  # no more threads
                unread.start()

        def ended() -> None:
            unread.cancel()
            session.ended()

        session.queue.when_over(begin)
        if not context.add_callback(ended):  # also called if the stream breaks while idle
            ended()
        try:
            yield from outgoing(session.queue)
        except Exception as error:
            what = f"while it sent to rank {session.rank}"
            yield frames.encode_error(error if isinstance(error, TfpsError) else session.fail(error, what))

    def _open_session(self, incarnation: str, rank: int) -> Session:
        """Opens the session of a data connection, which is both streams."""
        job = self._job_of(incarnation)
        job.open_stream(rank, control.PUSH)
        return Session(job, rank, job.open_stream(rank, control.PULL), self._failed)

    def _failed(self, when: str, error: Exception, *, logged: bool = True) -> TfpsError:
        """What to tell the workers of an unexpected error, such as a MemoryError."""
        if logged:
            logger.error("tfps: failed %s", when, exc_info=error)
        return TfpsError(f"pserver {self.address}: failed {when}: {error!r}; its log says where")


# The calls of a job's members: each returns the fields of the reply. All raise TfpsError if the job has failed.

Fields = Mapping[str, object]


def _declare(job: Job, request: pb.DeclareRequest) -> None:
    specs = [control.bucket_of(bucket) for bucket in request.buckets]
    timeout_s = _bounded(request.timeout_s)
    job.declarations.declare(request.rank, request.number, request.details, specs, timeout_s, list(request.steps))


def _put(job: Job, request: pb.PutRequest) -> None:
    owned, parameters = _parameters(job, request)
    nbytes, most = len(request.values), control.STATE_PIECE_BYTES
    if not job.elastic.may_put(request.rank) or nbytes > most or nbytes % 4 or request.begin % 4:
        raise ProtocolError(
            f"a call of Put must be the first rank's, with at most {most} bytes, a multiple of 4 bytes from a multiple "
            f"of 4 on, got {nbytes} bytes from {request.begin} on of rank {request.rank}"
        )
    with owned.lock:
        parameters.put(request.number, request.begin, request.values)


def _get(job: Job, request: pb.GetRequest) -> Fields:
    owned, parameters = _parameters(job, request)
    if request.nbytes > (most := control.STATE_PIECE_BYTES):
        raise ProtocolError(f"a call of Get must ask for at most {most} bytes, got {request.nbytes}")
    with owned.lock:
        return {"values": parameters.get(request.number, request.begin, request.nbytes)}


def _take(job: Job, request: pb.TakeRequest) -> Fields | None:
    if request.follows:
        job.counters.follow(request.counter, request.rank, request.follows)
        return None
    return {"number": job.counters.fetch_add(request.counter, request.rank)}


def _held_table(job: Job, request: Argument, *, meets: bool) -> AbstractContextManager[TableSlice]:
    """The table of a call, which nothing changes meanwhile, once all ranks have come for the same if it `meets`."""
    wait_s = _bounded(request.timeout_s, _MAX_ROWS_S)
    if meets:
        job.rounds.meet_at_table(request.bucket, request.rank, request.id, wait_s)
    return job.rounds.saved_table(request.bucket, request.rank, request.step, wait_s)


def _fields(found: SavedRows, *more: str) -> Fields:
    return {name: getattr(found, name) for name in ("step", "rows", "nbytes", *more)}


def _save_rows(job: Job, request: pb.SaveRowsRequest) -> Fields:
    since = request.since if request.HasField("since") else None
    save = Save(request.bucket, request.step, request.folder, request.name, since, request.before, request.remove)
    with _held_table(job, request, meets=False) as item:
        return _fields(item.save(save, request.rank), "full")


def _restore_rows(job: Job, request: pb.RestoreRowsRequest) -> Fields:
    load = Load(request.bucket, request.step, list(request.folders), request.name, request.id, seed=request.seed)
    with _held_table(job, request, meets=not request.alone) as item:
        return _fields(item.load(load, request.rank), "slots")


def _put_rows(job: Job, request: pb.PutRowsRequest) -> None:
    with _held_table(job, request, meets=True) as item:
        ids = decode_plain_ids(request.ids)
        rows = decode_rows(memoryview(request.values), len(ids), item.table.spec.dim)
        item.assign(Assign(request.bucket, request.step, ids, rows, request.id), request.rank)


_JOB_CALLS: dict[str, Callable[[Job, Argument], Fields | None]] = {
    "Declare": _declare,
    "Waiting": lambda job, request: {
        "missing": job.declarations.undeclared()
        if request.declaration
        else job.rounds.missing(request.bucket, request.rank)
    },
    "Busy": lambda job, request: job.rounds.note_busy(request.rank, request.what),
    "Put": _put,
    "Get": _get,
    "SaveRows": _save_rows,
    "RestoreRows": _restore_rows,
    "PutRows": _put_rows,
    "Rest": lambda job, request: job.rounds.quiesce(request.rank),
    "Take": _take,
    "Declared": lambda job, request: job.declarations.declared(),
    "Ready": lambda job, request: job.elastic.ready(request.rank, request.training),
    "Admit": lambda job, request: job.elastic.admit(
        request.rank, list(request.candidates), _bounded(request.timeout_s)
    ),
    "Tune": lambda job, request: job.declarations.tune(control.layout_of(request.layout)),
    "Trace": lambda job, request: job.trace(request.number, request.on),
    "Upload": lambda job, request: job.recording.upload(request.number, request.rank, request.records),
    "Collect": lambda job, request: {"records": job.recording.collect(request.number, _bounded(request.timeout_s))},
}


def _bounded(wait_s: float, most_s: float | None = None) -> float:
    """How long a call may wait: `wait_s`, if it is a time, up to a bound."""
    most_s = _MAX_WAIT_S if most_s is None else most_s
    return max(wait_s, 0.0) if wait_s < most_s else most_s


def _parameters(job: Job, request: pb.PutRequest | pb.GetRequest) -> tuple[OwnedSlice, ParameterShard]:
    bucket = job.rounds.bucket(request.bucket)
    owned = bucket.slices.get(request.slice)
    if owned is None or owned.parameters is None:
        raise ProtocolError(f"bucket '{bucket.spec.name}' has no slice {request.slice} here that keeps anything")
    return owned, owned.parameters


def _resumed(request: pb.JoinRequest) -> Resumed | None:
    if not request.HasField("resumed"):
        return None
    it = request.resumed
    return Resumed(it.incarnation, it.generation, tuple(it.ranks), tuple(it.pservers), it.reason)


def _attached(request: pb.JoinRequest | pb.ProbeRequest) -> Attached | None:
    """Attaches a worker's memory, if offered and accessible; None: sockets are used."""
    if not request.HasField("memory"):
        return None
    memory = request.memory
    try:
        return Attached(Offer(memory.host, request.pid, memory.fd, memory.secret))
    except OSError:
        return None


def _uid(context: grpc.ServicerContext) -> str:
    """Of the worker that calls, if it says so."""
    return str(dict(context.invocation_metadata()).get(control.UID_KEY, ""))


def _until_broken(messages: Iterator[bytes]) -> Iterator[bytes]:
    """The messages of a stream, until it ends or breaks: gRPC raises then; stream_ended handles that."""
    with contextlib.suppress(Exception):
        yield from messages
