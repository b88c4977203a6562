"""Finds Python interpreters by their version, for the environments that tools make."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def find(version: str) -> Path | None:
    """An interpreter of exactly this minor version (as in "3.10") with venv, on PATH or among pyenv's; None: there is
    none."""
    return next((path for path in _candidates(version) if version_of(path) == version), None)


def _candidates(version: str) -> Iterator[Path]:
    yield Path(sys.executable).resolve()
    if found := shutil.which(f"python{version}"):
        yield Path(found)
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(root.glob(f"versions/{version}.*/bin/python"), reverse=True)


def version_of(python: Path) -> str | None:
    """Its minor version; None if it does not run (as the stand-ins that pyenv puts on PATH)."""
    command = [str(python), "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None
