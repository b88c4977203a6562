"""Batches that do not divide: each replica counts by its rows, so that weights and losses are those of plain Keras."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import test_programs
from test_programs import Results

PROGRAMS = [
    *("arrays", "every_batch_uneven", "last_batch_of_one_row", "last_batch_of_four_rows", "fewer_rows_than_replicas"),
    *("one_row_in_all", "eagerly", "several_steps", "tf_data", "py_dataset", "accumulated", "masked"),
    *("updated_in_the_step", "by_sample_weights", "other_reductions", "tracked_loss", "train_on_batch", "loop_eager"),
    *("evaluated_evenly_after_an_uneven_batch", "loop_function", "normalized", "moving_mean", "worker_without_rows"),
    *("loop_of_sparse_gradients", "loss_scale", "moving_means_in_loops"),
]
WHOLE = [  # of programs_whole.py
    *("convolutional", "attentive", "recurrent_eagerly", "synchronized", "synchronized_eagerly", "scalar_losses"),
    *("endpoint", "own_steps", "nested_step", "contrast", "contrast_eagerly", "clipped", "annealed"),
    *("annealed_eagerly", "dice", "each_row", "lookups", "nested_lookups", "unique_lookups", "states"),
    *("used_states", "used_states_eagerly", "used_states_in_steps"),
]
# Of programs_no_rows.py.
NO_ROWS = ["layer", "layer_eagerly", "number_eagerly", "step", "aggregated", "scaled", "sparse"]
# By workers and devices; the differential tester draws more of the kind (tests/tools/test_fuzz_programs.py).
QUICK = {
    (2, 1): ["one_row_in_all", "moving_means_in_loops"],
}
ONE_DEVICE = {
    "several_steps",
    "nested_step",
    "each_row",
    "nested_lookups",
    "used_states_in_steps",
    "states",  # a queue: with several devices per worker replicas' rows are not in the order of the batch
}  # as under every strategy; docs/semantics.md
pytestmark = pytest.mark.timeout(1200)
Jobs = Callable[[int, int, str], Results]


def module_of(name: str) -> str:
    return "programs_whole" if name in WHOLE else "programs_no_rows" if name in NO_ROWS else "programs_rows"


def cases(jobs: dict[tuple[int, int], list[str]]) -> list[object]:
    return [
        pytest.param(*job, name, id=f"{name}, {job[0]} workers, {job[1]} devices")
        for job, names in jobs.items()
        for name in names
        if job[1] == 1 or name not in ONE_DEVICE
    ]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Runs all programs of a job together, those of one module where there are many."""

    @functools.cache
    def results(workers: int, devices: int, module: str) -> Results:
        names = QUICK[workers, devices] if not module else [*PROGRAMS, *WHOLE, *NO_ROWS]
        pairs = [(module_of(name), name) for name in names if devices == 1 or name not in ONE_DEVICE]
        pairs = [pair for pair in pairs if pair[0] == (module or pair[0])]
        return test_programs.run(pairs, tmp_path_factory.mktemp("rows"), workers, devices)

    return results


@pytest.mark.parametrize(("workers", "devices", "name"), cases(QUICK))
def test_what_does_not_divide_is_what_plain_keras_does(workers: int, devices: int, name: str, jobs: Jobs) -> None:
    test_programs.check(name, jobs(workers, devices, ""))


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "devices", "name"),
    cases({job: [*PROGRAMS, *WHOLE, *NO_ROWS] for job in [(2, 1), (3, 1), (1, 2), (2, 2)]}),
)
def test_so_it_does_with_other_workers_and_devices(workers: int, devices: int, name: str, jobs: Jobs) -> None:
    test_programs.check(name, jobs(workers, devices, module_of(name)))


@pytest.fixture(scope="module")
def no_rows(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of the programs with update="server"."""
    pairs = [("programs_no_rows", name) for name in NO_ROWS]
    return test_programs.run(pairs, tmp_path_factory.mktemp("no_rows"), more={"TFPS_UPDATE": "server"})


@pytest.mark.long
@pytest.mark.parametrize("name", NO_ROWS)
def test_what_is_nan_of_no_rows_reaches_nothing_on_the_server(name: str, no_rows: Results) -> None:
    test_programs.check(name, no_rows)
