"""The comparison of strategies: how outcomes are judged, and that its pages fit its programs. Nothing is trained."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tools import compare_strategies as comparison
from tools.pages import ROOT, PageError
from tools.strategies.programs import PROGRAMS

ONE = {"weight 0": np.array([1.0, -2.0], np.float32), "loss": np.array([0.5])}


def test_there_are_twenty_programs() -> None:
    assert len(PROGRAMS) == 20


def test_the_pages_are_those_of_the_programs_and_the_recorded_results() -> None:
    recorded = json.loads((ROOT / "docs" / "strategies.json").read_text())
    readme = (ROOT / "README.md").read_text()
    page = comparison.make(recorded, readme)
    assert page == (ROOT / "docs" / "strategies.md").read_text()
    for program in PROGRAMS.values():
        assert f"| {program.what} |" in page


def test_results_of_other_programs_are_refused() -> None:
    with pytest.raises(PageError, match="must have all programs under tfps"):
        comparison.make({"versions": "", "outcomes": {"tfps": {"fit": {}}}}, "")


def test_a_readme_that_says_something_else_is_refused() -> None:
    outcomes = {strategy: {name: {"words": "works"} for name in PROGRAMS} for strategy in comparison.NAMES}
    with pytest.raises(PageError, match=r"README\.md must say: 20 work under tfps, 20 under Multi"):
        comparison.make({"versions": "", "outcomes": outcomes}, "# tfps\n")


def test_equal_workers_with_the_results_of_one_process_work() -> None:
    near = {**ONE, "weight 0": ONE["weight 0"] * np.float32(1 + 1e-5)}
    assert comparison.compared("fit", [ONE, ONE], ONE).works
    assert comparison.compared("fit", [near, near], ONE).works


def test_workers_that_differ_in_one_bit_do_not_work() -> None:
    other = {**ONE, "weight 0": np.nextafter(ONE["weight 0"], np.float32(9))}
    assert comparison.compared("fit", [ONE, other], ONE).words == "workers differ in weights"


def test_other_results_than_those_of_one_process_do_not_work() -> None:
    far = {**ONE, "weight 0": ONE["weight 0"] * np.float32(1.001)}
    outcome = comparison.compared("fit", [far, far], ONE)
    assert outcome.words == "other weights than one process"
    assert "by 0.001 of its largest" in outcome.details
    assert comparison.compared("mixed_bfloat16", [far, far], ONE).works
    assert comparison.compared("dropout", [far, far], ONE).works
    nan = {**ONE, "loss": np.array([np.nan])}
    assert comparison.compared("fit", [nan, nan], ONE).words == "other loss than one process"


def test_missing_results_do_not_work() -> None:
    less = {"weight 0": ONE["weight 0"]}
    assert comparison.compared("fit", [less, less], ONE).words == "other loss than one process"


def test_the_first_error_counts_by_its_last_line(tmp_path: Path) -> None:
    text = 'in user code:\n\n    File "x.py", line 1\n\n    ValueError: bad value <object at 0x7f00>\n'
    files = []
    for rank, message in enumerate(["StoppedError: the other one stopped", text]):
        path = tmp_path / f"fit.{rank}.error"
        path.write_text(json.dumps({"type": "ValueError", "text": message, "trace": ""}))
        os.utime(path, (2 - rank, 2 - rank))
        files.append(path)
    assert comparison.failure(files).words == "ValueError: bad value <object>"
