"""Models of keras_rs with tables of tfps: with two and three workers they end as in one process.

Only the one whose negatives are the other rows of a batch ends near that, and equal on all ranks.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import pytest
import test_programs
import test_taught
from test_programs import Results

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        importlib.util.find_spec("keras_rs") is None, reason="needs keras_rs: pip install -e '.[models]'"
    ),
]
PROGRAMS = ["ranking", "dlrm", "ragged", "retrieval", "retrieval_by_index", "gru4rec", "sasrec"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Results]:
    @functools.cache
    def results(workers: int) -> Results:
        pairs = [("keras_rs_models", name) for name in PROGRAMS]
        return test_programs.run(pairs, tmp_path_factory.mktemp("keras_rs"), workers)

    return results


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_models_of_keras_rs_end_as_in_one_process(name: str, workers: int, jobs: Callable[[int], Results]) -> None:
    test_taught.check(name, jobs(workers))
