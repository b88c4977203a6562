"""What tests of the launcher share."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import Running, WriteScript


@pytest.fixture
def write_script(tmp_path: Path) -> WriteScript:
    """Writes a script, which knows its rank and has imported what they all need."""

    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text("import os, signal, subprocess, sys\nrank = os.environ['TFPS_RANK']\n" + textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    """Starts launchers, of which nothing is left after the test."""
    started: list[Running] = []

    def begin(*arguments: object) -> Running:
        started.append(Running(*arguments))
        return started[-1]

    yield begin
    for running in started:
        running.popen.kill()
        running.popen.communicate()
        for process in running.survivors():
            process.kill()
