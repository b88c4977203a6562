"""What is built for a package index: what the wheel and the source distribution hold, what their page says, that the
wheel works where nothing else is installed.
"""

from __future__ import annotations

import email
import email.message
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tfps import __version__

ROOT = Path(__file__).resolve().parent.parent
BUILD_S, INSTALL_S, DEMO_S = 240.0, 1500.0, 600.0
# What the build itself adds to a source distribution.
GENERATED = re.compile(r"PKG-INFO|setup\.cfg|tfps\.egg-info/.*")


@dataclass(frozen=True)
class Built:
    """A wheel, a source distribution, and the files of the repository that they were built from."""

    wheel: Path
    sdist: Path
    files: frozenset[str]

    @property
    def in_wheel(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())

    @property
    def in_sdist(self) -> set[str]:
        with tarfile.open(self.sdist) as archive:
            return {member.name.partition("/")[2] for member in archive if member.isfile()}

    @property
    def metadata(self) -> email.message.Message:
        with zipfile.ZipFile(self.wheel) as archive:
            return email.message_from_bytes(archive.read(f"tfps-{__version__}.dist-info/METADATA"))


def run(*command: object, timeout_s: float, **options: Path | dict[str, str]) -> str:
    """Runs a program that must succeed; what it said."""
    ended = subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        **options,  # type: ignore[call-overload]
    )
    assert ended.returncode == 0, ended.stdout
    return str(ended.stdout)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built as for a release, the wheel from the source distribution, but with the setuptools that is installed."""
    folder = tmp_path_factory.mktemp("built")
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    # A copy: a build leaves folders in its sources, and other tests use the repository meanwhile.
    sources = shutil.copytree(ROOT, folder / "sources", ignore=shutil.ignore_patterns(".git", *ignored))
    there = (str(path.relative_to(sources)) for path in sources.rglob("*") if path.is_file())
    files = frozenset(name for name in there if not GENERATED.fullmatch(name))  # sources may be such a distribution
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", sources)
    run(*command, timeout_s=BUILD_S, cwd=folder)
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return Built(wheel, sdist, files)


def test_both_are_named_after_the_one_version(built: Built) -> None:
    assert built.wheel.name.startswith(f"tfps-{__version__}-cp")  # of one Python and platform: it may hold C code
    assert built.sdist.name == f"tfps-{__version__}.tar.gz"
    assert built.metadata["Version"] == __version__


def test_the_wheel_has_the_whole_package_and_nothing_else(built: Built) -> None:
    package = {name for name in built.files if name.startswith("tfps/")}
    about = {name for name in built.in_wheel if name.startswith(f"tfps-{__version__}.dist-info/")}
    compiled = {name for name in built.in_wheel if name.endswith(".so")}
    assert {name.split(".")[0] for name in compiled} <= {"tfps/wire/_native"}
    assert built.in_wheel - about - compiled == package - {"tfps/wire/_native.c"}
    for name in ("py.typed", "protos/tfps_pb2.py", "protos/tfps_pb2.pyi", "tensorboard/static/index.js"):
        assert f"tfps/{name}" in package
    assert f"tfps-{__version__}.dist-info/licenses/LICENSE" in about
    assert built.metadata["License-Expression"] == "Apache-2.0"


def test_the_source_distribution_has_the_whole_repository(built: Built) -> None:
    assert {name for name in built.in_sdist if not GENERATED.fullmatch(name)} == built.files
    assert {"LICENSE", "protos/tfps.proto", "setup.py"} < built.files


def test_the_page_on_an_index_has_no_links_that_lead_nowhere(built: Built) -> None:
    page = str(built.metadata.get_payload())
    assert re.findall(r"\]\((?!https?://)", page) == []
    assert "](https://" in page
    assert "![" not in page
    assert "pip install 'tfps[tensorflow,examples]'" in page
    assert "'.[" not in page
    for words in (
        "Finding what is slow",
        "all figures and methods",
        "digits, a notebook, custom training loop",
    ):
        assert words in " ".join(page.split())


@pytest.mark.skipif(importlib.util.find_spec("twine") is None, reason="needs twine: pip install '.[release]'")
def test_an_index_will_take_both_and_render_their_page(built: Built) -> None:
    said = run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", built.wheel, built.sdist, timeout_s=60)
    assert said.count("PASSED") == 2, said


@pytest.mark.long
@pytest.mark.timeout(INSTALL_S + DEMO_S + BUILD_S)
def test_the_wheel_trains_the_digits_where_nothing_else_is_installed(built: Built, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TFPS_", "VIRTUAL"))}
    pip = (programs / "python", "-m", "pip", "install", "-q", "--no-input", "-c", ROOT / "constraints.txt")
    run(*pip, f"{built.wheel}[cpu,examples]", timeout_s=INSTALL_S, cwd=tmp_path, env=clean)
    shutil.copy(ROOT / "examples" / "digits.py", tmp_path)

    where = run(programs / "python", "-c", "import tfps; print(tfps.__file__)", timeout_s=60, cwd=tmp_path, env=clean)
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")
    command = (programs / "tfps_launch", "--workers", 2, "--pservers", 2, "digits.py")
    said = run(*command, timeout_s=DEMO_S, cwd=tmp_path, env=clean)
    found = re.search(r"\[worker 0\] test_accuracy=([0-9.]+) workers=2 pservers=2", said)
    assert found, said
    assert float(found[1]) >= 0.97
