"""Writes a capture for TensorBoard's Profile tab, merged with TensorFlow's profiles of the same time.

The Profile tab reads the XSpace files in a run's folder and shows each plane as a process. Only planes with device
names get timelines, hence `/device:CUSTOM:worker0`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tfps.errors import TfpsError
from tfps.trace.capture import NONE, Capture, Span, by_lane, rows
from tfps.types import Structure

FILE = "tfps.xplane.pb"
_PS_PER_NS = 1000
_NUMBERS = ("step", "bucket", "slice", "priority", "nbytes", "rank", "pserver")


def profile_path(log_dir: str | Path, run: str) -> Path:
    """Returns the run's file for the Profile tab: `<log_dir>/plugins/profile/<run>/tfps.xplane.pb`."""
    return Path(log_dir) / "plugins" / "profile" / run / FILE


def overlapping_profiles(log_dir: str | Path, since_s: float) -> list[Path]:
    """Returns profiles written by TensorFlow in `log_dir` or a subfolder since `since_s` (wall clock)."""
    folder = Path(log_dir)
    found = [*folder.glob("plugins/profile/*/*.xplane.pb"), *folder.glob("*/plugins/profile/*/*.xplane.pb")]
    return sorted(file for file in found if file.name != FILE and file.stat().st_mtime >= since_s)


def write_xplane(
    capture: Capture, path: str | Path, profiles: Sequence[Path] = (), wall_offset_ns: int | None = None
) -> None:
    """Writes one file: all of TensorFlow's `profiles`, then a plane per process.

    Lines are rows of lanes, since events of one line must not overlap. TensorFlow's lines count from the start of its
    profile, given in wall clock time; they are moved to the capture's clock if the difference is known
    (`wall_offset_ns`, the wall clock minus the capture's).
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    space = xplane_pb2.XSpace()
    for file in profiles:
        part = _load(file)
        began_ns = _began_ns(part)
        if wall_offset_ns is not None and began_ns:
            _shift(part, began_ns - wall_offset_ns)
        space.MergeFrom(part)
    lanes = by_lane(capture.spans)
    for number, process in enumerate(capture.processes):
        own = {lane: members for (where, lane), members in lanes.items() if where == number}
        plane = space.planes.add(id=_free(space), name=f"/device:CUSTOM:{process.role}{process.number}")
        _fill(plane, capture, own)
        stats = {made.name: key for key, made in plane.stat_metadata.items()}
        _stat(plane, stats, plane.stats.add(), "host", process.host)
        _stat(plane, stats, plane.stats.add(), "clock_error_ns", process.clock_error_ns)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(space.SerializeToString())
    partial.replace(path)


def _load(file: Path) -> xplane_pb2.XSpace:
    try:
        return xplane_pb2.XSpace.FromString(file.read_bytes())
    except DecodeError as error:
        raise TfpsError(f"'{file}' must be an XSpace of TensorFlow's profiler: {error}") from error


def _began_ns(space: xplane_pb2.XSpace) -> int:
    """Returns the profile's start in wall clock time, 0 if it has none."""
    for plane in space.planes:
        for stat in plane.stats:
            if plane.stat_metadata[stat.metadata_id].name == "profile_start_time":
                return int(stat.uint64_value or stat.int64_value)
    return 0


def _shift(space: xplane_pb2.XSpace, offset_ns: int) -> None:
    for plane in space.planes:
        for line in plane.lines:
            line.timestamp_ns += offset_ns


def _free(space: xplane_pb2.XSpace) -> int:
    return max((plane.id for plane in space.planes), default=0) + 1


def _fill(plane: xplane_pb2.XPlane, capture: Capture, lanes: dict[str, list[int]]) -> None:
    origin = capture.spans[0].begin_ns if capture.spans else 0
    names: dict[str, int] = {}
    stats: dict[str, int] = {}
    for name, members in lanes.items():
        spans = [capture.spans[member] for member in members]
        placed = rows((span.begin_ns, max(span.end_ns, span.begin_ns + 1)) for span in spans)
        lines = []
        for row in range(max(placed) + 1):
            shown = name if row == 0 else f"{name} ({row + 1})"
            lines.append(plane.lines.add(id=len(plane.lines) + 1, name=shown, timestamp_ns=origin))
        for span, row in zip(spans, placed, strict=True):
            title = f"{span.kind} {capture.variable_name(span)}".rstrip()
            event = lines[row].events.add(
                metadata_id=_numbered(names, plane.event_metadata, title),
                offset_ps=(span.begin_ns - origin) * _PS_PER_NS,
                duration_ps=span.duration_ns * _PS_PER_NS,
            )
            for field, value in _known(span):
                _stat(plane, stats, event.stats.add(), field, value)


def _known(span: Span) -> Iterable[tuple[str, int]]:
    return ((field, value) for field in _NUMBERS if (value := getattr(span, field)) != NONE)


def _stat(plane: xplane_pb2.XPlane, known: dict[str, int], stat: xplane_pb2.XStat, name: str, value: int | str) -> None:
    stat.metadata_id = _numbered(known, plane.stat_metadata, name)
    if isinstance(value, str):
        stat.str_value = value
    else:
        stat.int64_value = value


def _numbered(known: dict[str, int], table: Structure, name: str) -> int:
    """Returns the number of a name in a plane's name table; adds it if new."""
    if name not in known:
        known[name] = number = len(table) + 1
        table[number].id, table[number].name = number, name
    return known[name]
