"""The recorder keeps the order of events, is bounded, and forgets what was before its start."""

from __future__ import annotations

import pytest

from tfps.trace import Recorder


def test_nothing_is_recorded_before_the_start_or_after_the_end() -> None:
    recorder = Recorder()
    recorder.record("early")
    recorder.start()
    recorder.record("send", bucket=3)
    events = recorder.stop()
    recorder.record("late")
    assert [(event.kind, event.bucket) for event in events] == [("send", 3)]
    assert recorder.events() == events


def test_a_full_recorder_keeps_the_latest() -> None:
    recorder = Recorder(capacity=3)
    recorder.start()
    for number in range(5):
        recorder.record("e", number=number)
    assert [event.number for event in recorder.events()] == [2, 3, 4]


def test_an_unknown_field_is_named() -> None:
    recorder = Recorder()
    recorder.start()
    recorder.record("send", bucket=1)
    with pytest.raises(AttributeError, match=r"'send' has no field 'rank', only \['bucket'\]"):
        _ = recorder.events()[0].rank
