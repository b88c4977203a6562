"""Finds Python interpreters by their version, and runs what installs into the environments that tools make."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
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


class CommandError(Exception):
    """A command has failed; the text names it and ends with what it said last."""


def run(command: Sequence[str], variables: Mapping[str, str], timeout_s: float, *, nice: bool = False) -> None:
    """Runs `command` silently with more variables in its environment; with `nice`, behind everything else.

    Raises:
        CommandError: it failed, or took longer than `timeout_s`.
    """
    before = ["nice", "-n", "19"] if nice and shutil.which("nice") else []
    try:
        done = subprocess.run(
            [*before, *command],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise CommandError(f"{' '.join(command)} must end within {timeout_s:.0f} s") from None
    if done.returncode != 0:
        last = "\n".join(done.stdout.splitlines()[-15:])
        raise CommandError(f"{' '.join(command)} ended with {done.returncode}, and said last\n{last}")
