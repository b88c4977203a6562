"""Every program in docs/ray.md runs on a cluster of several nodes and does what the page says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import doc_blocks
import jobs
import on_ray
import pytest

from tfps.types import Argument

pytest.importorskip("ray", reason=on_ray.NEEDS_RAY)
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

BLOCKS = doc_blocks.blocks(jobs.ROOT / "docs" / "ray.md")


def run(cluster: Argument, text: str, folder: Path) -> tuple[str, str]:
    """The last line that a program prints, without those of the processes that it starts; and all of them."""
    program = folder / "program.py"
    program.write_text(text)
    ended = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(jobs.ROOT), "RAY_ADDRESS": cluster.address, "HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stdout
    on_ray.nothing_is_left()
    own = [line for line in ended.stdout.splitlines() if line and not line.startswith(("\x1b", "("))]
    return next(line for line in reversed(own) if line[0] in "[{"), ended.stdout


def test_all_programs_are_tested() -> None:
    assert [block.language for block in BLOCKS] == ["python", "python", "python"]


def test_a_function_runs_on_several_workers(cluster: Argument, tmp_path: Path) -> None:
    first, second = ast.literal_eval(run(cluster, BLOCKS[0].text, tmp_path)[0])
    assert (first[0], second[0]) == (0, 1)
    assert first[1] == second[1]


def test_a_function_runs_where_workers_may_be_lost(cluster: Argument, tmp_path: Path) -> None:
    other = 'tfps.ray.run(train, workers=2, resources_per_worker={"CPU": 1})'
    assert other in BLOCKS[0].text
    results = run(cluster, BLOCKS[0].text.replace(other, BLOCKS[1].text.strip()), tmp_path)[0]
    assert [rank for rank, _ in ast.literal_eval(results)] == [0, 1, 2]


def test_ray_train_reports_and_keeps_checkpoints(cluster: Argument, tmp_path: Path) -> None:
    last, output = run(cluster, BLOCKS[2].text, tmp_path)
    assert re.fullmatch(r"\{'loss': [0-9.]+\} Checkpoint\(filesystem=local, path=\S+\)", last), last
    checkpoint = Path(last.rpartition("path=")[2].rstrip(")"))
    assert (checkpoint / "model.keras").exists()
    assert len(list(checkpoint.parent.glob("checkpoint_*/model.keras"))) == 3, output
