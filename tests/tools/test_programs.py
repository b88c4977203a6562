"""The programs in tools/ run as the pages say: by their path, from anywhere, without an environment that is active."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIRST_LINE = """#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'"""
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("tools/**/*.py"),
    *ROOT.glob("examples/*.py"),
]


def named() -> set[str]:
    """Files of tools/ that pages or programs name as commands, with something after them or alone."""
    return {name for page in PAGES for name in re.findall(r"`(tools/\w+\.py)[ `]", page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("path", sorted(ROOT.glob("tools/*.py")), ids=lambda path: path.name)
def test_a_program_starts_with_the_python_of_venv(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    is_program = "if __name__ ==" in text and path.name not in ("netlab_loss.py", "netlab_probe.py")  # netlab.py's
    assert text.startswith("#!") == is_program
    if is_program:
        assert text.splitlines()[0] == FIRST_LINE
        assert path.stat().st_mode & 0o111 == 0o111, f"chmod +x {path.name}"


def test_pages_name_programs_only() -> None:
    assert {"tools/bench.py", "tools/peers.py"} <= named()
    for name in named():
        assert (ROOT / name).is_file(), name


def test_a_program_runs_by_its_path_from_another_folder(tmp_path: Path) -> None:
    command = [str(ROOT / "tools" / "bench.py"), "--help"]
    result = subprocess.run(command, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: bench.py")


def test_an_environment_behind_a_link_is_left_alone(tmp_path: Path) -> None:
    """It belongs to another checkout, which `python -m venv --clear` would leave without one."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "venv.sh", tmp_path / "tools")
    theirs = tmp_path / "theirs" / "bin"
    theirs.mkdir(parents=True)
    (theirs / "python").write_text("not a Python")
    (tmp_path / ".venv").symlink_to(theirs.parent)
    result = subprocess.run([tmp_path / "tools" / "venv.sh"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert ".venv is a link to" in result.stderr
    assert (theirs / "python").read_text() == "not a Python"
