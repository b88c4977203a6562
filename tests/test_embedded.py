"""The embedded exchange: what it does beyond test_exchange.py, which it shares with workers."""

from __future__ import annotations

import threading

import numpy as np
from jobs import push

from tfps.embedded import EmbeddedExchange
from tfps.exchange import BucketSpec


def test_the_payload_itself_comes_back_untouched() -> None:
    exchange = EmbeddedExchange()
    total, gathered = exchange.declare(
        [BucketSpec("s", "sum", 8, "float32", 0), BucketSpec("g", "gather", 0, "uint8", 0)]
    )
    payload = np.zeros(2, np.float32)
    pending = push(exchange, total, payload)
    assert pending.wait().sum is payload
    assert len(pending.replies) == 1
    parts = push(exchange, gathered, payload).wait().parts
    assert parts is not None
    assert parts[0] is payload


def test_it_starts_no_threads() -> None:
    before = threading.active_count()
    exchange = EmbeddedExchange()
    (bucket,) = exchange.declare([BucketSpec("s", "sum", 8, "float32", 0)])
    push(exchange, bucket, bytes(8)).wait()
    assert threading.active_count() == before
