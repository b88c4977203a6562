"""What all workers would meet ends the job, with its cause on each rank; nothing is started again."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import launching
import processes
import pytest

pytestmark = launching.NEEDS_POSIX
HERE = Path(__file__).resolve().parent
WRITES = "no snapshot of table 'sequential/words/rows' could be taken (snapshot_folder): "
# What fails, what is in the place of the folder for files, and what is said.
CASES = {
    "the folder of snapshots is lost": ("snapshot", "a file", f"{WRITES}table 'sequential/words/rows' could not be"),
    "the disk of snapshots is full": ("snapshot", "a full disk", "[Errno 28] No space left on device"),
    "the folder of checkpoints is lost": ("save", "a file", "place/model.keras: NotADirectoryError: "),
    "the disk of checkpoints is full": ("save", "a full disk", "place/model.keras: OSError: [Errno 28] No space left"),
    "the workers differ": ("difference", "a file", "the workers are no longer alike "),
}


@contextlib.contextmanager
def in_its_place(path: Path, what: str) -> Iterator[None]:
    if what == "a file":
        path.touch()
        yield
        return
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"needs root, for a disk that is full: {mounted.stderr.decode()}")
    try:
        (path / "all").write_bytes(b"0" * 4096)
        yield
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_an_error_of_the_job_ends_it_on_every_rank(tmp_path: Path, case: str) -> None:
    kind, what, said = CASES[case]
    settings = {"PYTHONPATH": processes.PYTHONPATH, "TF_CPP_MIN_LOG_LEVEL": "2"}
    if kind == "snapshot":
        settings |= {"TFPS_SNAPSHOT_STEPS": "3", "TFPS_SNAPSHOT_FOLDER": str(tmp_path / "place")}
    options = ("--workers", 2, "--min-workers", 1, "--restart", 2, "--grace", 30)
    with in_its_place(tmp_path / "place", what):
        result = subprocess.run(
            launching.command(*options, HERE / "failing.py", tmp_path, kind),
            env=launching.environment(**settings),
            capture_output=True,
            text=True,
            timeout=processes.TIMEOUT_S,
            check=False,
        )
    assert result.returncode == 1, result.stderr
    for rank in (0, 1):
        lines = [line for line in result.stderr.splitlines() if line.startswith(f"[worker {rank}] tfps: ")]
        assert len(lines) == 1, result.stderr  # not that others are lost, or awaited
        assert lines[0].startswith(f"[worker {rank}] tfps: training stopped: "), result.stderr
        assert said in lines[0], result.stderr
    assert "starts again" not in result.stderr
    assert "; the job is over, and is not begun anew; all others were ended" in result.stderr
