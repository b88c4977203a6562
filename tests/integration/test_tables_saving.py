"""Two workers that save and restore tables do what one process does; see programs_tables_saving.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import test_programs
import test_tables
from test_programs import Results

pytestmark = pytest.mark.timeout(1200)
QUICK = ("saved_own",)
LONG = "copied", "assigned", "backup_own", "saved_shared", "backup_shared", "checkpoints", "other_optimizer"


def ran(folder: Path, programs: Sequence[str]) -> Results:
    pairs = [("programs_tables_saving", each) for each in programs]
    return test_programs.run(pairs, folder, 2, 1, test_tables.SMALL)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return ran(tmp_path_factory.mktemp("saving"), QUICK)


@pytest.fixture(scope="module")
def more_results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return ran(tmp_path_factory.mktemp("saving"), LONG)


@pytest.mark.parametrize("program", QUICK)
def test_workers_do_what_one_process_does(program: str, results: Results) -> None:
    test_tables.check(program, results)


@pytest.mark.long
@pytest.mark.parametrize("program", LONG)
def test_workers_do_what_one_process_does_with_files_of_all(program: str, more_results: Results) -> None:
    test_tables.check(program, more_results)
