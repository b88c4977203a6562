"""Captures are assembled from what processes recorded by their own clocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from tfps.trace.assembly import Recorded, assemble
from tfps.trace.capture import Capture, CapturedBucket, CapturedView, Process, Span
from tfps.trace.recorder import UNKNOWN, Recorder

BUCKETS = [CapturedBucket("a", ("a",), 0, 8)]
MS = 1_000_000


@dataclass
class Host:
    """A process whose clock is `ahead_ns` of rank 0's, as far as that was measured within `error_ns`."""

    role: str
    number: int
    ahead_ns: int = 0
    measured_ns: int = 0
    error_ns: int = MS

    def __post_init__(self) -> None:
        self.recorder = Recorder()
        self.recorder.start()

    def recorded(self) -> Recorded:
        process = Process(self.role, self.number, "host", self.measured_ns, self.error_ns)  # type: ignore[arg-type]
        return Recorded(process, self.recorder.records())


def send(sender: Host, receiver: Host, sent_ns: int, came_ns: int, step: int = 0, index: int = 0) -> None:
    """A message; times are rank 0's."""
    to = (-1, receiver.number) if receiver.role == "pserver" else (receiver.number, -1)
    by = (sender.number, -1) if sender.role == "worker" else (-1, sender.number)
    sent_there_ns = sent_ns + sender.ahead_ns
    sender.recorder.sent(sent_there_ns - 5, sent_there_ns, step, 0, index, 0, 8, *to)
    receiver.recorder.arrived(came_ns + receiver.ahead_ns, step, 0, index, *by)


def job(*ahead_ns: int, measure: Callable[[int, int], int], error_ns: int = MS) -> list[Host]:
    """Two workers and two pservers; `measure` (number, offset) says what has been measured of an offset."""
    w0, w1, p0, p1 = ahead_ns
    return [
        Host("worker", 0, w0, 0, 0),
        Host("worker", 1, w1, measure(1, p0 - w1), error_ns),
        Host("pserver", 0, p0, measure(2, w0 - p0), error_ns),
        Host("pserver", 1, p1, measure(3, w0 - p1), error_ns),
    ]


def assembled(hosts: Sequence[Host], buckets: Sequence[CapturedBucket] = BUCKETS) -> Capture:
    return assemble([host.recorded() for host in hosts], buckets)


def wires(capture: Capture) -> list[Span]:
    return [span for span in capture.spans if span.kind in ("wire", "reply_wire")]


@given(
    ahead=st.tuples(*[st.integers(-(10**15), 10**15)] * 3),
    wrong=st.tuples(*[st.integers(-MS, MS)] * 4),
    took=st.lists(st.integers(1000, 10 * MS), min_size=8, max_size=8),
)
@example(  # what was measured and what messages tell miss each other, by less than the pserver's offset may be wrong
    ahead=(0, 0, 0), wrong=(0, 0, 0, -MS), took=[1000, 3002, 1999999, 1000, 1000, 3000002, 1000, 1999001]
)
def test_offsets_are_as_good_as_they_say_and_nothing_comes_before_it_was_sent(
    ahead: tuple[int, ...], wrong: tuple[int, ...], took: list[int]
) -> None:
    w0, w1, p0, p1 = hosts = job(0, *ahead, measure=lambda number, offset_ns: offset_ns + wrong[number])
    for number, (worker, pserver) in enumerate([(w0, p0), (w0, p1), (w1, p0), (w1, p1)]):
        send(worker, pserver, 1000, 1000 + took[2 * number], index=pserver.number)
        send(pserver, worker, 5000, 5000 + took[2 * number + 1], index=pserver.number)
    capture = assembled(hosts)
    assert len(wires(capture)) == 8
    for process, host in zip(capture.processes, hosts, strict=True):
        assert abs(process.clock_offset_ns + host.ahead_ns) <= process.clock_error_ns
        assert process.clock_error_ns <= 2 * MS
    ends = {(s.rank, s.pserver, s.kind): s.end_ns for s in capture.spans}
    for span in capture.spans:
        if span.kind in ("queued", "reply_queued"):
            (wire,) = (
                s for s in wires(capture) if (s.rank, s.pserver, s.process) == (span.rank, span.pserver, span.process)
            )
            assert span.end_ns == wire.begin_ns
            assert wire.begin_ns <= wire.end_ns
    assert len(ends) == 16


