"""A pserver's part in captures, without a network."""

from __future__ import annotations

import functools
import threading

import jobs
import pytest
from jobs import attempt

from tfps.errors import ClosedError, ProtocolError, WorkerLostError
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.recording import Recording
from tfps.trace.recorder import RECORD, Recorder
from tfps.wire import control


def started(uploading: tuple[int, ...] = ()) -> tuple[Recording, Recorder]:
    recorder = Recorder()
    made = Recording(recorder)
    made.start(1, uploading)
    return made, recorder


def collected(made: Recording) -> list[tuple[str, int, bool]]:
    """Of each part role, number and whether it is the last."""
    parts = iter(functools.partial(made.collect, 1, jobs.DEADLINE_S), None)
    return [("pserver" if part.pserver else "worker", part.number, part.last) for part in parts]


@pytest.mark.parametrize("what", ["a rank that is not expected", "half a record", "more than a recorder keeps"])
def test_an_upload_that_cannot_be_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfps.pserver.recording._MOST_UPLOADED", 5000)
    made, _ = started((1, 2))
    part = pb.Records(records=bytes(10 * RECORD.itemsize))
    made.upload(1, 1, part)
    with pytest.raises(ProtocolError, match=r"an upload must be of a rank|a rank must upload at most 5000 bytes, got"):
        if what == "a rank that is not expected":
            made.upload(1, 3, part)
        elif what == "half a record":
            made.upload(1, 1, pb.Records(records=b"half"))
        else:
            for _ in range(3):
                made.upload(1, 1, part)
    made.upload(1, 2, part)


def test_its_own_spans_come_in_parts_and_then_what_was_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_RECORDS_BYTES", 2 * RECORD.itemsize)
    made, recorder = started((1, 2))
    for number in range(5):
        recorder.span("aggregate", number, number)
    made.upload(1, 1, pb.Records(number=1, last=True))  # it has left early
    made.stop(1, 3)
    made.stop(1, 3)  # again: nothing
    made.upload(1, 2, pb.Records(number=2))
    made.upload(1, 2, pb.Records(number=2, last=True))
    own = [("pserver", 3, False), ("pserver", 3, False), ("pserver", 3, True)]
    assert collected(made) == [("worker", 1, True), *own, ("worker", 2, False), ("worker", 2, True)]
    with pytest.raises(ClosedError, match="does not know capture 1, or not any more"):
        made.collect(1, jobs.DEADLINE_S)


@pytest.mark.parametrize("how", ["uploaded", "gone", "failed", "begun anew"])
def test_who_collects_is_woken(how: str) -> None:
    made, recorder = started((1,))
    made.stop(1, 0)
    assert made.collect(1, 0) is not None  # its own part
    waiting = threading.Event()

    def collect() -> object:
        waiting.set()
        return made.collect(1, jobs.DEADLINE_S)

    def act() -> None:
        assert waiting.wait(jobs.DEADLINE_S)
        if how == "uploaded":
            made.upload(1, 1, pb.Records(number=1, last=True))
        elif how == "gone":
            assert made.departed(1) == 0
        elif how == "failed":
            made.fail(WorkerLostError("rank 1 died"))
        else:
            made.start(2, ())

    result, _ = attempt(collect, act)
    if how == "uploaded":
        assert isinstance(result, pb.Records)
        assert result.number == 1
    elif how == "gone":
        assert result is None
    else:
        assert isinstance(result, WorkerLostError if how == "failed" else ClosedError)
    assert recorder.enabled == (how == "begun anew")
