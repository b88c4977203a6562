"""The exchange of a single-worker job: no pserver, no sockets, no serialization, no copies."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tfps.config import Config
from tfps.errors import ProtocolError, TfpsError
from tfps.exchange import interface
from tfps.exchange.codecs import Floats
from tfps.exchange.interface import (
    BucketSpec,
    FailureListener,
    FailureState,
    Link,
    OnReply,
    Payload,
    Reply,
    Wait,
    as_bytes,
)
from tfps.exchange.kinds import ByKind
from tfps.exchange.parameter_shard import Delta, ParameterShard
from tfps.exchange.requests import Assign, Load, Lookup, Request, RowUpdate, Save, SavedRows
from tfps.exchange.update_spec import StepScalars
from tfps.membership.view import View
from tfps.tables import files
from tfps.tables.spec import TableSpec
from tfps.tables.table import Table
from tfps.trace.recorder import Recorder
from tfps.types import Array, Buffer
from tfps.wire.shared_memory import aligned_empty
from tfps.worker.captures import ProcessCaptures


class EmbeddedInfo:
    """The `Info` of an exchange in which nothing travels."""

    embedded = one_host = True
    run = ""
    slice_bytes = window_bytes = 0

    def owners(self, bucket: int) -> list[int]:
        return []

    def progress(self, bucket: int) -> float:
        return 1.0

    def links(self) -> list[Link]:
        return []


class EmbeddedState:
    """The `State` of buckets with an update. Gradients are never encoded, so no bucket has a residual."""

    def __init__(self, specs: Sequence[BucketSpec], failures: FailureState) -> None:
        self._specs, self._failures = specs, failures
        self._kept: dict[int, ParameterShard] = {}  # by bucket; a bucket has one push at a time

    def declare(self, bucket: int, spec: BucketSpec) -> None:
        """Keeps what the update of a new bucket needs, if it has one."""
        if (update := spec.update) is None:
            return
        label, viewed = f"bucket '{spec.name}'", spec.codec is not None
        self._kept[bucket] = ParameterShard(label, update, 0, spec.nbytes, viewed=viewed)

    def update(self, bucket: int, gradient: Buffer, step_scalars: bytes) -> Array:
        """The new parameters, or their change; a copy, as TensorFlow keeps them while they change here."""
        kept, codec = self._kept[bucket], self._specs[bucket].codec
        kept.take_put()
        new = kept.update(gradient, StepScalars.unpack(step_scalars, kept.spec))
        copied = aligned_empty(len(new))
        if codec is None:
            copied[:] = np.frombuffer(new, np.uint8)
        else:
            encoded = Delta(codec, kept.shadow).encode(np.frombuffer(new, np.float32))
            codec.decode(encoded, copied.view(np.float32))
        return copied

    def write(self, bucket: int, array: int, begin: int, values: Payload) -> None:
        self._kept_of(bucket).put(array, begin, as_bytes(values) or b"")

    def read(self, bucket: int, array: int, begin: int, nbytes: int) -> Array:
        return np.frombuffer(self._kept_of(bucket).get(array, begin, nbytes), np.uint8)

    def _kept_of(self, bucket: int) -> ParameterShard:
        self._failures.check()
        if bucket not in self._kept:
            raise ProtocolError(f"bucket must be one with an update, got {bucket}")
        return self._kept[bucket]

    def steps(self, bucket: int) -> int:
        return 0

    def collect_residual(self, bucket: int, on_reply: OnReply) -> None:
        on_reply(Reply(sum=np.zeros(self._specs[bucket].nbytes, np.uint8)))

    def set_residual(self, bucket: int, values: Floats) -> None:
        pass


class EmbeddedTables:
    """See `Tables`; any thread."""

    def __init__(self, rank: int, failures: FailureState) -> None:
        self._rank, self._failures = rank, failures
        self._updating = threading.Lock()  # guards all below
        self._tables: dict[int, Table] = {}  # by bucket

    def declare(self, bucket: int, spec: BucketSpec) -> None:
        """Has a new table, or an old one with another update."""
        with self._updating:
            if spec.replaces is None:
                self._tables[bucket] = Table(TableSpec.parse(spec.table), label=f"table '{spec.name}'")
            else:
                self._tables[bucket] = self._tables[spec.replaces]
                self._tables[bucket].change(TableSpec.parse(spec.table))

    def prefetch(self, request: Lookup) -> Wait | None:
        return None

    def lookup(self, request: Lookup, on_reply: OnReply) -> None:
        self._answer(request, on_reply, lambda table: table.lookup(request.ids).reshape(-1).view(np.uint8))

    def apply(self, request: RowUpdate, on_reply: OnReply) -> None:
        def apply(table: Table) -> Array:
            scalars = StepScalars.unpack(request.scalars, table.spec.update)
            table.update([(request.ids, request.gradients)], scalars, request.step)
            return np.empty(0, np.uint8)

        self._answer(request, on_reply, apply)

    def _answer(self, request: Request, on_reply: OnReply, answer: Callable[[Table], Array]) -> None:
        reply = Reply(error=self._failures.end)
        if reply.error is None:
            with self._updating:
                reply = Reply(sum=answer(self.table(request.table)), ranks=(self._rank,), step=request.step)
        on_reply(reply)

    def save(self, request: Save) -> SavedRows:
        return files.save(self.table(request.table), request, self._updating)

    def load(self, request: Load) -> SavedRows:
        kept = self.table(request.table)
        with self._updating:
            found = files.load(kept, request)
            kept.follow(request.step)
        return found

    def assign(self, request: Assign) -> None:
        with self._updating:
            self.table(request.table).assign(request.ids, request.rows)

    def table(self, number: int) -> Table:
        if number not in self._tables:
            raise ProtocolError(f"bucket must be a table, got {number}")
        return self._tables[number]


class EmbeddedPeers:
    """The `Peers` of a rank that has none."""

    def __init__(self) -> None:
        self._counters: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self.on_awaited: Callable[[int, int], object] = lambda bucket, step: None

    def quiesce(self) -> None:
        pass

    def fetch_add(self, counter: str) -> int:
        return next(self._counters[counter])

    def is_awaited(self, bucket: int) -> bool:
        return False

    def extend_deadline(self, bucket: int) -> None:
        pass

    def tell_compiling(self, now: bool) -> None:
        pass


class NobodyJoins:
    """The `Joining` of a job of one worker."""

    pending = notified = tries_out = False
    least = 0

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def lines(self) -> Sequence[str]:
        return []

    def trying_out(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def take_part(self, training: int) -> Sequence[int] | None:
        return [self._rank]

    def joiners(self, training: int) -> list[int]:
        return []

    def begun(self, training: int) -> int:
        return training

    def admit(self, joiners: Sequence[int]) -> Sequence[int] | None:
        return None


class EmbeddedExchange:
    """Replies to a push at once, on the calling thread, with the pushed payload itself. See `Exchange`.

    Buckets with an update are updated here: the reply is a new array.
    """

    view = View.first(1)
    places: Sequence[int] = view.ranks

    def __init__(self, config: Config | None = None, recorder: Recorder | None = None, rank: int = 0) -> None:
        self.config, self.rank = config or Config(), rank
        self.specs: list[BucketSpec] = []
        self._failures = FailureState()
        self.info, self.peers, self.joining = EmbeddedInfo(), EmbeddedPeers(), NobodyJoins(self.rank)
        self.state, self.tables = EmbeddedState(self.specs, self._failures), EmbeddedTables(self.rank, self._failures)
        self._declares = ByKind(sum=self.state.declare, gather=self.state.declare, table=self.tables.declare)
        self.captures = ProcessCaptures(recorder or Recorder(), lambda: self.specs, self._failures.check)

    @property
    def paused(self) -> bool:
        return False

    @property
    def failure(self) -> TfpsError | None:
        return self._failures.failure

    def declare(
        self, specs: Sequence[BucketSpec], details: Sequence[str] = (), stop: threading.Event | None = None
    ) -> list[int]:
        self._failures.check()
        ids = list(range(len(self.specs), len(self.specs) + len(specs)))
        self.specs.extend(specs)
        for bucket, spec in zip(ids, specs, strict=True):
            self._declares[spec.kind](bucket, spec)
        return ids

    def push(self, bucket: int, payload: Payload | None, on_reply: OnReply, step_scalars: bytes = b"") -> None:
        view, spec = as_bytes(payload), interface.declared(self.specs, bucket)
        interface.check_payload(spec, view)
        if (end := self._failures.end) is not None:
            on_reply(Reply(error=end))
        elif spec.kind == "gather":
            on_reply(Reply(parts={self.rank: b"" if payload is None else payload}, ranks=(self.rank,)))
        elif spec.update is not None:
            on_reply(Reply(sum=self.state.update(bucket, bytes(spec.nbytes) if view is None else view, step_scalars)))
        else:
            on_reply(Reply(sum=np.zeros(spec.nbytes, np.uint8) if payload is None else payload, ranks=(self.rank,)))

    def skip(self, buckets: Sequence[int], step: int, on_reply: Callable[[int, Reply], None]) -> bool:
        return False

    def add_failure_listener(self, listener: FailureListener) -> None:
        self._failures.add_listener(listener)

    def fail(self, error: TfpsError) -> None:
        self._failures.fail(error)

    def close(self, reason: str = "") -> None:
        self.captures.close()
        self._failures.close()
