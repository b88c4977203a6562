"""The transport's interface for the TensorFlow layer: buckets are pushed and come back summed or gathered."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar, get_args

import numpy as np

from tfps.errors import ClosedError, ConfigError, ProtocolError, TfpsError
from tfps.exchange.codecs import Codec, Floats
from tfps.exchange.kinds import ONLY_ON_PSERVERS, BucketKind
from tfps.exchange.requests import Assign, Load, Lookup, RowUpdate, Save, SavedRows
from tfps.exchange.update_spec import UpdateSpec
from tfps.membership.view import View
from tfps.trace.capture import Capture, CapturedBucket, Setting
from tfps.types import Array, Buffer, DType

Payload: TypeAlias = "bytes | bytearray | memoryview | Array"  # C-contiguous; collections.abc.Buffer needs Python 3.12
_T = TypeVar("_T")
BATCHES = "batches"  # the name of the bucket in which ranks tell how many batches each has left


def parse_dtype(name: str) -> DType:
    """The numeric numpy dtype called `name`, also `bfloat16` and other ml_dtypes types if installed, or ConfigError."""
    with contextlib.suppress(ImportError):
        import ml_dtypes  # noqa: F401  # registers its names; a pserver without it serves numpy's dtypes
    try:
        # A text that is no name would be parsed as a description of a structure, which raises all kinds of errors.
        dtype = np.dtype(name if name.isidentifier() else object)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "biufc" and dtype.type.__module__ != "ml_dtypes":
        raise ConfigError(f"dtype must be the name of a numeric numpy dtype, got {name!r}")
    return dtype


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """One bucket as all ranks must declare it. ConfigError: a value is out of range; the message names the field."""

    names: tuple[str, ...]  # of its variables (`("dense/kernel", "dense/bias")`), or one name for anything else
    kind: BucketKind  # see `ByKind`
    nbytes: int  # sum: payload size of every rank; else 0 (sizes may differ by rank and step)
    dtype: str  # numpy dtype name of the items of a sum or a table (`"float32"`); gather: `"uint8"`
    priority: int  # 0 = most urgent
    occasional: bool = False  # not exchanged every step; balanced over pservers apart from the others
    alike: tuple[str, ...] = ()  # names common to all ranks if `names` contain numbers counted per rank; empty: `names`
    codec: Codec | None = None  # of the slices of a sum of float32 on the wire; None: they travel as they are
    update: UpdateSpec | None = None  # of what pservers keep; None: they only sum. With a codec changes come back
    table: str = ""  # `TableSpec.text`, of a table
    replaces: int | None = None  # the bucket whose rows a table takes, without their slots: it is updated otherwise

    def __post_init__(self) -> None:
        if not isinstance(self.names, tuple) or not self.names:
            raise ConfigError(f"names must be a tuple of at least one name, got {self.names!r}")
        if self.kind not in get_args(BucketKind):
            raise ConfigError(f"kind must be one of {', '.join(get_args(BucketKind))}, got {self.kind!r}")
        if not 0 <= self.priority < 2**32:
            raise ConfigError(f"priority must be from 0 to 2**32 - 1, got {self.priority}")
        item_bytes = parse_dtype(self.dtype).itemsize
        if self.nbytes < 0 or self.nbytes % item_bytes:
            raise ConfigError(f"nbytes must be a multiple of {item_bytes} ({self.dtype}), got {self.nbytes}")
        if self.kind == "gather" and (self.nbytes or item_bytes != 1):
            raise ConfigError(f"a gather must have nbytes 0 and dtype 'uint8', got {self.nbytes} and {self.dtype!r}")
        rows = ONLY_ON_PSERVERS[self.kind]
        if rows != bool(self.table) or (rows and (self.dtype, self.nbytes) != ("float32", 0)):
            raise ConfigError(f"a table must be described and have dtype 'float32' and nbytes 0, got {self}")
        if self.codec is not None and (self.kind == "gather" or self.dtype != "float32"):
            raise ConfigError(
                f"codec '{self.codec}' must be for a sum or a table of float32, got a {self.kind} of {self.dtype}"
            )
        update = self.update
        if update is not None and (self.kind, self.dtype, self.nbytes) != ("sum", "float32", update.nbytes):
            raise ConfigError(f"a bucket with an update must be a sum of its variables in float32, got {self}")

    @property
    def name(self) -> str:
        """For messages: `"dense/kernel, dense/bias"`."""
        return ", ".join(self.names)

    @property
    def common_names(self) -> tuple[str, ...]:
        """Names that are the same on all ranks."""
        return self.alike or self.names

    def __str__(self) -> str:
        size = f" {self.nbytes} bytes {self.dtype}" if self.kind == "sum" else ""
        codec = "" if self.codec is None else f" as {self.codec}"
        update = "" if self.update is None else f" updated by {self.update.text()}"
        table = self.table and f" of {self.table}"
        name = ", ".join(self.common_names)
        instead = "" if self.replaces is None else f" instead of bucket {self.replaces}"
        return f"bucket '{name}' {self.kind}{size}{codec} priority {self.priority}{update}{table}{instead}"


def kept_arrays(spec: BucketSpec) -> int:
    """How many arrays of its size the pservers keep of a bucket with an update, or of one that is compressed."""
    if spec.update is not None:
        return 1 + len(spec.update.slots) + (spec.codec is not None)  # the parameters first, the shadow copy last
    return int(spec.codec is not None and spec.codec.feeds_back)  # the residual


@dataclass(frozen=True, slots=True)
class Link:
    """Measurements of the path to one pserver."""

    pserver: str
    bytes_per_s: float  # payload while something was waiting to be sent; 0: nothing ever waited
    cpu_s_per_step: float | None = None  # of the pserver's process, for all workers; None: unknown
    shared_memory: bool = False  # instead of a network
    late_s: Mapping[int, float] = field(default_factory=dict)  # by rank: delay after the first one's push, mean


@dataclass(frozen=True, slots=True)
class Reply:
    """What comes back for one push; exactly one of the first three fields is set."""

    # uint8 array of the bucket's size, writable, 64-byte aligned, owned by the receiver; embedded: the pushed object.
    sum: Buffer = None
    parts: dict[int, Buffer] | None = None  # by rank, ascending, of those that have contributed
    error: TfpsError | None = None  # why there is no result
    # Whose pushes are in it. Of a rank that was lost meanwhile they may be in some slices of a sum only, unless that is
    # occasional and has no update.
    ranks: Collection[int] = ()
    step: int = 0  # of the bucket, as the exchange counts: a push may take several


OnReply = Callable[[Reply], None]
Wait = Callable[[OnReply], None]
FailureListener = Callable[[TfpsError], None]


class Info(Protocol):
    """What there is to know about an exchange, for reports and pictures."""

    @property
    def embedded(self) -> bool: ...  # one worker and no pserver: what is pushed comes back unchanged
    @property
    def one_host(self) -> bool: ...  # nothing travels: all workers share memory with all pservers, and none can join
    @property
    def run(self) -> str: ...  # tells this run of the job from others, the same on all ranks; empty if embedded
    @property
    def slice_bytes(self) -> int: ...  # maximum size of slices, as tuned; 0 if nothing is cut
    @property
    def window_bytes(self) -> int: ...  # maximum in flight per pserver and direction, as tuned; 0 if there are none

    def owners(self, bucket: int) -> list[int]:
        """Number of the pserver of each slice of `bucket`, as cut now; empty if nothing is cut."""

    def progress(self, bucket: int) -> float:
        """Fraction of the current push of `bucket` that has come back, 0 to 1."""

    def links(self) -> list[Link]:
        """Measurements of the paths to the pservers. Raises TfpsError if one does not answer."""


class State(Protocol):
    """What lasts from one step of a bucket to the next.

    Pservers keep arrays of a bucket with an update: 0 is the parameters, then come the update's slots, then, if the
    bucket has a codec, the workers' copy of the parameters. A codec with error feedback keeps a residual on every rank
    and pserver: what it could not express yet. ProtocolError: there is no such part of an array.
    """

    def write(self, bucket: int, array: int, begin: int, values: Payload) -> None:
        """Replaces part of an array that pservers keep, from byte `begin` on; returns when all have it.

        For rank 0, between the last reply to it and its next push, from which on it counts: until then every rank gets
        what was there. Writing array 0 overwrites the workers' copy, too; write that copy last if it must differ.
        """

    def read(self, bucket: int, array: int, begin: int, nbytes: int) -> Array:
        """Part of an array that pservers keep, flat uint8, as of this rank's last reply; see `write`.

        Other ranks need not take part: without this rank's next push nothing changes.
        """

    def steps(self, bucket: int) -> int:
        """How many steps of a bucket have begun; 0 if nothing is sent."""

    def collect_residual(self, bucket: int, on_reply: OnReply) -> None:
        """Takes one step of `bucket`, as every rank must: the reply is the sum of all its residuals.

        After that rank 0 has the sum as its residual, and nobody else has any, as after `set_residual` with this sum in
        a new job of any size. Nothing else of the bucket may be under way. For one thread at a time.
        """

    def set_residual(self, bucket: int, values: Floats) -> None:
        """Makes `values` the residual of `bucket` on rank 0, and 0 that of other ranks."""


class Tables(Protocol):
    """Who takes requests about tables. `on_reply` is as for `Exchange.push`."""

    def lookup(self, request: Lookup, on_reply: OnReply) -> None:
        """`Reply.sum` is [n, dim] of float32, flat uint8."""

    def prefetch(self, request: Lookup) -> Wait | None:
        """Looks up rows for a later step, which may not come; the result waits for them. None: there is no such way."""

    def apply(self, request: RowUpdate, on_reply: OnReply) -> None:
        """Replies, with nothing, once the update has been applied."""

    def save(self, request: Save) -> SavedRows: ...

    def load(self, request: Load) -> SavedRows:
        """ConfigError: the files do not fit, or are damaged."""

    def assign(self, request: Assign) -> None: ...


class Peers(Protocol):
    """What a rank says to the other ranks and asks them, beside its pushes. TfpsError: a pserver does not answer."""

    # Called with a bucket and its step, maybe several times, when a quorum waits for this rank's push; must be short.
    on_awaited: Callable[[int, int], object]

    def quiesce(self) -> None:
        """In mode "async": this rank takes no further step before all ranks have called this, and holds up nobody.

        Its pushes must have been answered, or wait for other ranks. MismatchError: others wait for this rank to take
        its first step, or to assign values as they have.
        """

    def fetch_add(self, counter: str) -> int:
        """Draws a number that no rank has drawn from `counter` (at most 256 characters).

        Each rank's first is its place in the view, the others count up from the number of workers. Costs a round trip.
        """

    def is_awaited(self, bucket: int) -> bool:
        """Whether another rank waits for this rank's push of `bucket`."""

    def extend_deadline(self, bucket: int) -> None:
        """Lets the deadline of the outstanding push of `bucket`, if any, begin anew."""

    def tell_compiling(self, now: bool) -> None:
        """Has those who wait for this rank say that it compiles, as long as it is so `now`."""