def test_messages_bound_a_clock_closer_than_its_measurement() -> None:
    w0, w1, p0, _ = hosts = job(0, 7 * MS, -9 * MS, 0, measure=lambda _, offset_ns: offset_ns + MS // 2)
    for worker in (w0, w1):
        send(worker, p0, 1000, 11_000)
        send(p0, worker, 20_000, 40_000)
    capture = assembled(hosts)
    first, second, third, fourth = (process.clock_error_ns for process in capture.processes)
    assert (first, fourth) == (0, MS)
    assert third == 15_000  # half of what is between both, 30 us
    assert second == 15_000 + MS  # as wrong as the pserver that is known worst
    assert abs(capture.processes[2].clock_offset_ns - 9 * MS) <= 15_000


def test_a_clock_that_has_drifted_since_the_capture_is_aligned_by_its_messages() -> None:
    w0, _, p0, _ = hosts = job(0, 0, 0, 0, measure=lambda *_: 80 * MS)
    send(w0, p0, 1000, 11_000)
    send(p0, w0, 20_000, 40_000)
    process = assembled(hosts).processes[2]
    assert (process.clock_offset_ns, process.clock_error_ns) == (5000, 15_000)


def test_clocks_that_contradict_themselves_are_as_measured_and_no_span_ends_before_it_begins() -> None:
    w0, _, p0, _ = hosts = job(0, 0, 0, 0, measure=lambda *_: 3 * MS)
    send(w0, p0, 50_000, 11_000)
    send(p0, w0, 60_000, 20_000)
    capture = assembled(hosts)
    assert (capture.processes[2].clock_offset_ns, capture.processes[2].clock_error_ns) == (3 * MS, MS)
    assert [span.duration_ns for span in wires(capture)] == [3 * MS - 39_000, 0]


def test_messages_that_were_seen_at_one_end_alone_are_left_out() -> None:
    w0, w1, p0, _ = hosts = job(0, 0, 0, 0, measure=lambda *_: 0)
    w0.recorder.sent(UNKNOWN, 10, 0, 0, 0, 0, 8, -1, 0)  # in the queue since before the capture
    w0.recorder.sent(5, 10, 1, 0, 0, 0, 8, -1, 0)  # comes after it
    p0.recorder.arrived(20, 0, 0, 0, 0, -1)
    p0.recorder.arrived(20, 0, 0, 0, 1, -1)  # of rank 1, which began to record later
    w1.recorder.sent(5, 10, 0, 0, 0, 0, 8, -1, 1)  # to the other pserver
    found = [(span.kind, span.step, span.rank, span.pserver) for span in assembled(hosts).spans]
    assert sorted(found) == [("queued", 0, 1, 1), ("queued", 1, 0, 0), ("wire", 0, 0, 0)]


def test_answers_in_several_messages_are_told_apart_and_align_clocks_as_others_do() -> None:
    w0, _, p0, _ = hosts = job(0, 0, 70 * MS, 0, measure=lambda *_: -70 * MS)
    send(w0, p0, 1000, 3000, index=2**16)
    first, second, later = (4000, 5000), (9_000_000, 9_002_000), (10_000_000, 10_004_000)
    for times in (first, second, later):
        send(p0, w0, *times, index=2**16)
    capture = assembled(hosts)
    off_ns = capture.processes[2].clock_offset_ns + 70 * MS
    assert (abs(off_ns) <= 1500, capture.processes[2].clock_error_ns) == (True, 1500)
    found = [(one.begin_ns - off_ns, one.end_ns) for one in wires(capture) if one.kind == "reply_wire"]
    assert found == [first, second, later]
    p0.recorder.sent(0, 70 * MS + 11_000_000, 0, 0, 2**16, 0, 8, 0, -1)  # of which the worker knows nothing
    assert [one.kind for one in wires(assembled(hosts))] == ["wire"]


def test_spans_of_unknown_buckets_and_variables_do_no_harm() -> None:
    hosts = job(0, 0, 0, 0, measure=lambda *_: 0)
    for bucket, variable in ((0, 0), (0, 1), (1, 0), (-1, 0)):
        hosts[1].recorder.span("gate", 5, 3, bucket=bucket, variable=variable)
    found = assembled(hosts).spans
    assert [(span.bucket, span.variable, span.rank, span.duration_ns) for span in found] == [
        (0, 0, 1, 0),
        (0, -1, 1, 0),
        (-1, -1, 1, 0),
    ]


def test_changes_are_those_that_rank_0_has_seen() -> None:
    hosts = job(0, 7 * MS, 0, 0, measure=lambda *_: 0)
    hosts[1].recorder.span("change", 5, 5)
    change = Span("change", 0, "view", 10, 10, rank=1)
    views = CapturedView(1, (0, 1)), CapturedView(2, (0,), "rank 1 died")
    capture = assemble([host.recorded() for host in hosts], BUCKETS, views=views, changes=[change])
    assert capture.changes == [(change, views[1])]


def test_a_capture_of_nothing_has_its_processes() -> None:
    capture = assembled([Host("worker", 0, error_ns=0)])
    assert ([process.name for process in capture.processes], capture.spans) == (["worker 0"], ())
