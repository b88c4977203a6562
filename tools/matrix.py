#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Runs the core suite on several versions of TensorFlow and Python: `tools/test.sh --matrix [TENSORFLOW:PYTHON ...]`.

Without arguments: the oldest and the newest pair that is supported. Each pair has an environment of its own in
.venv-matrix, made when it is missing or when what belongs into it has changed. Options that pytest shall get come after
"--". Fails if a pair fails or cannot be run, for example because there is no such Python.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import interpreters

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = ROOT / ".venv-matrix"
STAMP = "tfps-installed"
PIP_S, TEST_S = 1800.0, 900

# The core suite is everything in tests/ except for what tests programs of tools/, which run with .venv's versions only.
NOT_CORE = (
    *("test_layers.py", "test_notebook.py", "test_packaging.py", "test_workflows.py"),
    *(f"tools/test_{name}.py" for name in ("matrix", "model_profiles", "netlab", "peers")),
)

# TensorFlow -> the Keras that was current when it came out (the first that divides losses by the number of replicas is
# 3.8), and the Pythons that it exists for.
KERAS = {"2.18": "3.8", "2.19": "3.9", "2.20": "3.11", "2.21": ""}
PYTHONS = {
    "2.18": ("3.10", "3.11", "3.12"),
    "2.19": ("3.10", "3.11", "3.12"),
    "2.20": ("3.10", "3.11", "3.12", "3.13"),
    "2.21": ("3.10", "3.11", "3.12", "3.13"),
}


class MatrixError(Exception):
    """A pair cannot be run; the message says why and what to do."""


@dataclass(frozen=True)
class Pair:
    """A version of TensorFlow and one of Python, as in "2.18" and "3.10"."""

    tensorflow: str
    python: str

    @classmethod
    def parse(cls, text: str) -> Pair:
        """
        Raises:
            MatrixError: not two versions that are supported, and exist, together.
        """
        tensorflow, _, python = text.partition(":")
        if python not in PYTHONS.get(tensorflow, ()):
            known = ", ".join(f"{each}:{pythons[0]} to {pythons[-1]}" for each, pythons in PYTHONS.items())
            raise MatrixError(f"a pair must be TENSORFLOW:PYTHON, one of {known}, got {text!r}")
        return cls(tensorflow, python)

    def __str__(self) -> str:
        return f"{self.tensorflow}:{self.python}"

    @property
    def directory(self) -> Path:
        return DIRECTORY / f"{self.tensorflow}-{self.python}"

    @property
    def interpreter(self) -> Path:
        return self.directory / "bin" / "python"

    def constraints(self) -> str:
        """What pip may install: the oldest of everything, the versions of .venv, or only TensorFlow and Keras."""
        if self.tensorflow == "2.18":
            return (ROOT / "constraints-oldest.txt").read_text()
        if self.tensorflow == "2.21":
            return (ROOT / "constraints.txt").read_text()
        versions = {"tensorflow": self.tensorflow, "tensorflow-cpu": self.tensorflow, "keras": KERAS[self.tensorflow]}
        return "".join(f"{name}=={version}.*\n" for name, version in versions.items())

    def recipe(self) -> str:
        """Equal for equal content at the same place."""
        content = self.constraints() + (ROOT / "setup.py").read_text()
        return f"{self.directory} {zlib.crc32(content.encode())}"


OLDEST, NEWEST = Pair("2.18", "3.10"), Pair("2.21", "3.13")


def install(pair: Pair) -> None:
    """Makes the environment of a pair, or does nothing if it is complete.

    Raises:
        MatrixError: there is no such Python, or pip failed; the message has its last lines.
    """
    stamp = pair.directory / STAMP
    if stamp.is_file() and stamp.read_text() == pair.recipe() and pair.interpreter.exists():
        return
    python = interpreters.find(pair.python)
    if python is None:
        raise MatrixError(
            f"there is no Python {pair.python} with venv on PATH or among pyenv's versions; install it (pyenv install "
            f"{pair.python}, or your system's python{pair.python} and its venv)"
        )
    print(f"matrix: making {pair.directory.relative_to(ROOT)} (about 1.5 GB)", flush=True)
    stamp.unlink(missing_ok=True)
    _run([str(python), "-m", "venv", "--clear", str(pair.directory)])
    constraints = pair.directory / "constraints.txt"
    constraints.write_text(pair.constraints())
    pip = [str(pair.interpreter), "-m", "pip", "install", "--no-input", "-q"]
    _run([*pip, "-c", str(constraints), "-e", f"{ROOT}[cpu,test]"])
    stamp.write_text(pair.recipe())


def _run(command: Sequence[str]) -> None:
    try:
        interpreters.run(command, {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}, PIP_S)
    except interpreters.CommandError as error:
        raise MatrixError(str(error)) from None


def run(pair: Pair, options: Sequence[str]) -> str:
    """Runs the core suite; how it ended, in a few words that begin with "passed" if it did.

    Raises:
        MatrixError: the environment cannot be made.
    """
    install(pair)
    versions = "import sys, tensorflow as tf, keras; print(tf.__version__, keras.__version__, sys.version.split()[0])"
    found = subprocess.run(
        [str(pair.interpreter), "-c", versions],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if found.returncode != 0:
        raise MatrixError(f"TensorFlow cannot be imported: {found.stderr.strip().splitlines()[-1]}")
    tensorflow, keras, python = found.stdout.split()
    described = f"TensorFlow {tensorflow}, Keras {keras}, Python {python}"
    print(f"matrix: {described}", flush=True)
    ignored = [f"--ignore=tests/{name}" for name in NOT_CORE]
    began_s = time.monotonic()
    patient = ["-o", f"timeout={TEST_S}"]  # this may take long, and others may work on the machine meanwhile
    two = ["-n", "2", "--dist", "loadfile"]  # as tools/test.sh
    command = [str(pair.interpreter), "-m", "pytest", "-p", "no:cacheprovider", *two, *patient, *ignored, *options]
    code = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode
    return f"{'passed' if code == 0 else f'failed ({code})'} in {time.monotonic() - began_s:.0f} s: {described}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options: list[str] = []
    if "--" in given:
        given, options = given[: given.index("--")], given[given.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pairs", nargs="*", metavar="TENSORFLOW:PYTHON", help=f"default: {OLDEST} {NEWEST}")
    try:
        pairs = [Pair.parse(text) for text in parser.parse_args(given).pairs] or [OLDEST, NEWEST]
    except MatrixError as error:
        print(f"matrix: {error}", file=sys.stderr)
        return 2
    results = {}
    for pair in pairs:
        try:
            results[pair] = run(pair, options)
        except (MatrixError, OSError) as error:
            results[pair] = f"not run: {error}"
    for pair, result in results.items():
        print(f"matrix: {pair} {result}")
    return 0 if all(result.startswith("passed") for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
