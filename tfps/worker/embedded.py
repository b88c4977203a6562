"""The exchange of a single-worker job: no pserver, no sockets, no serialization, no copies."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from tfps.config import Config
from tfps.errors import TfpsError
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
from tfps.trace.capture import Capture, CapturedBucket, Process, Setting
from tfps.trace.recorder import Recorder
from tfps.worker.assembly import Recorded, assemble, named
from tfps.worker.tracer import NOT_RUNNING, RUNNING, Switch


class EmbeddedExchange:
    """Replies to a push at once, on the calling thread, with the pushed payload itself. See `Exchange`."""

    rank = 0
    workers = 1
    slice_bytes = window_bytes = 0

    def __init__(self, config: Config | None = None, recorder: Recorder | None = None) -> None:
        self.config = config or Config()
        self._recorder = recorder or Recorder()
        self._switch = Switch(self._recorder)
        self._specs: list[BucketSpec] = []
        self._state = FailureState()

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
        return list(range(first, len(self._specs)))

    def push(self, bucket: int, payload: Payload | None, on_reply: OnReply, on_part: OnPart | None = None) -> None:
        view = as_bytes(payload)
        spec = check_payload(self._specs, bucket, None if view is None else view.nbytes)
        if (end := self._state.end) is not None:
            on_reply(Reply(error=end))
        elif spec.kind == "gather":
            on_reply(Reply(parts=[b"" if payload is None else payload]))
        else:
            on_reply(Reply(sum=np.zeros(spec.nbytes, np.uint8) if payload is None else payload))

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

    def close(self) -> None:
        self._switch.off()
        self._state.close()
