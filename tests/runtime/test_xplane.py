"""The file for the Profile tab, and that TensorFlow's own profile of the same window is in it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tests.trace.test_capture import BUCKETS, PROCESSES, chain
from tfps.errors import TfpsError
from tfps.runtime.trace_run import overlapping_profiles, profile_path, write_xplane
from tfps.trace.capture import Capture, Span

OFFSET_NS = 10**15  # of the wall clock to the capture's
CAPTURE = Capture(PROCESSES, BUCKETS, tuple(chain()))


def load(path: Path) -> xplane_pb2.XSpace:
    return xplane_pb2.XSpace.FromString(path.read_bytes())


def test_every_process_is_a_plane_and_every_span_an_event(tmp_path: Path) -> None:
    path = profile_path(tmp_path, "run")
    assert path == tmp_path / "plugins" / "profile" / "run" / "tfps.xplane.pb"
    write_xplane(CAPTURE, path)
    space = load(path)
    assert [plane.name for plane in space.planes] == [
        "/device:CUSTOM:worker0", "/device:CUSTOM:worker1", "/device:CUSTOM:pserver0",
    ]  # fmt: skip
    found = []
    for number, plane in enumerate(space.planes):
        stats = {key: made.name for key, made in plane.stat_metadata.items()}
        for line in plane.lines:
            until = 0
            for event in line.events:
                assert event.offset_ps >= until, "events of a line do not overlap"
                until = event.offset_ps + event.duration_ps
                begin, took = line.timestamp_ns + event.offset_ps // 1000, event.duration_ps // 1000
                known = {stats[stat.metadata_id]: stat.int64_value for stat in event.stats}
                name = plane.event_metadata[event.metadata_id].name
                found.append((number, name, begin, begin + took, known.get("step"), known.get("slice", -1)))
    expected = [
        (one.process, f"{one.kind} {CAPTURE.variable_name(one)}", one.begin_ns, one.end_ns, one.step, one.slice)
        for one in CAPTURE.spans
    ]
    assert sorted(found) == sorted(expected)


def test_the_profile_of_tensorflow_is_taken_in_and_its_clock_moved(tmp_path: Path) -> None:
    before_s = time.time()
    tf.profiler.experimental.start(str(tmp_path / "train"))
    tf.linalg.matmul(tf.ones((50, 50)), tf.ones((50, 50))).numpy()
    tf.profiler.experimental.stop()
    (file,) = overlapping_profiles(tmp_path, before_s)
    assert overlapping_profiles(tmp_path / "train", before_s) == [file]
    assert overlapping_profiles(tmp_path, time.time() + 1) == []
    before = load(file)
    path = profile_path(tmp_path, "run")
    write_xplane(CAPTURE, path, [file], OFFSET_NS)
    assert overlapping_profiles(tmp_path, before_s) == [file], "what TensorFlow has written stays, ours is no profile"
    after = load(path)
    count = len(before.planes)
    assert [plane.name for plane in after.planes[:count]] == [plane.name for plane in before.planes]
    assert len(after.planes) == count + len(PROCESSES)
    assert len({plane.id for plane in after.planes[count:]}) == len(PROCESSES)
    lines = 0
    for old, new in zip(before.planes, after.planes, strict=False):
        assert [len(line.events) for line in new.lines] == [len(line.events) for line in old.lines]
        for line in new.lines:
            lines += 1
            assert 0 <= line.timestamp_ns + OFFSET_NS - before_s * 1e9 < 60e9, "the profile was taken just now"
    assert lines


def test_a_capture_without_spans_and_a_foreign_file(tmp_path: Path) -> None:
    write_xplane(Capture(PROCESSES, BUCKETS, ()), tmp_path / "tfps.xplane.pb")
    assert len(load(tmp_path / "tfps.xplane.pb").planes) == 3
    damaged = tmp_path / "other.xplane.pb"
    damaged.write_bytes(b"no message")
    with pytest.raises(TfpsError, match=r"other\.xplane\.pb' must be an XSpace"):
        write_xplane(Capture(PROCESSES, BUCKETS, (Span("step", 0, "steps", 0, 1),)), tmp_path / "a.pb", [damaged])
