#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Installs what tfps is compared with, each into an environment of its own: `tools/peers.py install NAME|all`, `list`.

Environments are below $TFPS_PEERS_HOME (default: ~/.cache/tfps-peers). What is not installed is left out by
`tools/bench.py peers`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools import interpreters

PIP_S = 3600.0  # a build from source on a busy machine
STAMP = "tfps-peer.json"


class PeerError(Exception):
    """A peer cannot be installed or run; the message says why and what to do."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment and what is installed into it.

    Args:
        python: version that the packages exist for, as in "3.8".
        installs: arguments of `pip install`, one call after the other.
        programs: that building needs, besides Python.
        variables: for building.
    """

    name: str
    what: str
    python: str
    installs: tuple[tuple[str, ...], ...]
    programs: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        return home() / self.name

    @property
    def interpreter(self) -> Path:
        return self.directory / "bin" / "python"

    @property
    def recipe(self) -> str:
        """Equal for equal content."""
        return json.dumps({"python": self.python, "installs": self.installs, "variables": dict(self.variables)})

    @property
    def is_installed(self) -> bool:
        """Completely, and as this version of the tools wants it."""
        stamp = self.directory / STAMP
        return stamp.is_file() and stamp.read_text() == self.recipe and self.interpreter.exists()


ENVIRONMENTS = (
    Environment(
        "horovod",
        "Horovod 0.28.1 with Gloo, TensorFlow 2.15; built from source, about 12 minutes",
        "3.10",
        # The newest TensorFlow that this Horovod, its last release, can be built against.
        (
            ("tensorflow-cpu==2.15.*", "setuptools<70", "wheel"),
            ("--no-cache-dir", "--no-build-isolation", "horovod==0.28.1"),
        ),
        programs=("cmake", "make", "g++"),
        variables={
            "HOROVOD_WITH_TENSORFLOW": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITHOUT_MPI": "1",
            "HOROVOD_WITHOUT_PYTORCH": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
        },
    ),
    Environment("mxnet", "MXNet 1.9.1, with and without P3", "3.8", (("mxnet==1.9.1", "numpy<1.24"),)),
    Environment(
        "tensorflow",
        "TensorFlow 2.21 with tf_keras: MultiWorkerMirroredStrategy and ParameterServerStrategy",
        "3.11",
        (("tensorflow-cpu==2.21.*", "tf_keras==2.21.*"),),
    ),
)


def home() -> Path:
    """Where the environments are."""
    return Path(os.environ.get("TFPS_PEERS_HOME") or Path.home() / ".cache" / "tfps-peers").absolute()


def environment(name: str) -> Environment:
    """The environment of this name.

    Raises:
        PeerError: there is none.
    """
    for one in ENVIRONMENTS:
        if one.name == name:
            return one
    known = ", ".join(one.name for one in ENVIRONMENTS)
    raise PeerError(f"peer must be one of {known} or all, got {name!r}; `tools/peers.py list` describes them")


def find_python(version: str, name: str) -> Path:
    """An interpreter of exactly this minor version.

    Args:
        name: of the peer, for the message.

    Raises:
        PeerError: there is none on PATH nor among the versions of pyenv.
    """
    if found := interpreters.find(version):
        return found
    raise PeerError(
        f"peer '{name}' needs Python {version}, its packages exist for no other here; found none on PATH nor among "
        f"pyenv's versions. Install it (pyenv install {version}, or your system's python{version} with venv), or give "
        f"its path: tools/peers.py install {name} --python PATH"
    )


def install(wanted: Environment, python: Path | None = None) -> None:
    """Makes the environment, or completes one that was begun, with the lowest priority on processors.

    Raises:
        PeerError: the interpreter or a program is missing, or pip failed; the message has its last lines.
    """
    if wanted.is_installed:
        print(f"{wanted.name}: is installed in {wanted.directory}")
        return
    if missing := [program for program in wanted.programs if shutil.which(program) is None]:
        raise PeerError(f"peer '{wanted.name}' is built from source and needs {', '.join(missing)}: install it first")
    if python is None:
        python = find_python(wanted.python, wanted.name)
    elif (version := interpreters.version_of(python)) != wanted.python:
        raise PeerError(f"--python of peer '{wanted.name}' must be a Python {wanted.python}, got {python} ({version})")
    print(f"{wanted.name}: {wanted.what}; into {wanted.directory} with {python}", flush=True)
    (wanted.directory / STAMP).unlink(missing_ok=True)
    if interpreters.version_of(wanted.interpreter) != wanted.python:
        _run([str(python), "-m", "venv", "--clear", str(wanted.directory)], {}, wanted)
    variables = {
        **wanted.variables,
        "MAKEFLAGS": "-j1",  # others may be measuring
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PATH": f"{wanted.interpreter.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    for arguments in wanted.installs:
        _run([str(wanted.interpreter), "-m", "pip", "install", "--no-input", "-q", *arguments], variables, wanted)
    (wanted.directory / STAMP).write_text(wanted.recipe)
    print(f"{wanted.name}: installed", flush=True)


def _run(command: Sequence[str], variables: Mapping[str, str], wanted: Environment) -> None:
    try:
        interpreters.run(command, variables, PIP_S, nice=True)
    except interpreters.CommandError as error:
        raise PeerError(f"peer '{wanted.name}': {error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True, metavar="install|list")
    actions.add_parser("list", help="what there is, and what is installed")
    installs = actions.add_parser("install", help="makes environments; those that are complete stay as they are")
    installs.add_argument("name", metavar="NAME|all")
    installs.add_argument("--python", type=Path, metavar="PATH", help="interpreter to use (default: one is looked for)")
    options = parser.parse_args(arguments)
    if options.action == "list":
        for one in ENVIRONMENTS:
            state = f"installed in {one.directory}" if one.is_installed else "not installed"
            print(f"{one.name:11} Python {one.python:5} {one.what}\n{'':11} {state}")
        return 0
    failed = 0
    try:
        chosen = ENVIRONMENTS if options.name == "all" else (environment(options.name),)
    except PeerError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    if options.python is not None and options.name == "all":
        print("peers: --python is for one peer, got it with 'all': install them one by one", file=sys.stderr)
        return 2
    for one in chosen:
        try:
            install(one, options.python)
        except (PeerError, OSError) as error:
            print(f"peers: {error}", file=sys.stderr)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
