"""Captures of real jobs, recorded by several workers and pservers: complete, in order, on one clock."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import jobs
import pytest
from jobs import Cluster, Failed, RawWorker, attempt, push, together

from tfps.errors import ClosedError, TfpsError, UnsupportedError, WorkerLostError
from tfps.exchange.interface import BucketSpec
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.server import ParameterServer
from tfps.trace.capture import Capture, CapturedBucket, Span
from tfps.trace.recorder import Recorder
from tfps.wire import frames
from tfps.worker import captures
from tfps.worker.worker import Worker

CHAIN = ("queued", "wire", "aggregate", "reply_queued", "reply_wire")


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
        BucketSpec(("first",), "sum", 5000, "float32", 0),
        BucketSpec(("second/kernel", "second/bias"), "sum", 9000, "float32", 1),
        BucketSpec(("words",), "gather", 0, "uint8", 2),
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
    workers[0].captures.start()
    jobs.poll(lambda: recorders[1].enabled)


def end(workers: list[Worker]) -> Capture:
    return workers[0].captures.stop(
        [CapturedBucket("first", ("a", "b"), 0, 5000)], "run", (0, 1, 2), {"model": "small"}
    )


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


@jobs.OVER_ALL
def test_every_slice_has_a_complete_chain_in_order_of_time_in_every_capture(cluster: Cluster) -> None:
    workers, recorders = started(cluster)
    steps(workers, 1)
    assert not any(recorder.records() for recorder in recorders)
    begin(workers, recorders)
    with pytest.raises(TfpsError, match=r"a capture is being recorded already: end it \(stop_trace\)"):
        workers[0].captures.start()
    steps(workers, 3)
    capture = end(workers)
    check_chains(capture, range(1, 4))
    check_gathers(capture, range(1, 4))

    assert [process.name for process in capture.processes] == ["worker 0", "worker 1", "pserver 0", "pserver 1"]
    assert all(process.host for process in capture.processes)
    assert capture.buckets == (
        CapturedBucket("first", ("a", "b"), 0, 5000),
        CapturedBucket("second/kernel, second/bias", ("second/kernel", "second/bias"), 1, 9000),  # as declared
        CapturedBucket("words", ("words",), 2, 0),
    )
    assert (capture.name, capture.steps) == ("run", (0, 1, 2))
    sizes = {"slice_bytes": 1024, "window_bytes": 4096}
    assert capture.settings == {"policy": "priority", "compression": "none", "model": "small", **sizes}

    steps(workers, 1)
    begin(workers, recorders)
    steps(workers, 2)
    check_chains(end(workers), range(5, 7))


def check_gathers(capture: Capture, steps: range) -> None:
    """Pieces of pushes and of replies, and one sum of all."""
    for step in steps:
        own = [span for span in capture.spans if span.bucket == 2 and span.step == step]
        found = {kind: sorted((s.rank, s.slice, s.nbytes) for s in own if s.kind == kind) for kind in CHAIN}
        pushes = [(0, 0, 1024), (0, 1, 476), (1, 0, 1024), (1, 1, 1024), (1, 2, 452)]
        replies = [(rank, *piece) for rank in range(2) for piece in ((0, 1024), (1, 1024), (2, 1024), (3, 944))]
        assert found["queued"] == found["wire"] == pushes
        assert found["reply_queued"] == found["reply_wire"] == replies
        ((rank, index, nbytes),) = found["aggregate"]
        assert (index, nbytes) == (-1, 4016)
        ends = {r: max(s.end_ns for s in own if (s.kind, s.rank) == ("wire", r)) for r in range(2)}
        (aggregate,) = (span for span in own if span.kind == "aggregate")
        # Not the rank whose end is later: of two that come at once, either may be taken last.
        assert aggregate.begin_ns == ends[1 - rank]
        assert max(ends.values()) <= aggregate.end_ns <= min(s.begin_ns for s in own if s.kind == "reply_queued")


def test_clocks_that_are_seconds_apart_are_aligned_to_less_than_a_millisecond(cluster: Cluster) -> None:
    shifts = {"w0": 4.0, "w1": -7.5, "p0": 3600.0, "p1": -0.02}
    workers, recorders = started(cluster, shifts)

    def capture(count: int) -> Capture:
        begin(workers, recorders)
        steps(workers, count)
        capture = end(workers)
        for process in capture.processes:
            name = f"{process.role[0]}{process.number}"
            wrong_ns = process.clock_offset_ns - round((shifts["w0"] - shifts[name]) * 1e9)
            assert abs(wrong_ns) <= process.clock_error_ns, f"{name} is {wrong_ns} ns off"
        assert capture.processes[0].clock_error_ns == 0
        return capture

    check_chains(capture(5), range(5))
    # By round trips alone. A busy machine may have no quick one for a while, which the bound says.
    errors_ns = [max(process.clock_error_ns for process in capture(0).processes)]
    while errors_ns[-1] >= 1e6 and len(errors_ns) < 50:
        errors_ns.append(max(process.clock_error_ns for process in capture(0).processes))
    assert errors_ns[-1] < 1e6, errors_ns


def test_only_rank_0_begins_and_ends_captures_and_only_one_that_has_begun(cluster: Cluster) -> None:
    workers, recorders = started(cluster)
    for call in (workers[1].captures.start, lambda: workers[1].captures.stop([], "", (), {})):
        with pytest.raises(UnsupportedError, match="begun and ended by rank 0, for all workers; this is rank 1"):
            call()
    with pytest.raises(TfpsError, match="no capture is being recorded: begin one"):
        end(workers)
    begin(workers, recorders)
    end(workers)
    with pytest.raises(TfpsError, match="no capture is being recorded: begin one"):
        end(workers)
    workers[0].close()
    with pytest.raises(ClosedError):
        workers[0].captures.start()


def test_a_worker_that_leaves_before_the_end_has_handed_in_what_it_has(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    workers, recorders = started(cluster, {"w1": 2.0})
    begin(workers, recorders)
    steps(workers, 2)
    workers[1].close()
    assert not recorders[1].enabled
    check_chains(end(workers), range(2))
    assert "the capture lacks" not in caplog.text


def test_a_capture_that_rank_0_leaves_ends_everywhere(cluster: Cluster) -> None:
    workers, recorders = started(cluster)
    begin(workers, recorders)
    steps(workers, 1)
    workers[0].close()
    assert not recorders[0].enabled
    jobs.poll(lambda: not recorders[1].enabled)


class Half(NamedTuple):
    """A job of a worker and of one that does as it is told by hand."""

    server: ParameterServer
    recorder: Recorder  # of the pserver
    worker: Worker
    raw: RawWorker


@pytest.fixture
def half(cluster: Cluster) -> Half:
    recorder = Recorder()
    server = cluster.pserver(2, recorder=recorder)
    raw = cluster.raw(server.address, 1).open()
    worker, _ = together(lambda: cluster.worker([server.address], 0), raw.declare)
    assert isinstance(worker, Worker)
    return Half(server, recorder, worker, raw)


def read_trace(raw: RawWorker) -> tuple[int, int]:
    """Number of the capture and whether it begins, of the next TRACE."""
    header, payload = raw.read()
    assert (header.kind, payload) == (frames.Kind.TRACE, b"")
    return header.step, header.index


def test_a_worker_that_hands_in_nothing_is_named_and_left_out(
    half: Half, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "COLLECT_TIMEOUT_S", 0.2)
    half.worker.captures.start()
    assert read_trace(half.raw) == (1, 1)
    capture = half.worker.captures.stop([], "", (), {})
    assert read_trace(half.raw) == (1, 0)
    assert [process.name for process in capture.processes] == ["worker 0", "worker 1", "pserver 0"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the capture lacks the records of rank 1" in caplog.text
    with pytest.raises(ClosedError, match="does not know capture 1, or not any more"):
        upload(half, 1)
    half.worker.captures.start()
    assert read_trace(half.raw) == (2, 1)
    upload(half, 2)
    half.worker.captures.stop([], "", (), {})
    assert len(caplog.records) == 1


def upload(half: Half, number: int) -> None:
    records = pb.Records(number=1, last=True)
    request = pb.UploadRequest(incarnation=half.raw.incarnation, rank=1, number=number, records=records)
    half.raw.pserver.call("Upload", request, jobs.DEADLINE_S)


def test_nobody_waits_for_what_a_worker_that_has_left_can_not_hand_in(
    half: Half, caplog: pytest.LogCaptureFixture
) -> None:
    half.worker.captures.start()
    half.raw.leave()
    started_s = time.monotonic()
    half.worker.captures.stop([], "", (), {})
    assert time.monotonic() - started_s < captures.COLLECT_TIMEOUT_S / 2
    assert "the capture lacks the records of rank 1" in caplog.text


@pytest.mark.parametrize("ended", [False, True])
def test_a_worker_that_dies_meanwhile_is_named(half: Half, ended: bool) -> None:
    half.worker.captures.start()
    failed = Failed(half.worker)
    read_trace(half.raw)

    def stop() -> None:
        half.worker.captures.stop([], "", (), {})

    def die() -> None:
        if ended:
            read_trace(half.raw)  # rank 0 waits for what this one hands in
        half.raw.close()
        failed.wait()
        if not ended:
            stop()

    (error, *_) = [one for one in attempt(stop, die) if one is not None] if ended else attempt(die)
    assert isinstance(error, WorkerLostError)
    assert str(error).startswith("rank 1 (rawhost:")
    assert not half.recorder.enabled
