"""How a process takes its place in a job, and leaves it; needs no Ray."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest
import training

import tfps
from tfps.config import Launch
from tfps.errors import ClosedError
from tfps.launch.job import Job
from tfps.ray.place import program, take_place
from tfps.wire.job_token import JobToken

SECRET = "the-token-of-this-job-0123456789"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """One that is forgotten after the test."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TFPS_")}
    monkeypatch.setattr(os, "environ", variables)
    yield variables
    if path := variables.get("TFPS_TOKEN_FILE"):
        os.close(int(Path(path).name))


def test_a_process_finds_its_job_and_no_other(environment: dict[str, str]) -> None:
    environment["TF_CONFIG"] = "of another job"
    take_place(Job("train", 3).at(["a:1", "b:2"]), 2, SECRET)
    assert Launch.from_environment(environment) == Launch(("a:1", "b:2"), 2, 3, "train")
    assert JobToken.read(environment["TFPS_TOKEN_FILE"]).reveal() == SECRET.encode()
    assert "TF_CONFIG" not in environment


@pytest.mark.parametrize("fails", [False, True])
def test_a_program_closes_its_strategies_however_it_ends(fails: bool) -> None:
    with contextlib.suppress(ZeroDivisionError), program():
        strategy = tfps.Strategy()
        model, inputs, targets = training.compiled(strategy)
        model.fit(inputs, targets, verbose=0)
        if fails:
            _ = 1 / 0
    with pytest.raises(ClosedError, match="the strategy is closed"):
        model.fit(inputs, targets, verbose=0)


def test_what_a_program_raises_is_what_its_caller_gets() -> None:
    with pytest.raises(ZeroDivisionError), program():
        _ = 1 / 0


def test_neither_tfps_nor_tfps_ray_imports_ray() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "import tfps, tfps.ray, tfps.ray.place, tfps.ray.wanted\n"
        "try:\n    tfps.ray.run\nexcept tfps.ConfigError as error:\n    print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=jobs.ROOT, capture_output=True, text=True, timeout=60)
    assert said.stdout == "tfps.ray.run needs Ray, which is not installed: pip install 'tfps[ray]'\n", said.stderr
