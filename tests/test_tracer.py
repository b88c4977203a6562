"""Captures of real jobs, recorded by several workers and pservers: complete, in order, on one clock."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import jobs
import pytest
from jobs import Cluster, push, together

from tfps.capture import Bucket, Capture, Span
from tfps.exchange import BucketSpec
from tfps.trace import Recorder
from tfps.worker import Worker

CHAIN = ("queued", "wire", "aggregate", "reply_queued", "reply_wire")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def shifted(seconds: float) -> Callable[[], int]:
    """A clock of another host."""
    return lambda: time.monotonic_ns() + round(seconds * 1e9)


def started(cluster: Cluster, shifts: dict[str, float] | None = None) -> tuple[list[Worker], list[Recorder]]:
    """Two workers and two pservers with two buckets and a gather, and the workers' recorders."""
    clocks = {name: shifted((shifts or {}).get(name, 0.0)) for name in ("w0", "w1", "p0", "p1")}
    addresses = [cluster.pserver(2, recorder=Recorder(clock=clocks[name])).address for name in ("p0", "p1")]
    recorders = [Recorder(clock=clocks[name]) for name in ("w0", "w1")]
    workers = together(
        *(functools.partial(cluster.worker, addresses, rank, recorder=recorders[rank]) for rank in range(2))
    )
    specs = [
        BucketSpec("first", "sum", 5000, "float32", 0),
        BucketSpec("second/kernel, second/bias", "sum", 9000, "float32", 1),
        BucketSpec("words", "gather", 0, "uint8", 2),
    ]
    together(*(functools.partial(worker.declare, specs) for worker in workers))
    return workers, recorders


def steps(workers: list[Worker], count: int) -> None:
    for _ in range(count):
        pending = [
            push(worker, bucket, bytes(size) if bucket < 2 else bytes(1500 + 1000 * worker.rank))
            for worker in workers
            for bucket, size in ((1, 9000), (0, 5000), (2, 0))
        ]
        for one in pending:
            one.wait()


def begin(workers: list[Worker], recorders: list[Recorder]) -> None:
    workers[0].start_trace()
    jobs.poll(lambda: recorders[1].enabled)


def end(workers: list[Worker]) -> Capture:
    return workers[0].stop_trace([Bucket("first", ("a", "b"), 0, 5000)], "run", (0, 1, 2), {"model": "small"})


def chains(capture: Capture) -> dict[tuple[int, int, int, int], dict[str, Span]]:
    """(step, bucket, slice, rank) -> kind -> span, for sums."""
    found: dict[tuple[int, int, int, int], dict[str, Span]] = defaultdict(dict)
    for span in capture.spans:
        if span.kind in CHAIN and span.bucket < 2:
            for rank in range(2) if span.kind == "aggregate" else (span.rank,):
                key = span.step, span.bucket, span.slice, rank
                assert span.kind not in found[key]
                found[key][span.kind] = span
    return found


def check_chains(capture: Capture, steps: range) -> None:
    """Every slice passed everything, in order."""
    found = chains(capture)
    slices = {0: 5, 1: 9}
    assert set(found) == {(s, b, i, r) for s in steps for b in slices for i in range(slices[b]) for r in range(2)}
    for (_, bucket, _, rank), chain in found.items():
        assert set(chain) == set(CHAIN)
        queued, wire, aggregate, reply_queued, reply_wire = (chain[kind] for kind in CHAIN)
        assert queued.end_ns == wire.begin_ns
        assert reply_queued.end_ns == reply_wire.begin_ns
        times = [queued.begin_ns, wire.begin_ns, wire.end_ns, aggregate.end_ns, reply_queued.begin_ns]
        times += [reply_wire.begin_ns, reply_wire.end_ns]
        assert times == sorted(times)
        assert aggregate.begin_ns <= wire.end_ns or aggregate.rank == rank
        assert {span.priority for span in chain.values()} == {bucket}
        assert {span.nbytes for span in chain.values()} <= {1024, 5000 - 4 * 1024, 9000 - 8 * 1024}
        assert len({span.pserver for span in chain.values()}) == 1
        assert {capture.processes[span.process].name for span in (queued, wire)} == {f"worker {rank}"}
        assert {capture.processes[span.process].name for span in (aggregate, reply_queued, reply_wire)} == {
            f"pserver {wire.pserver}"
        }
    for key, chain in found.items():
        both = chain, found[(*key[:3], 1 - key[3])]
        last = max(both, key=lambda one: one["wire"].end_ns)
        assert chain["aggregate"].begin_ns <= last["wire"].end_ns


def test_every_slice_has_a_complete_chain_in_order_of_time(cluster: Cluster) -> None:
    workers, recorders = started(cluster)
    steps(workers, 1)
    begin(workers, recorders)
    steps(workers, 3)
    capture = end(workers)
    check_chains(capture, range(1, 4))
