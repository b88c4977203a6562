"""Two workers that save and restore tables do what one process does; see programs_tables_saving.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_programs
import test_tables
from test_programs import Results

pytestmark = pytest.mark.timeout(600)
PROGRAMS = [
    *("saved_shared", "saved_own", "backup_shared", "backup_own", "checkpoints", "other_optimizer", "assigned"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    pairs = [("programs_tables_saving", each) for each in PROGRAMS]
    folder: Path = tmp_path_factory.mktemp("saving")
    return test_programs.run(pairs, folder, 2, 1, test_tables.SMALL)


@pytest.mark.parametrize("program", PROGRAMS)
def test_workers_do_what_one_process_does(program: str, results: Results) -> None:
    test_tables.check(program, results)
