"""The embedded exchange: what it does beyond test_interface.py, which it shares with workers."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from jobs import push

from tfps.errors import TfpsError
from tfps.exchange.interface import BucketSpec
from tfps.trace.capture import CapturedBucket, Span
from tfps.trace.recorder import Recorder
from tfps.worker.embedded import EmbeddedExchange


def test_the_payload_itself_comes_back_untouched() -> None:
    exchange = EmbeddedExchange()
    total, gathered = exchange.declare(
        [BucketSpec(("s",), "sum", 8, "float32", 0), BucketSpec(("g",), "gather", 0, "uint8", 0)]
    )
    payload = np.zeros(2, np.float32)
    pending = push(exchange, total, payload)
    assert pending.wait().sum is payload
    assert len(pending.replies) == 1
    parts = push(exchange, gathered, payload).wait().parts
    assert parts is not None
    assert parts[0] is payload


def test_it_starts_no_threads() -> None:
    before = set(threading.enumerate())
    exchange = EmbeddedExchange()
    (bucket,) = exchange.declare([BucketSpec(("s",), "sum", 8, "float32", 0)])
    push(exchange, bucket, bytes(8)).wait()
    assert set(threading.enumerate()) <= before  # those of earlier tests may end meanwhile


def test_a_capture_has_what_was_recorded_in_the_process() -> None:
    recorder = Recorder()
    exchange = EmbeddedExchange(recorder=recorder)
    exchange.declare([BucketSpec(("a", "b"), "sum", 8, "float32", 0)])
    for _ in range(2):
        with pytest.raises(TfpsError, match="no capture is being recorded"):
            exchange.captures.stop([], "run", (), {})
        exchange.captures.start()
        with pytest.raises(TfpsError, match="a capture is being recorded already"):
            exchange.captures.start()
        recorder.span("update", 5, 7, step=3, bucket=0)
        capture = exchange.captures.stop([], "run", (3,), {"model": "small"})
        recorder.span("update", 5, 7, step=3, bucket=0)
        assert capture.spans == (Span("update", 0, "updates", 5, 7, 3, 0, rank=0),)
        assert capture.buckets == (CapturedBucket("a, b", ("a", "b"), 0, 8),)
        assert [process.name for process in capture.processes] == ["worker 0"]
    exchange.captures.start()
    exchange.close()
    assert not recorder.enabled
