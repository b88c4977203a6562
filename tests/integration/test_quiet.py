"""What a program shows that does nothing wrong."""

from __future__ import annotations

import os
import subprocess
import sys

import processes
import pytest

SCRIPT = str(processes.HERE / "quiet.py")


def said(*command: str, **variables: str) -> list[str]:
    """The lines that `command` prints, as a user without settings sees them."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    environment = {**kept, "PYTHONPATH": processes.PYTHONPATH, **variables}
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=processes.TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


@pytest.mark.long
def test_a_job_shows_where_its_pservers_are_its_start_and_its_end_and_nothing_else() -> None:
    first, *lines = said("-m", "tfps.launch", "--workers", "2", SCRIPT)
    assert first.startswith("[pserver 0] tfps_pserver ready at ")
    lines = [line for line in lines if not line.startswith("[worker 0] tfps: tuned: ")]  # machines may be busy
    assert lines == ["tfps_launch: starts 2 workers", "tfps_launch: all workers ended well"]


@pytest.mark.long
def test_tensorflow_warns_of_nothing_that_one_process_does() -> None:
    lines = said(SCRIPT, TF_CPP_MIN_LOG_LEVEL="1")
    assert [line for line in lines if line.startswith("W0000") or "rendezvous" in line] == []
