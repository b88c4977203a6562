"""What a worker tells and asks its pservers beside its pushes: joining, declaring, what they keep, waits, captures.

Tested in tests/worker/test_client.py, tests/worker/test_waits.py, tests/worker/test_updating.py,
tests/worker/test_async.py, tests/worker/test_worker_starts.py and tests/runtime/test_interrupts.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from google.protobuf.message import Message

from tfps.config import Config
from tfps.errors import InterruptError, ProtocolError, PserverLostError, TfpsError, WaitTimeoutError
from tfps.exchange.interface import BucketSpec, FailureState, Payload, as_bytes, declared
from tfps.exchange.layout import Layout
from tfps.membership.members import Resumed
from tfps.membership.view import Membership, View
from tfps.protos import tfps_pb2 as pb
from tfps.types import Argument, Array
from tfps.wire import control
from tfps.wire.control import STATE_PIECE_BYTES, Pserver
from tfps.wire.reach import trouble
from tfps.wire.shared_memory import Sharing
from tfps.worker.bucket import Push, PushedBucket

logger = logging.getLogger("tfps")
PATIENCE_S = 5.0  # before a wait is logged
_AGAIN_S = 60.0  # before a wait for the same ranks is logged again
_ASK_TIMEOUT_S = 5.0  # for whom a worker waits
_LEAVE_TIMEOUT_S, _CALL_TIMEOUT_S, _TUNE_TIMEOUT_S = 5.0, 10.0, 30.0
_EARLY_S = 1.0  # until a worker asks again whether the job has begun that it is to join
_LOOK_S = 1.0  # interval at which a wait for other ranks checks whether to stop
_ANSWER_MARGIN_S = 10.0  # by how much a call's deadline exceeds the pserver's


class PserverClient:
    """A worker's side of the protocol's calls, its `Peers` and part of its `State`; blocks on the network.

    Any thread, but for `join` and `declare`. Methods raise the error of a pserver that does not answer or refuses, and
    ask nothing any more once the exchange has ended (`failures`). A `rank` of -1: it gets one.
    """

    def __init__(
        self,
        pservers: Sequence[Pserver],
        config: Config,
        buckets: Sequence[PushedBucket],
        failures: FailureState,
        rank: int = -1,
        uid: str = "",
    ) -> None:
        self.pservers = pservers
        # As the first pserver has answered to Join; before that, the only worker's.
        self.membership = Membership(rank, View.first(1, len(pservers)), incarnation="")
        self._config, self._buckets, self._failures = config, buckets, failures
        self.started = 0  # with how many workers the job began
        self.declarations = 0  # so far, on all ranks
        self.uid = uid or uuid.uuid4().hex  # by which pservers tell this worker from others that have had its rank
        self.first_incarnation = ""  # of the job when it began, maybe with other pservers
        self.on_awaited: Callable[[int, int], object] = lambda bucket, step: None  # see Peers

    @property
    def me(self) -> dict[str, Argument]:
        """The fields with which a member signs a request."""
        return {"incarnation": self.membership.incarnation, "rank": self.membership.rank}

    # Joining and leaving

    def join(
        self, job: str, workers: int, memory: Sharing, deadline_s: float, resumed: Resumed | None = None
    ) -> Iterator[pb.JoinReply]:
        """Joins one pserver per item. The first one assigns rank and number of workers, which the others are told.

        `workers` is how many the user says the job has; 0: as many as the pservers say. `resumed`: the job goes on.
        """
        request = pb.JoinRequest(
            protocol_version=control.PROTOCOL_VERSION,
            job=job,
            rank=self.membership.rank,
            workers=workers,
            uid=self.uid,
            host=socket.gethostname(),
            pid=os.getpid(),
            pservers=len(self.pservers),
            settings=control.settings_of(self._config),
            memory=control.memory_message(memory.arena.offer if memory.arena else None),
            resumed=None if resumed is None else pb.Resumed(**dataclasses.asdict(resumed)),
        )
        for index, pserver in enumerate(self.pservers):
            request.pserver_index = index
            with saying(partial(_join_blocked_by, pserver)):
                reply = _joined(pserver, request, deadline_s, self._config.connect_timeout_s)
            pserver.sign(request.uid)
            request.rank, request.workers, request.incarnation = reply.rank, reply.workers, reply.incarnation
            self.started, self.first_incarnation = reply.workers, reply.first_incarnation
            view = View.first(reply.workers, len(self.pservers), self._config.max_workers)
            if resumed is not None:
                view = dataclasses.replace(view, generation=resumed.generation, ranks=resumed.ranks)
            elif reply.candidate:  # as if it took part already
                ranks = tuple(sorted({*reply.present, reply.rank}))
                view = dataclasses.replace(view, generation=reply.generation, ranks=ranks)
            self.membership = Membership(reply.rank, view, reply.incarnation)
            yield reply

    def leave(self, failure: TfpsError | None, reason: str = "") -> None:
        """Tells every pserver that can be reached that this worker leaves; `reason`: why, if others wait for it."""
        if not self.membership.incarnation:
            return  # it has not joined
        farewell = None if failure is None else control.failure_of(failure)
        request = pb.LeaveRequest(**self.me, failure=farewell, reason=reason)

        def tell(pserver: Pserver) -> None:
            with contextlib.suppress(TfpsError):
                pserver.call("Leave", request, _LEAVE_TIMEOUT_S)

        # Together: one that is silent holds up none.
        first, *others = [
            threading.Thread(target=tell, args=[each], name="tfps-farewell", daemon=True) for each in self.pservers
        ]
        for thread in others:
            thread.start()
        first.run()
        for thread in others:
            thread.join()

    # Declaring

    def declare(
        self,
        specs: Sequence[BucketSpec],
        details: Sequence[str],
        timeout_s: float,
        stop: threading.Event | None = None,
        steps: Sequence[int] = (),
    ) -> None:
        """Returns when all ranks have declared the same: on all pservers once all ranks declare, else nowhere.

        `steps`: the first of each bucket, if not 0.
        """
        buckets = list(map(control.bucket_message, specs))
        request = pb.DeclareRequest(**self.me, number=self.declarations, details=details, buckets=buckets, steps=steps)
        for index, pserver in enumerate(self.pservers):
            with saying(partial(self._not_declared, pserver)):
                # What all ranks have declared on the first one must be declared on the others: no `stop` any more.
                self._declare(pserver, request, timeout_s, None if index else stop)
        self.declarations += 1

    def _declare(
        self, pserver: Pserver, request: pb.DeclareRequest, timeout_s: float, stop: threading.Event | None
    ) -> None:
        """Declares on one pserver, in calls of `_LOOK_S`; a call that times out withdraws its declaration."""
        deadline_s, rank = time.monotonic() + timeout_s, self.membership.rank
        while True:
            request.timeout_s = max(min(deadline_s - time.monotonic(), _LOOK_S), 0.0)
            try:
                pserver.call("Declare", request, request.timeout_s + _ANSWER_MARGIN_S)
                return
            except WaitTimeoutError as error:
                if stop is not None and stop.is_set():
                    raise InterruptError(f"rank {rank}: interrupted while it waited for other ranks") from None
                if time.monotonic() >= deadline_s:
                    name = "step_timeout_s" if request.number else "connect_timeout_s"
                    hint = f"; TFPS_{name.upper()} ({name}) sets how long ranks wait for each other"
                    if hint in str(error):  # it is another rank's
                        hint = ""
                    raise WaitTimeoutError(
                        f"pserver {pserver.address}: after {timeout_s:.3g} s {error}{hint}"
                    ) from None

    def _not_declared(self, pserver: Pserver) -> str:
        try:
            missing = _others(self.membership.rank, self._missing(pserver, _ASK_TIMEOUT_S, declaration=True))
        except TfpsError as error:
            return str(error)
        what = "declare the same variables" if self.declarations else "join"
        return f"{', '.join(missing)} to {what}" if missing else ""

    # A job under way

    def declared(self, pserver: int) -> pb.DeclaredReply:
        """See DeclaredReply."""
        return self.pservers[pserver].call("Declared", pb.DeclaredRequest(**self.me), _CALL_TIMEOUT_S)

    def ready(self, training: int) -> pb.ReadyReply:
        """Who may be admitted; see ReadyRequest."""
        request = pb.ReadyRequest(**self.me, training=training)
        return self.pservers[0].call("Ready", request, _CALL_TIMEOUT_S)

    def admit(self, joiners: Sequence[int], timeout_s: float) -> pb.AdmitReply:
        """Lets joiners take part, as all ranks do; returns what the first pserver says."""
        request = pb.AdmitRequest(**self.me, candidates=joiners, timeout_s=timeout_s)
        first, *_ = (pserver.call("Admit", request, timeout_s + _ANSWER_MARGIN_S) for pserver in self.pservers)
        return first

    def goes_on(self, declarations: int) -> None:
        """Takes the number of declarations that the job has had."""
        self.declarations = declarations

    # What pservers keep

    def write(self, bucket: int, array: int, begin: int, values: Payload) -> None:
        view = as_bytes(values) or memoryview(b"")
        for pserver, place, at, size in self._pieces(bucket, array, begin, len(view)):
            request = pb.PutRequest(**place, values=bytes(view[at : at + size]))
            self._call_of_state(pserver, "Put", request)

    def read(self, bucket: int, array: int, begin: int, nbytes: int) -> Array:
        found = np.empty(nbytes, np.uint8)
        for pserver, place, at, size in self._pieces(bucket, array, begin, nbytes):
            values = self._call_of_state(pserver, "Get", pb.GetRequest(**place, nbytes=size)).values
            if len(values) != size:
                raise ProtocolError(f"Get must return {size} bytes, got {len(values)}")
            found[at : at + size] = np.frombuffer(values, np.uint8)
        return found

    def _call_of_state(self, pserver: Pserver, name: str, request: Message) -> Argument:
        limit_s = self._config.step_timeout_s
        return pserver.call_while(lambda: self._failures.end is None, name, request, limit_s)

    def _pieces(
        self, bucket: int, array: int, begin: int, nbytes: int
    ) -> Iterator[tuple[Pserver, dict[str, Argument], int, int]]:
        """Per call: its pserver, the place there, and where the bytes are in the part of the bucket, and how many."""
        self._failures.check()
        target = declared(self._buckets, bucket)
        name, size, end = target.spec.name, target.spec.nbytes, begin + nbytes
        if begin < 0 or end > size:
            raise ProtocolError(f"bucket '{name}' has {size} bytes, got {begin} to {end}")
        # Buckets with an update are never cut anew.
        for index, (part, owner) in enumerate(zip(target.cutting.slices, target.cutting.owners, strict=True)):
            first, last = max(begin, part.offset), min(end, part.offset + part.nbytes)
            for start in range(first, last, STATE_PIECE_BYTES):
                place = {**self.me, "bucket": bucket, "slice": index, "number": array, "begin": start - part.offset}
                yield self.pservers[owner], place, start - begin, min(STATE_PIECE_BYTES, last - start)

    # Other ranks

    def quiesce(self) -> None:
        self._failures.check()
        self._notify("Rest", pb.RestRequest(**self.me), self._config.step_timeout_s)

    def _notify(self, name: str, request: Message, timeout_s: float) -> None:
        for pserver in self.pservers:
            pserver.call(name, request, timeout_s)

    def fetch_add(self, counter: str) -> int:
        self._failures.check()
        request = pb.TakeRequest(**self.me, counter=counter)
        return int(self.pservers[0].call("Take", request, self._config.step_timeout_s).number)

    def follow(self, counter: str, count: int) -> None:
        """The counter goes on after `count` numbers, the last of which this rank has drawn."""
        request = pb.TakeRequest(**self.me, counter=counter, follows=count)
        self.pservers[0].call("Take", request, self._config.step_timeout_s)

    def is_awaited(self, bucket: int) -> bool:
        self._failures.check()
        owner = self.pservers[declared(self._buckets, bucket).cutting.owners[0]]  # all slices are pushed together
        missing = self._missing(owner, self._config.step_timeout_s, bucket=bucket)
        return len(_others(self.membership.rank, missing)) < len(missing)

    def extend_deadline(self, bucket: int) -> None:
        target = declared(self._buckets, bucket)
        with target.lock:
            if target.current is not None:
                target.current.started_s = time.monotonic()

    def tell_compiling(self, now: bool) -> None:
        self._failures.check()
        for pserver in self.pservers:
            with contextlib.suppress(TfpsError):  # an older one does not know this call: a log line must fail no job
                pserver.call("Busy", pb.BusyRequest(**self.me, what=int(now)), _ASK_TIMEOUT_S)

    def holdups(self, number: int, push: Push) -> dict[str, list[str] | TfpsError]:
        """The ranks that those pservers wait for that still owe replies to `push`, or why one does not answer."""
        bucket, answers = self._buckets[number], dict[str, list[str] | TfpsError]()
        with bucket.lock:
            owners = sorted({owner for index, owner in enumerate(bucket.cutting.owners) if index not in push.arrived})
        for pserver in (self.pservers[owner] for owner in owners):
            try:
                answers[pserver.address] = self._missing(pserver, _ASK_TIMEOUT_S, bucket=number)
            except TfpsError as error:
                answers[pserver.address] = error
        return answers

    def _missing(self, pserver: Pserver, timeout_s: float, **what: Argument) -> list[str]:
        return list(pserver.call("Waiting", pb.WaitingRequest(**self.me, **what), timeout_s).missing)

    # Measuring and tuning

    def loads(self) -> list[tuple[float, dict[int, float]]]:
        """The CPU time (s) of each pserver's process, and how much later than the first rank each rank pushes.

        The latter is the mean delay of a slice (s), by rank.
        """
        replies = [pserver.call("Status", pb.StatusRequest(details=True), _CALL_TIMEOUT_S) for pserver in self.pservers]
        return [
            (
                reply.cpu_s,
                {each.rank: each.wait_s / each.received_slices for each in reply.members if each.received_slices},
            )
            for reply in replies
        ]

    def members(self, timeout_s: float) -> list[Sequence[pb.MemberStatus]]:
        """All workers, as each pserver sees them."""
        request = pb.StatusRequest(details=True)
        return [pserver.call("Status", request, timeout_s).members for pserver in self.pservers]

    def tune(self, layout: Layout) -> None:
        """Tells all pservers, and through them all workers, of a layout; see Layout in protos/tfps.proto."""
        self._notify("Tune", pb.TuneRequest(**self.me, layout=control.layout_message(layout)), _TUNE_TIMEOUT_S)

    # Captures; see Records in protos/tfps.proto

    def trace(self, number: int, on: bool) -> None:
        """Begins or ends a capture on all pservers."""
        self._failures.check()
        self._notify("Trace", pb.TraceRequest(**self.me, number=number, on=on), _CALL_TIMEOUT_S)

    def collect(self, number: int, timeout_s: float) -> list[pb.Records]:
        """All records of a capture that come within `timeout_s`."""
        found: list[pb.Records] = []
        deadline_s = time.monotonic() + timeout_s
        for pserver in self.pservers:
            more = True
            while more:
                left_s = max(deadline_s - time.monotonic(), 0.0)
                request = pb.CollectRequest(**self.me, number=number, timeout_s=left_s)
                reply = pserver.call("Collect", request, left_s + _CALL_TIMEOUT_S)
                if more := reply.HasField("records"):
                    found.append(reply.records)
        return found

    def upload(self, number: int, records: pb.Records, timeout_s: float) -> None:
        """Gives the first pserver a part of this worker's records."""
        self.pservers[0].call("Upload", pb.UploadRequest(**self.me, number=number, records=records), timeout_s)


