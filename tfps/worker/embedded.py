"""The exchange of a single-worker job: no pserver, no sockets, no serialization, no copies."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tfps.config import Config
from tfps.errors import ProtocolError, TfpsError
from tfps.exchange.interface import (
    BucketSpec,
    FailureListener,
    FailureState,
    Link,
    OnPart,
    OnReply,
    Payload,
    Reply,
    as_bytes,
    check_payload,
)
from tfps.exchange.parameter_shard import Delta, ParameterShard
from tfps.exchange.update_spec import StepScalars
from tfps.trace.capture import Capture, CapturedBucket, Process, Setting
from tfps.trace.recorder import Recorder
from tfps.types import Array, Buffer
from tfps.wire.memory import aligned_empty
from tfps.worker.assembly import Recorded, assemble, named
from tfps.worker.tracer import NOT_RUNNING, RUNNING, Switch


class EmbeddedExchange:
    """Replies to a push at once, on the calling thread, with the pushed payload itself. See `Exchange`.

    Buckets with an update are updated here: the reply is a new array. Gradients are never encoded, as nothing travels.
    """

    rank = 0
    workers = 1
    slice_bytes = window_bytes = 0
    run = ""

    def __init__(self, config: Config | None = None, recorder: Recorder | None = None) -> None:
        self.config = config or Config()
        self._recorder = recorder or Recorder()
        self._switch = Switch(self._recorder)
        self._specs: list[BucketSpec] = []
        self._state = FailureState()
        self._counters: dict[str, Iterator[int]] = {}
        self._kept: dict[int, ParameterShard] = {}  # by bucket; a bucket has one push at a time

    @property
    def failure(self) -> TfpsError | None:
        return self._state.failure

    def owners(self, bucket: int) -> list[int]:
        return []

    def progress(self, bucket: int) -> float:
        return 1.0

    def links(self) -> list[Link]:
        return []

    def declare(
        self, specs: Sequence[BucketSpec], details: Sequence[str] = (), stop: threading.Event | None = None
    ) -> list[int]:
        if (end := self._state.end) is not None:
            raise end
        first = len(self._specs)
        self._specs.extend(specs)
        for bucket, spec in enumerate(specs, first):
            if spec.update is not None:
                label, viewed = f"bucket '{spec.name}'", spec.codec is not None
                self._kept[bucket] = ParameterShard(label, spec.update, 0, spec.nbytes, viewed=viewed)
        return list(range(first, len(self._specs)))

    def put(self, bucket: int, number: int, begin: int, values: Payload) -> None:
        self._kept_of(bucket).put(number, begin, as_bytes(values) or b"")

    def get(self, bucket: int, number: int, begin: int, nbytes: int) -> Array:
        return np.frombuffer(self._kept_of(bucket).get(number, begin, nbytes), np.uint8)

    def rest(self) -> None:
        """Nobody else is there."""

    def ticket(self, counter: str) -> int:
        return next(self._counters.setdefault(counter, itertools.count()))

    def _kept_of(self, bucket: int) -> ParameterShard:
        if (end := self._state.end) is not None:
            raise end
        if bucket not in self._kept:
            raise ProtocolError(f"bucket must be one with an update, got {bucket}")
        return self._kept[bucket]

    def push(
        self,
        bucket: int,
        payload: Payload | None,
        on_reply: OnReply,
        on_part: OnPart | None = None,
        numbers: bytes = b"",
    ) -> None:
        view = as_bytes(payload)
        spec = check_payload(self._specs, bucket, None if view is None else view.nbytes)
        if (end := self._state.end) is not None:
            on_reply(Reply(error=end))
        elif spec.kind == "gather":
            on_reply(Reply(parts=[b"" if payload is None else payload]))
        elif spec.update is not None:
            on_reply(Reply(sum=self._updated(bucket, bytes(spec.nbytes) if view is None else view, numbers)))
        else:
            on_reply(Reply(sum=np.zeros(spec.nbytes, np.uint8) if payload is None else payload))

    def wanted(self, bucket: int) -> bool:
        return False

    def renew(self, bucket: int) -> None:
        pass

    def _updated(self, bucket: int, gradient: Buffer, numbers: bytes) -> Array:
        """The new parameters, or their change; a copy, as TensorFlow keeps them while they change here."""
        kept, codec = self._kept[bucket], self._specs[bucket].codec
        kept.take_put()
        new = kept.update(gradient, StepScalars.unpack(numbers, kept.spec))
        copied = aligned_empty(len(new))
        if codec is None:
            copied[:] = np.frombuffer(new, np.uint8)
        else:
            encoded = Delta(codec, kept.worker_view).encode(np.frombuffer(new, np.float32))
            codec.decode(encoded, copied.view(np.float32))
        return copied

    def start_trace(self) -> None:
        if (end := self._state.end) is not None:
            raise end
        if not self._switch.on():
            raise TfpsError(RUNNING)

    def stop_trace(
        self, buckets: Sequence[CapturedBucket], name: str, steps: Sequence[int], settings: Mapping[str, Setting]
    ) -> Capture:
        if not self._switch.off():
            raise TfpsError(NOT_RUNNING)
        recorded = Recorded(Process("worker", 0, socket.gethostname()), self._recorder.records())
        return assemble([recorded], named(buckets, self._specs), name, steps, settings)

    def add_failure_listener(self, listener: FailureListener) -> None:
        self._state.add_listener(listener)

    def fail(self, error: TfpsError) -> None:
        self._state.fail(error)

    def close(self, reason: str = "") -> None:
        self._switch.off()
        self._state.close()