class Joining(Protocol):
    """How a worker joins a job under way (a **joining worker**, until it takes part), and how the others let it."""

    @property
    def least(self) -> int: ...  # workers with which training goes on; 0: it needs all

    notified: bool  # joiners have become ready since this was set to False

    @property
    def pending(self) -> bool: ...  # whatever it exchanges comes back to it unchanged

    @property
    def tries_out(self) -> bool: ...  # in `trying_out`

    def lines(self) -> Sequence[str]:
        """The details of the job's declarations without buckets, for a joining worker.

        Waits until the others train, for `Config.step_timeout_s` at most: before, they may declare what this one needs.
        """

    def trying_out(self) -> contextlib.AbstractContextManager[None]:
        """In the block a joining worker may exchange gradients, with nobody."""

    def take_part(self, training: int) -> Sequence[int] | None:
        """Waits until the others let this joining worker take part in training number `training`, from 1.

        Returns the ranks that took part before; None if these are in a later training. WaitTimeoutError: it took too
        long.
        """

    def joiners(self, training: int) -> list[int]:
        """The ranks that wait to take part in it."""

    def begun(self, training: int) -> int:
        """The number of the training that the others are in, for a joining worker that waits for `training`."""

    def admit(self, joiners: Sequence[int]) -> Sequence[int] | None:
        """Lets them take part from the next round of every bucket on; all ranks call it, with nothing under way.

        Returns the ranks that took part before; None if no joining worker is there any more.
        """