def _others(rank: int, ranks: Sequence[str]) -> list[str]:
    """`ranks` as pservers name them without `rank`, this worker, whose message may still be in flight."""
    return [each for each in ranks if not each.startswith(f"rank {rank} ")]


class WaitLog:
    """Says whom pushes wait for, in the log and in the error of one that has waited for too long. For one thread."""

    def __init__(self, client: PserverClient, buckets: Sequence[PushedBucket]) -> None:
        self._client, self._buckets = client, buckets
        self._asked_s = float("-inf")
        self._said, self._said_s = "", 0.0  # whom the last log line named, and when

    def overdue(self, limit_s: float) -> TfpsError | None:
        """The error of a push that has waited for longer than `limit_s`, naming the ranks it waits for."""
        for number, bucket in enumerate(list(self._buckets)):
            with bucket.lock:
                push = bucket.current
            if push is None or time.monotonic() - push.started_s <= limit_s:
                continue
            blame = [
                str(said)
                if isinstance(said, TfpsError)
                else f"pserver {address} waits for {', '.join(said) or 'nobody: its replies do not arrive'}"
                for address, said in self._client.holdups(number, push).items()
            ]
            what = f"bucket '{bucket.spec.name}' step {push.step}: no result within {limit_s:.3g} s"
            return WaitTimeoutError(f"{what}; {'; '.join(blame)}")
        return None

    def look(self) -> None:
        """Logs whom the oldest push waits for if it takes too long, unless the same was logged recently."""
        now_s = time.monotonic()
        waiting = [(push, each) for each in enumerate(list(self._buckets)) if (push := each[1].current) is not None]
        if not waiting:
            return
        push, (number, bucket) = min(waiting, key=lambda each: each[0].started_s)
        if now_s - max(push.started_s, self._asked_s) < PATIENCE_S:
            return
        self._asked_s, started_s = now_s, push.started_s
        answers = self._client.holdups(number, push)
        named = [said for said in answers.values() if not isinstance(said, TfpsError)]
        whom = ", ".join(_others(self._client.membership.rank, sorted(set(itertools.chain(*named)))))
        silent = [address for address, said in answers.items() if isinstance(said, PserverLostError)]
        if silent:
            whom = f"pserver {', '.join(silent)}, which does not answer"
        elif not whom and len(named) == len(answers):
            whom = f"the network: slices are on their way to or from pserver {', '.join(answers)}"
        if not whom or bucket.current is not push or (whom == self._said and now_s < self._said_s + _AGAIN_S):
            return
        self._said, self._said_s = whom, now_s
        name, *more = bucket.spec.names
        what = f"{name}{f' and {len(more)} more' if more else ''}"
        logger.warning("tfps: waits for %s; %.0f s so far, step %d of %s", whom, now_s - started_s, push.step, what)


