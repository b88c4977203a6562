"""Reports, and how they are shown."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from tfps.doctor.report import Check, Group, Report, Status, lines, show

ROOT = Path(__file__).resolve().parent.parent.parent
OK = Check("tls", "ok", "off")
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


def failed(advice: str, status: Status = "failed") -> Check:
    return Check("open files", status, "few", advice, "low", {"limit": 3})


def report(*pservers: list[Check], host: list[Check] | None = None) -> Report:
    groups = [Group(f"pserver h{number}:1", checks, f"h{number}:1") for number, checks in enumerate(pservers)]
    return Report("here", [Group("this host", [OK] if host is None else host), *groups])


@pytest.mark.parametrize(("status", "advice"), [("ok", "do"), ("skipped", "do"), ("warning", ""), ("failed", "")])
def test_advice_is_for_what_is_wrong_and_only_that(status: Status, advice: str) -> None:
    with pytest.raises(ValueError, match="advice belongs to checks that are warnings or have failed"):
        Check("tls", status, "text", advice)


@pytest.mark.parametrize(
    ("checks", "healthy"),
    [([OK], True), ([failed("w", "warning")], True), ([failed("f")], False), ([Check("a", "skipped", "t")], True)],
)
def test_only_failures_stop_a_job(checks: list[Check], healthy: bool) -> None:
    assert report(checks).healthy is healthy
    assert report(host=checks).healthy is healthy


def test_failures_come_before_warnings_and_the_host_before_pservers() -> None:
    found = report([failed("c")], [failed("d", "warning")], host=[failed("b", "warning"), failed("a")])
    assert found.to_do() == ["a", "pserver h0:1: c", "b", "pserver h1:1: d"]


def test_what_is_wrong_at_several_pservers_is_said_once() -> None:
    assert report([failed("same")], [OK], [failed("same")]).to_do() == ["pservers h0:1, h2:1: same"]


def test_the_json_has_the_documented_keys() -> None:
    found = report([failed("do")]).as_json()
    assert list(found) == ["healthy", "tfps", "protocol_version", "host", "checks", "pservers", "to_do"]
    assert found["pservers"] == [
        {
            "address": "h0:1",
            "checks": [
                {
                    "check": "open_files",
                    "status": "failed",
                    "text": "few",
                    "advice": "do",
                    "problem": "low",
                    "values": {"limit": 3},
                }
            ],
        }
    ]


def test_the_page_has_every_check_and_every_problem_that_the_package_names() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    names, problems = set(re.findall(r"`(\w+)`", page)), set()
    for path in (ROOT / "tfps" / "doctor").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Check", "warn_if"):
                given = [each.value if isinstance(each, ast.Constant) else None for each in node.args]
                problems |= {each for each in (given[0], *given[4:5]) if isinstance(each, str)}
    assert len(problems) > 30
    assert {each.replace(" ", "_") for each in problems} <= names


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
    monkeypatch.setattr("tfps.doctor.report._console", lambda: terminal)
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
    assert list(lines(Report("h", groups)))[-1][0] == end
