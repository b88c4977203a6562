"""Two workers whose data have a batch with components of other first dimensions both end, by name, before that batch.

What has one first dimension is in tests/input/test_global_batches.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import processes
import pytest

pytestmark = pytest.mark.timeout(300)
# Batches that were trained on: those before, and as many as the data for training have where others are wrong.
ENDED = {"fit": 3, "py_dataset": 3, "generator": 3, "validation": 6, "evaluate": 0, "loop": 3}
REFUSED = "UnsupportedError: a batch is cut .* got 30 in batch[0]['edges'], 12 in batch[0]['nodes'], 12 in batch[1]"


@pytest.mark.parametrize(
    ("options", "programs"),
    [
        pytest.param({}, ("fit", "validation"), id="whole"),
        pytest.param({}, tuple(ENDED), id="whole, all", marks=pytest.mark.long),
        pytest.param({"TFPS_MIN_WORKERS": "1"}, tuple(ENDED), id="min_workers", marks=pytest.mark.long),
    ],
)
def test_a_batch_of_other_first_dimensions_ends_all_ranks_by_name(
    options: Mapping[str, str], programs: Sequence[str], tmp_path: Path
) -> None:
    names = [f"programs_first_dimensions.{each}" for each in (*programs, "predict")]
    ended = processes.ran(tmp_path, names, options, count=1, timeout_s=200.0)
    start, _, found = REFUSED.partition(" .* ")
    for rank, results in enumerate(ended):
        assert results["predict"] == {"error": "none", "batches": 0}
        for name in programs:
            trained = ENDED[name]
            error = results[name]["error"]
            assert error.startswith(start) and found in error, f"{name}, rank {rank}: {error}"
            assert results[name]["batches"] == trained, f"{name}, rank {rank}"