class Captures(Protocol):
    """Records captures on all workers and pservers, in their recorders. UnsupportedError on all ranks but 0."""

    def start(self) -> None:
        """Starts recording; returns when all pservers record. Other workers start when told, a moment later.

        TfpsError: a capture is being recorded, or the exchange has failed or was closed.
        """

    def stop(
        self, buckets: Sequence[CapturedBucket], name: str, steps: Sequence[int], settings: Mapping[str, Setting]
    ) -> Capture:
        """Stops recording everywhere and collects the records, in half a minute at most.

        Records that a worker has not uploaded by then are left out, which is logged. Clock offsets are measured here.
        TfpsError: no capture is being recorded, or the exchange has failed meanwhile.

        Args:
            buckets: by id, as users know them; those of higher ids appear as declared.
            settings: in addition to the policy and the sizes of slices and windows.
        """


class Exchange(Protocol):
    """Sums and gathers buckets over all workers of a job."""

    @property
    def rank(self) -> int: ...  # this worker's number, from 0
    @property
    def view(self) -> View: ...  # who takes part in the job now
    @property
    def places(self) -> Sequence[int]: ...  # who does, and whose program has ended, as others' soon do
    @property
    def info(self) -> Info: ...
    @property
    def state(self) -> State: ...
    @property
    def tables(self) -> Tables: ...
    @property
    def peers(self) -> Peers: ...
    @property
    def joining(self) -> Joining: ...
    @property
    def captures(self) -> Captures: ...
    @property
    def failure(self) -> TfpsError | None: ...
    @property
    def paused(self) -> bool: ...  # it waits for pservers: no exchange goes on, and none fails

    def declare(
        self, specs: Sequence[BucketSpec], details: Sequence[str] = (), stop: threading.Event | None = None
    ) -> list[int]:
        """Blocks until every rank has declared the same, then returns the buckets' ids (for `push`).

        Args:
            specs: the buckets; a job may declare several times, every rank in the same order.
            details: free lines that must agree as well (`"variable dense/kernel (64, 10) float32"`); compared first.
            stop: when another thread sets it, the wait ends within a second. Then nothing has been declared, on any
                rank, unless all ranks have come by then: it returns normally.

        Raises:
            InterruptError: the wait was ended by `stop`.
            MismatchError: names the first line that differs and what each rank has.
            WaitTimeoutError: names the ranks missing after `config.step_timeout_s`.
            TfpsError: the exchange failed meanwhile or was closed.
        """

    def push(self, bucket: int, payload: Payload | None, on_reply: OnReply, step_scalars: bytes = b"") -> None:
        """Gives this rank's contribution to the next step of `bucket`; never blocks on the network.

        A push of a bucket whose earlier push is outstanding waits its turn inside the engine. `on_reply` is called
        exactly once, on a receiver thread or (embedded, or after a failure) on the calling one; it must be short and
        may push.

        Args:
            payload: C-contiguous bytes, not modified before the reply. None contributes nothing to a sum (if
                only one rank contributes, and without a codec, the result is bit-identical to its bytes; if none does,
                zeros) and an empty part to a gather.
            step_scalars: `StepScalars.pack`, for a bucket with an update, whose reply is the new parameters. If the
                bucket has a codec, too, the reply is what every rank must add (float32, denormals flushed) to what it
                has of them: then all have the same, bit for bit, and close to the pservers' own parameters. In mode
                "async" the reply is always the parameters, and a push without payload and scalars only reads them.

        """

    def skip(self, buckets: Sequence[int], step: int, on_reply: Callable[[int, Reply], None]) -> bool:
        """Lets others go on without this rank: it takes `step` of `buckets`, which have updates, with nothing to give.

        `on_reply` gets the bucket and the reply. False: this rank has pushed one of them, or is about to.
        """

    def add_failure_listener(self, listener: FailureListener) -> None:
        """Calls `listener` once when the exchange fails (not when it is closed); at once if it already has."""

    def fail(self, error: TfpsError) -> None:
        """Fails the exchange from outside: outstanding pushes get `error`, the other workers are told."""

    def close(self, reason: str = "") -> None:
        """Leaves the job, with the `reason` if its program ends early; outstanding pushes get ClosedError."""


