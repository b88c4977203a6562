"""The report as text."""

from __future__ import annotations

import sys

import pytest

from tfps.doctor.render import lines, show
from tfps.doctor.report import Check, Group, Report

HOST = Group("this host (h)", [Check("tls", "ok", "off"), Check("gpus", "skipped", "none")])
BAD = Group(
    "pserver p:1", [Check("port", "failed", "refused", "start it"), Check("job", "warning", "runs", "wait")], "p:1"
)
TEXT = """this host (h)
  ok       tls            off
  skipped  gpus           none

pserver p:1
  failed   port           refused
  warning  job            runs

A job would not run here. To do:
  1. pserver p:1: start it
  2. pserver p:1: wait
"""


def test_each_check_is_a_line_and_the_end_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    show(Report("h", [HOST, BAD]))
    assert capsys.readouterr().out == TEXT


def test_without_rich_it_looks_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    show(Report("h", [HOST, BAD]))
    assert capsys.readouterr().out == TEXT


def test_in_a_terminal_rich_colors_the_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    terminal = Console(force_terminal=True, color_system="standard", width=20)
    monkeypatch.setattr("tfps.doctor.render._console", lambda: terminal)
    show(Report("h", [HOST, BAD]))
    shown = capsys.readouterr().out
    assert "\x1b[1;31mfailed\x1b[0m   port           refused\n" in shown
    assert "  1. pserver p:1: start it\n" in shown


@pytest.mark.parametrize(
    ("groups", "end"),
    [
        ([HOST], "Nothing to do on this host. No pserver was checked."),
        ([HOST, Group("p", [Check("port", "ok", "")])], "Nothing to do: a job would run here."),
        ([HOST, Group("p", [BAD.checks[1]], "p:1")], "  1. pserver p:1: wait"),
    ],
)
def test_the_last_line_says_whether_a_job_would_run(groups: list[Group], end: str) -> None:
    assert lines(Report("h", groups))[-1][0] == end
