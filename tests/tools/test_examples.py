"""Every example runs alone and with two workers and two pservers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import jobs
import keras
import numpy as np
import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

EXAMPLES = jobs.ROOT / "examples"
ALONE: list[str] = [sys.executable]
LAUNCHED = [sys.executable, "-m", "tfps.launch", "--workers", "2", "--pservers", "2"]
ways = pytest.mark.parametrize(("command", "workers"), [(ALONE, 1), (LAUNCHED, 2)], ids=["alone", "two workers"])


def run(
    command: list[str], example: str, *arguments: str, code: int = 0, settings: Mapping[str, str] | None = None
) -> str:
    """The output of an example, which must end with `code`, with `settings` in its environment."""
    ended = subprocess.run(
        [*command, str(EXAMPLES / f"{example}.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(jobs.ROOT), **(settings or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    assert ended.returncode == code, ended.stdout
    return ended.stdout


def number(name: str, output: str) -> float:
    lines = [line for line in output.splitlines() if not line.startswith("[pserver")]
    found = re.findall(rf"{name}=([0-9.]+)", "\n".join(lines))
    assert len(found) == 1, f"{name} once, by rank 0 only:\n{output}"
    return float(found[0])


def test_no_example_is_forgotten() -> None:
    tested = {"digits", "custom_loop", "train_step", "flowers", "text", "clicks", "backup"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested


@ways
@pytest.mark.parametrize(
    ("example", "at_least"), [("digits", 0.97), ("custom_loop", 0.86), ("train_step", 0.86), ("text", 0.95)]
)
def test_it_learns(example: str, at_least: float, command: list[str], workers: int) -> None:
    output = run(command, example)
    assert number("test_accuracy", output) >= at_least
    assert number("workers", output) == workers


@pytest.mark.parametrize(
    ("command", "mode", "settings"),
    [
        (ALONE, "sync", {}),
        (LAUNCHED, "sync", {}),
        (LAUNCHED, "async", {"TFPS_UPDATE": "server", "TFPS_STALENESS": "2"}),
        (LAUNCHED, "async", {"TFPS_UPDATE": "server"}),
    ],
    ids=["alone", "sync", "bounded", "async"],
)
def test_clicks_are_foreseen_nearly_as_well_as_can_be(command: list[str], mode: str, settings: dict[str, str]) -> None:
    output = run(command, "clicks", "--steps", "300", settings={"TFPS_MODE": mode, **settings})
    best = number("best_auc", output)
    assert best < 0.9
    assert best - 0.04 < number("test_auc", output) < best
    assert f"mode={mode}" in output


@ways
def test_flowers_generates_images_and_says_so(command: list[str], workers: int) -> None:
    output = run(command, "flowers", "--size", "32", "--batch-size", "8", "--images", "32", "--epochs", "2")
    assert "generated, because there is no --data DIR" in output
    assert number("workers", output) == workers


def test_flowers_reads_a_folder_with_a_subfolder_per_kind(tmp_path: Path) -> None:
    for kind in ("daisy", "roses", "tulips"):
        (tmp_path / kind).mkdir()
        for image in range(6):
            pixels = np.random.default_rng(image).integers(0, 255, (40, 50, 3))
            keras.utils.save_img(tmp_path / kind / f"{image}.jpg", pixels)
    output = run(LAUNCHED, "flowers", "--data", str(tmp_path), "--size", "32", "--batch-size", "6", "--epochs", "1")
    assert f"images: {tmp_path}" in output
    assert number("workers", output) == 2


@ways
def test_a_backup_goes_on_where_training_was_stopped(command: list[str], workers: int, tmp_path: Path) -> None:
    directory = ("--directory", str(tmp_path / "backup"))
    assert "stopped before epoch 4" in run(command, "backup", *directory, "--stop-after", "3", code=1)
    output = run(command, "backup", *directory)
    assert "trained epochs 4, 5, 6" in output
    assert number("workers", output) == workers