@contextlib.contextmanager
def saying(whom: Callable[[], str]) -> Iterator[None]:
    """Logs `tfps: waits for <whom>` once if the block takes too long; asks, on a thread, until `whom` is not ""."""
    over = threading.Event()

    def say() -> None:
        while not over.wait(PATIENCE_S):
            with contextlib.suppress(Exception):  # a missing log line must not fail the job
                if (text := whom()) and not over.is_set():
                    logger.warning("tfps: waits for %s", text)
                    return

    thread = threading.Thread(target=say, name="tfps-patience", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * _ASK_TIMEOUT_S)


def _joined(pserver: Pserver, request: pb.JoinRequest, deadline_s: float, limit_s: float) -> pb.JoinReply:
    """Joins, again while the job has not begun, which this worker is to join later."""
    while True:
        try:
            return pserver.join(request, max(deadline_s - time.monotonic(), 0.1), limit_s)
        except WaitTimeoutError:
            if time.monotonic() + _EARLY_S > deadline_s:
                raise
            time.sleep(_EARLY_S)


def _join_blocked_by(pserver: Pserver) -> str:
    """Why `pserver` does not answer a Join, "" if it is about to."""
    try:
        status = pserver.call("Status", pb.StatusRequest(details=True), _ASK_TIMEOUT_S)
    except TfpsError:
        why = trouble(pserver.address)
        return f"pserver {pserver.address}, which does not answer{why and f' ({why})'}; is tfps_pserver running there?"
    members = ", ".join(f"rank {m.rank} ({m.host}:{m.pid})" for m in status.members if m.state != "departed")
    return f"pserver {pserver.address}, where an earlier job has not ended: {members} is there" if members else ""
