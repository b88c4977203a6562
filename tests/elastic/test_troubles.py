"""`tfps_launch --restart` where a host is in trouble: all end with the same weights, and those are right."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import launching
import numpy as np
import processes
import pytest

pytestmark = [launching.NEEDS_POSIX, pytest.mark.long]
SCRIPT = Path(__file__).resolve().parent / "troubled.py"
# The trouble, ranks that must end well, whether rows are lost, and what is said.
CASES = {
    "a worker is stopped for 3 s": ("stopped 3", (0, 1, 2), False, ""),
    "a worker is stopped for 8 s": ("stopped 8", (0, 1, 2), True, "has been silent for"),
    "two are killed within a second": ("two SIGKILL", (0, 1, 2), True, "was killed by SIGKILL"),
    "two get SIGTERM within a second": (
        "two SIGTERM",
        (0, 1, 2),
        False,
        "this worker ends its step and leaves the job",
    ),
    "a worker has no memory left": ("out of memory", (0, 2), True, "; it starts again"),
}


def begun(folder: Path, trouble: str, *options: object, **more: str) -> subprocess.Popen[str]:
    folder.mkdir()
    settings = {"PYTHONPATH": processes.PYTHONPATH, "TF_CPP_MIN_LOG_LEVEL": "2", "TFPS_DETERMINISTIC": "1", **more}
    return subprocess.Popen(
        launching.command(*options, "--min-workers", 1, "--restart", 2, SCRIPT, folder, trouble),
        env=launching.environment(**settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(launcher: subprocess.Popen[str]) -> str:
    output, _ = launcher.communicate(timeout=processes.TIMEOUT_S)
    assert launcher.returncode == 0, output
    return output


def weights(folder: Path, name: object) -> Sequence[np.ndarray]:
    with np.load(folder / f"{name}.npz") as file:
        return [file[each] for each in file.files]


@pytest.mark.parametrize("case", CASES)
def test_a_host_in_trouble_harms_no_result(tmp_path: Path, case: str) -> None:
    trouble, ranks, loses, said = CASES[case]
    folder = tmp_path / "job"
    output = ended(begun(folder, trouble, "--workers", 3, "--pservers", 2))
    assert said in output
    found = [weights(folder, rank) for rank in ranks]
    for each in found:
        np.testing.assert_equal(each, found[0])
    plain = processes.start(str(SCRIPT), str(folder), trouble, environment={"PYTHONPATH": processes.PYTHONPATH})
    processes.outputs([plain])
    for mine, its in zip(found[0], weights(folder, "plain"), strict=True):
        np.testing.assert_allclose(mine, its, rtol=0, atol=1e-2 if loses else 1e-5, err_msg=output)


def test_two_jobs_share_a_folder_for_snapshots(tmp_path: Path) -> None:
    """One of them reads its own back."""
    more = {"TFPS_SNAPSHOT_STEPS": "5", "TFPS_SNAPSHOT_FOLDER": str(tmp_path / "snapshots")}
    options = ("--workers", 2, "--pservers", 1)
    first, second = (begun(tmp_path / each, each, *options, **more) for each in ("pserver", "nothing"))
    output = ended(first)
    ended(second)
    assert "pserver 0 was killed by SIGKILL" in output
    for rank in (0, 1):
        np.testing.assert_equal(weights(tmp_path / "pserver", rank), weights(tmp_path / "nothing", rank))
    assert not list((tmp_path / "snapshots").glob("*"))  # they go when the jobs end
