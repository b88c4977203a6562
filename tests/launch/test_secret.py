"""A file with a secret."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import jobs
import pytest

from tfps.launch.secret import secret_file


def test_only_this_user_reads_it_and_only_for_a_while() -> None:
    with secret_file("a secret") as path:
        assert Path(path).read_text() == "a secret"
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        assert subprocess.run(["cat", path], capture_output=True, text=True, check=True).stdout == "a secret"
    assert not Path(path).exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has files that end with a process")
def test_it_ends_with_a_process_that_is_killed() -> None:
    program = (
        "from tfps.launch.secret import secret_file\nwith secret_file('x') as path: print(path, flush=True); input()"
    )
    with jobs.python("-c", program) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert path.exists()
        process.send_signal(signal.SIGKILL)
        process.wait(jobs.DEADLINE_S)
        assert not path.exists()


def test_where_there_is_no_memory_for_files_it_is_removed_on_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with secret_file("a secret") as path:
        assert Path(path).read_text() == "a secret"
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        assert Path(path).is_absolute() and not path.startswith("/proc")
    assert not Path(path).exists()
