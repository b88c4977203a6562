"""`tfps_trace`: what it prints and writes."""

from __future__ import annotations

import csv
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import captures
import jobs
import pytest

from tfps.trace.capture import FIRST_LOOKUP, Capture, CapturedBucket, CapturedPart, CapturedView, Process, Span
from tfps.trace.capture_file import chrome_path, read, write_chrome
from tfps.trace.cli import main
from tfps.trace.summary import summarize


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = chrome_path(tmp_path_factory.getbasetemp() / "cli", "one")
    write_chrome(dataclasses.replace(captures.capture("priority"), name="[/one]\\"), path)
    return path


def test_it_prints_the_summary(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(file)]) == 0
    out = capsys.readouterr().out
    summary = summarize(read(file))
    assert out.startswith("[/one]\\ policy priority, ")
    assert f"limited by {summary.limit}" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    step = summary.steps[0]
    assert rows[str(step.step)][1:3] == [f"{step.totals.duration_ns / 1e6:.4g}", "ms"]
    assert f"{summary.totals.overlap:.1%}" in rows["mean"]
    assert summary.costs[0].variable in rows


def test_it_says_who_takes_part_and_what_changed(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capture = read(file)
    views = CapturedView(1, (0, 1)), CapturedView(2, (0,), "rank 1 [bold] died")
    at_ns = capture.spans[-1].begin_ns
    spans = *capture.spans, Span("change", 0, "view", at_ns, at_ns)
    write_chrome(dataclasses.replace(capture, spans=spans, views=views), tmp_path / "changed.gz")
    assert main([str(tmp_path / "changed.gz")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "at the start: generation 1, with workers 0, 1 and pservers host0:7070, host1:7070"
    assert lines[2].startswith("at ")
    assert "generation 2, with worker 0: rank 1 [bold] died" in lines[2]


def test_it_shows_what_each_table_exchanges_and_how_long_rows_are_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    processes = Process("worker", 0), Process("worker", 1), Process("pserver", 0)
    asks = {"step": 1, "bucket": 0, "slice": FIRST_LOOKUP, "pserver": 0}
    spans = [Span("step", rank, "steps", 0, 9_000_000, 1, rank=rank) for rank in (0, 1)]
    spans += [Span("lookup", rank, "gates", 1_000_000, 3_000_000, 1, 0, rank=rank) for rank in (0, 1)]
    spans += [
        Span("wire", 0, "to pserver 0", 1_000_000, 2_000_000, nbytes=600, rank=0, **asks),
        Span("held", 2, "rows", 2_000_000, 2_500_000, rank=0, **asks),
        Span("reply_wire", 2, "to worker 0", 2_500_000, 3_000_000, nbytes=80_000, rank=0, **asks),
    ]
    capture = Capture(processes, (CapturedBucket("[user]", (), 0, 0),), tuple(spans))
    write_chrome(capture, tmp_path / "one.gz")
    assert main([str(tmp_path / "one.gz")]) == 0
    (row, _) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("[user]"))
    assert row == ["[user]", "2", "ms", "0.5", "ms", "0.3", "kB", "40", "kB", "0", "kB"]


def test_it_shows_parts_that_xla_compiles_and_at_which_gates_they_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spans = [Span("step", 0, "steps", 0, 9_000_000, 1, rank=0), Span("part", 0, "parts", 1, 2_000_001, slice=0, rank=0)]
    parts = (CapturedPart("part 1: [a]", ("a", "b", "c", "d"), (), 1.25),)
    write_chrome(Capture((Process("worker", 0),), (), tuple(spans), parts=parts), tmp_path / "one.gz")
    assert main([str(tmp_path / "one.gz")]) == 0
    (row,) = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.startswith("part 1"))
    assert row == "part 1: [a] a, b and 2 more 2 ms 1.25 s"


def test_of_a_log_directory_it_shows_the_newest_capture(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 1
    assert "no capture is in" in capsys.readouterr().err
    for run, of in (("old", 1), ("new", 2)):
        path = chrome_path(tmp_path / "of a program", run)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.read_bytes() if run == "new" else b"broken")
        os.utime(path, (of, of))
    assert main([str(tmp_path)]) == 0
    assert "limited by" in capsys.readouterr().out


def test_csv_has_a_row_per_step_with_exact_figures(file: Path, tmp_path: Path) -> None:
    assert main([str(file), "--csv", str(tmp_path / "steps.csv")]) == 0
    with (tmp_path / "steps.csv").open() as written:
        rows = list(csv.DictReader(written))
    steps = summarize(read(file)).steps
    assert [row["step"] for row in rows] == [str(step.step) for step in steps]
    for row, step in zip(rows, steps, strict=True):
        assert float(row["exposed_ns"]) == step.totals.exposed_ns
        assert float(row["overlap"]) == step.totals.overlap
        assert int(row["pserver1_pushed_bytes"]) == step.totals.links[1].pushed_bytes
        assert row["slowest"] == str(step.totals.slowest)


def test_csv_needs_neither_rich_nor_tensorflow(file: Path) -> None:
    code = (
        "import sys; sys.modules['rich'] = None; from tfps.trace.cli import main\n"
        f"code = main([{str(file)!r}, '--csv', '-'])\n"
        "print({'tensorflow', 'grpc'} & set(sys.modules)); sys.exit(code)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=jobs.DEADLINE_S)
    assert run.returncode == 0
    assert run.stdout.startswith("run,step,duration_ns,")
    assert run.stdout.endswith("set()\n")


def test_without_rich_it_says_what_to_install(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main([str(file)]) == 1
    assert capsys.readouterr().err == (
        "tfps_trace: tables need the package rich: pip install 'tfps[console]', or use --csv\n"
    )


def test_a_file_that_is_no_capture_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none")]) == 1
    assert "cannot read the capture" in capsys.readouterr().err
