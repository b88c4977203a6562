"""What a recorder has recorded, and what is in a capture's file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tfps.trace.capture import KINDS, NONE, Capture, Span
from tfps.trace.capture_file import read
from tfps.trace.recorder import RECORD, SENT, Recorder
from tfps.types import Argument
from tfps.wire.send_queue import SendQueue


class Sent(NamedTuple):
    """Slice number `position` has left its queue; of `rank` and `pserver` the other end is known, the other is -1."""

    step: int
    bucket: int
    position: int
    priority: int
    nbytes: int
    rank: int
    pserver: int


def spans(recorder: Recorder) -> list[Span]:
    """The spans so far, in the order of recording; process and lane are unknown."""
    records = np.frombuffer(recorder.records(), RECORD)
    return [Span(KINDS[code], NONE, "", *rest) for code, *rest in records[records["kind"] < len(KINDS)].tolist()]


def sends(recorder: Recorder) -> list[Sent]:
    """What was sent while `recorder` was on, in this order."""
    records = np.frombuffer(recorder.records(), RECORD)
    names = ["step", "bucket", "slice", "priority", "nbytes", "rank", "pserver"]
    return [Sent(*row) for row in records[records["kind"] == SENT][names].tolist()]


def note_in_flight(recorder: Recorder, queues: Mapping[tuple[int, int], SendQueue]) -> list[int]:
    """Bytes in flight whenever one of `queues` has given out a slice, from now on while `recorder` is on.

    Args:
        queues: of this recorder, by rank and pserver of the other end, of which one is -1.
    """
    found: list[int] = []
    sent = recorder.sent

    def noted(*fields: Argument) -> None:
        sent(*fields)
        found.append(queues[fields[-2], fields[-1]].load.in_flight_bytes)  # the queue's lock is this thread's

    recorder.sent = noted  # type: ignore[method-assign, assignment]
    return found


def captured(log_dir: Path) -> Capture:
    """The only capture of the directory."""
    (file,) = log_dir.glob("plugins/tfps/*.trace.json.gz")
    assert list(log_dir.glob(f"plugins/profile/{file.name.removesuffix('.trace.json.gz')}/tfps.xplane.pb"))
    return read(file)
