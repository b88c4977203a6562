"""A file with a secret."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import jobs
import pytest

from tfps.launch.secret import lasting_secret_file, secret_file

on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux has files that end with a process"
)


def test_only_this_user_reads_it_and_only_for_a_while() -> None:
    with secret_file("a secret") as path:
        assert Path(path).read_text() == "a secret"
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        assert subprocess.run(["cat", path], capture_output=True, text=True, check=True).stdout == "a secret"
    assert not Path(path).exists()


@on_linux
def test_one_that_lasts_is_read_by_this_user_only_and_names_no_secret() -> None:
    path = Path(lasting_secret_file("a secret"))
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert subprocess.run(["cat", path], capture_output=True, text=True, check=True).stdout == "a secret"
        assert "secret" not in str(path)
        assert not Path(str(path.readlink()).split()[0]).exists()  # it is in no directory that it could stay in
    finally:
        os.close(int(path.name))


@on_linux
@pytest.mark.parametrize(
    "program",
    [
        "with secret_file('x') as path: print(path, flush=True); input()",
        "print(lasting_secret_file('x'), flush=True); input()",
    ],
)
def test_it_ends_with_a_process_that_is_killed(program: str) -> None:
    program = f"from tfps.launch.secret import lasting_secret_file, secret_file\n{program}"
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
