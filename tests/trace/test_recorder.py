"""The recorder keeps the order of spans, is bounded, and forgets what was before its start."""

from __future__ import annotations

import numpy as np
from recorded import spans

from tfps.trace.capture import KINDS, NONE, Kind, Span
from tfps.trace.recorder import ARRIVED, RECORD, SENT, UNKNOWN, Recorder


def own(kind: Kind, begin_ns: int, end_ns: int, **fields: int) -> Span:
    """As the process knows it in which it happened."""
    return Span(kind, NONE, "", begin_ns, end_ns, **fields)


def test_spans_come_back_as_they_were_recorded() -> None:
    recorder = Recorder()
    recorder.start()
    fields = {"step": 2**40, "bucket": 3, "slice": 4, "variable": 5, "priority": 2**32 - 1, "nbytes": 2**35, "rank": 6}
    for kind in KINDS:
        recorder.span(kind, -(2**60), 2**60, **fields, pserver=7)
    recorder.span("step", 1, 2)
    recorder.sent(UNKNOWN, 1, 2, 3, 4, 5, 6, 7, 8)
    recorder.arrived(1, 2, 3, 2**32 - 1, 7, 8)
    expected = [own(kind, -(2**60), 2**60, **fields, pserver=7) for kind in KINDS]
    assert spans(recorder) == [*expected, own("step", 1, 2)]
    *_, sent, arrived = np.frombuffer(recorder.records(), RECORD).tolist()
    assert sent == (SENT, UNKNOWN, 1, 2, 3, 4, -1, 5, 6, 7, 8)
    assert arrived == (ARRIVED, 1, 1, 2, 3, 2**32 - 1, -1, -1, -1, 7, 8)


def test_spans_are_recorded_only_while_it_is_on() -> None:
    recorder = Recorder(clock=lambda: 17)
    recorder.span("step", 1, 2)
    recorder.start()
    recorder.span("step", recorder.clock(), 18)
    recorder.stop()
    recorder.span("step", 3, 4)
    recorder.sent(1, 1, 2, 3, 4, 5, 6, 7, 8)
    recorder.arrived(1, 2, 3, 4, 7, 8)
    assert spans(recorder) == [own("step", 17, 18)]
    recorder.start()
    assert spans(recorder) == []


def test_a_full_recorder_keeps_the_latest_spans_and_says_so() -> None:
    recorder = Recorder(capacity=2)
    recorder.start()
    assert not recorder.full
    for number in range(3):
        recorder.span("step", number, number)
    assert recorder.full
    assert [span.begin_ns for span in spans(recorder)] == [1, 2]
