"""Batches that do not divide: each replica counts by its rows, so that weights and losses are those of plain Keras."""

from __future__ import annotations

import pytest
import test_programs

PROGRAMS = [
    *("arrays", "every_batch_uneven", "last_batch_of_one_row", "last_batch_of_four_rows", "fewer_rows_than_replicas"),
    *("eagerly", "tf_data", "py_dataset", "accumulated", "masked", "by_sample_weights", "tracked_loss"),
    *("train_on_batch", "loop_eager", "loop_function", "normalized", "moving_mean", "several_steps"),
]
ONE_DEVICE = {"several_steps"}  # as under every strategy; see docs/semantics.md
pytestmark = pytest.mark.timeout(600)
long = pytest.mark.long


@pytest.fixture(
    scope="module",
    params=[(3, 1), (2, 2), pytest.param((2, 1), marks=long), pytest.param((1, 2), marks=long)],
    ids=lambda job: f"{job[0]} workers x {job[1]} devices",
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> test_programs.Results:
    workers, devices = request.param
    names = [name for name in PROGRAMS if devices == 1 or name not in ONE_DEVICE]
    pairs = [("programs_rows", name) for name in names]
    return test_programs.run(pairs, tmp_path_factory.mktemp("rows"), workers, devices)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_does_not_divide_is_what_plain_keras_does(name: str, results: test_programs.Results) -> None:
    if name not in results[0]:
        pytest.skip("several devices run one step per execution")
    test_programs.check(name, results)