def as_bytes(payload: Payload | None) -> memoryview | None:
    """A flat view of the payload's bytes, without a copy. Raises ProtocolError if they are not C-contiguous."""
    if payload is None:
        return None
    # numpy first: memoryviews of zero-size arrays and of exotic dtypes (bfloat16) cannot be cast
    if isinstance(payload, np.ndarray):
        if not payload.flags.c_contiguous:
            raise ProtocolError(f"a payload must be C-contiguous, got an array with strides {payload.strides}")
        return payload.reshape(-1).view(np.uint8).data
    view = memoryview(payload)
    if not view.c_contiguous:
        raise ProtocolError(f"a payload must be C-contiguous, got a buffer with strides {view.strides}")
    return view.cast("B") if view.nbytes else memoryview(b"")


def declared(buckets: Sequence[_T], bucket: int) -> _T:
    """What `buckets` has of the declared bucket with this id. Raises ProtocolError if there is none."""
    if not 0 <= bucket < len(buckets):
        raise ProtocolError(f"bucket must be one of the {len(buckets)} declared ones, got {bucket}")
    return buckets[bucket]


def check_payload(spec: BucketSpec, payload: memoryview | None) -> None:
    """Raises ProtocolError if the payload of a push has the wrong size."""
    if spec.kind == "sum" and payload is not None and payload.nbytes != spec.nbytes:
        raise ProtocolError(f"a payload of bucket '{spec.name}' must have {spec.nbytes} bytes, got {payload.nbytes}")


class FailureState:
    """First failure of an exchange and its listeners; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._listeners: list[FailureListener] = []
        self.failure: TfpsError | None = None
        self._closed = False

    @property
    def end(self) -> TfpsError | None:
        """Why nothing can be pushed any more: the failure, else ClosedError once closed, else None."""
        if self.failure is None and self._closed:
            return ClosedError("the strategy has been closed; train before strategy.close(), or make another strategy")
        return self.failure

    def check(self) -> None:
        """Raises `end`, if there is one."""
        if (end := self.end) is not None:
            raise end

    def fail(self, error: TfpsError) -> bool:
        """Keeps the first error and calls the listeners; False if there was one before, or after `close`."""
        with self._lock:
            if self.failure is not None or self._closed:
                return False
            self.failure = error
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener(error)
        return True

    def close(self) -> bool:
        """Closes; False if it was closed before."""
        with self._lock:
            first, self._closed = not self._closed, True
            return first

    def add_listener(self, listener: FailureListener) -> None:
        with self._lock:
            error = self.failure
            if error is None:
                self._listeners.append(listener)
        if error is not None:
            listener(error)
