"""A long transfer shows how far it is: a bar in a terminal, one line elsewhere."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Iterator

import jobs
import pytest

from tfps.updates import initial_values as progress
from tfps.updates.initial_values import Progress

MB = 10**6


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_BAR_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "_LINE_AFTER_S", 0.0)


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """stderr is one; afterwards the list has what was drawn."""
    ours, theirs = os.openpty()
    drawn: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(ours, 65536):
                drawn.append(data)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    result: list[str] = []
    with os.fdopen(theirs, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        yield result
    thread.join(jobs.DEADLINE_S)
    os.close(ours)
    result.append(b"".join(drawn).decode())


def transfer() -> None:
    with Progress("tfps: initial values", 100 * MB) as shown:
        for done in (10, 50, 75, 100):
            shown.show(done * MB)


def test_in_a_terminal_a_bar_is_drawn_and_removed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with terminal(monkeypatch) as result:
        transfer()
    assert "tfps: initial values" in result[0]
    assert all(f"{done}.0/100.0 MB" in result[0] for done in (10, 50, 75, 100))
    assert result[0].rstrip().endswith("\x1b[2K"), "the line is cleared at the end"
    assert caplog.text == ""


@pytest.mark.parametrize("has_rich", [True, False])
def test_elsewhere_one_line_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_rich: bool
) -> None:
    if has_rich:
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        with caplog.at_level(logging.INFO, "tfps"):
            transfer()
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
        with terminal(monkeypatch) as result, caplog.at_level(logging.INFO, "tfps"):
            transfer()
        assert result == [""]
    assert [record.getMessage().partition(", about")[0] for record in caplog.records] == [
        "tfps: initial values: 10 of 100 MB"
    ]


def test_what_is_quick_or_of_another_rank_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tfps"), Progress("of rank 1", 0) as shown:
        shown.show(5.0)
    monkeypatch.setattr(progress, "_BAR_AFTER_S", 60.0)
    monkeypatch.setattr(progress, "_LINE_AFTER_S", 60.0)
    with terminal(monkeypatch) as result, caplog.at_level(logging.INFO, "tfps"):
        transfer()
    assert (result, caplog.text) == ([""], "")
