"""Mode "async" with real processes, the last of which is slow: who uses which batches, and what all have in the end."""

from __future__ import annotations

import itertools
import pickle
import re
from pathlib import Path

import processes
import pytest
from local_training import Settings, Worker, difference
from programs_async import BATCHES, ROWS, STEPS

from tfps.pserver.server import ParameterServer
from tfps.types import Value

WORKERS = 3
pytestmark = pytest.mark.timeout(600)
ASYNC = {"TFPS_UPDATE": "server", "TFPS_MODE": "async", "TFPS_SLICE_BYTES": "4096", "TFPS_WINDOW_BYTES": "8192"}
Results = list[dict[str, Value]]  # of each rank
LONG = [
    *("first_steps", "loop", "steps_per_epoch", "refused"),
    *("uneven", "steps_per_epoch_of_finite_data", "several_steps", "several_steps_per_epoch", "arrays", "generator"),
    *("own_files", "eager", "adam", "backed_up", "options"),
]
QUICK_WORKERS = 2


def beginnings(workers: int) -> list[int]:
    """The numbers of the rows with which workers' batches begin, in each epoch."""
    return [ROWS * number for number in range(BATCHES * workers)]


EPOCH = beginnings(WORKERS)
EXPECTED = {
    "handed_out": [beginnings(QUICK_WORKERS)] * 5,
    "loop": [EPOCH] * 3,
    "adam": [EPOCH] * 3,
    "several_steps": [EPOCH] * 3,
    "uneven": [[*range(0, ROWS * WORKERS * 5, ROWS), ROWS * WORKERS * 5, ROWS * WORKERS * 5 + 1]] * 3,
    "steps_per_epoch": [sorted((EPOCH * 2)[first : first + 18]) for first in range(0, 72, 18)],
    "several_steps_per_epoch": [EPOCH[first : first + 12] for first in range(0, 36, 12)],
    "steps_per_epoch_of_finite_data": [EPOCH[first : first + 9] for first in (0, 9, 0, 9, 0)],
    "arrays": [EPOCH[:30]] * 3,
    "generator": [EPOCH[:30]] * 3,
    "own_files": [EPOCH[:24]] * 3,
    "eager": [EPOCH[:18]] * 2,
}


def run(
    names: list[str], folder: Path, workers: int = WORKERS, devices: int = 1, ends_well: bool = True, **more: str
) -> Results:
    """What programs, functions of programs_async.py, return on each rank; an empty dict if it dies."""
    servers = [ParameterServer("127.0.0.1", 0, workers=workers) for _ in range(2)]
    arguments = [str(folder), *(f"programs_async.{name}" for name in names)]
    settings = {**ASYNC, "DEVICES": str(devices), "TFPS_STEP_TIMEOUT_S": "120", **more}
    try:
        addresses = [server.address for server in servers]
        with processes.started("program.py", addresses, workers, [arguments] * workers, **settings) as running:
            ended = processes.finish(running, 500)
    finally:
        for server in servers:
            server.stop()
    files = [folder / f"results_{rank}.pickle" for rank in range(workers)]
    found = [pickle.loads(file.read_bytes()) if file.exists() else {} for file in files]
    for rank, (code, output) in enumerate(ended):
        assert code == 0 or not ends_well, f"rank {rank}:\n{output}"
        for name, results in found[rank].items():
            assert "error" not in results, f"{name}, rank {rank}: {results['error']}\n{output}"
    return found


def check(name: str, results: Results) -> None:
    """Each batch was used once in each epoch, and all ranks ended each with the same."""
    ranks = [result[name] for result in results]
    for key in (key for key in ranks[0] if key.startswith("ranks")):
        for other in ranks[1:]:
            assert pickle.dumps(other[key]) == pickle.dumps(ranks[0][key]), key
    used = [sorted(itertools.chain(*epochs)) for epochs in zip(*(each["own rows"] for each in ranks), strict=True)]
    if name == "uneven":  # who has no rows of the last batch gets a row of its own again, which counts for nothing
        assert [len(rows) - len(set(rows)) for rows in used] == [1] * len(used)
        used = [sorted(set(rows)) for rows in used]
    assert used == EXPECTED[name]
    for each in ranks:
        assert all(each["own rows"]), "every rank has a batch in every epoch"
        if "ranks losses" in each:
            assert each["ranks losses"][-1] < each["ranks losses"][0] / 2


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(["handed_out", "saved"], tmp_path_factory.mktemp("quick"), QUICK_WORKERS)


def test_each_batch_of_an_epoch_is_used_once_and_ranks_end_it_with_the_same_weights(quick: Results) -> None:
    check("handed_out", quick)
    steps = [sum(map(len, rank["handed_out"]["own rows"])) for rank in quick]
    assert steps[-1] < sum(steps) / QUICK_WORKERS, "the slow rank made as many steps as others"
    assert int(quick[0]["handed_out"]["ranks steps"]) == 5 * BATCHES  # as many as in mode "sync"


def test_what_is_saved_at_the_end_of_an_epoch_is_of_one_moment_on_all_ranks(quick: Results) -> None:
    first, *others = [result["saved"] for result in quick]
    for other in others:
        assert other == first


@pytest.mark.long
@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("name", list(STEPS))
def test_a_step_is_that_of_plain_keras_with_the_worker_s_own_batch(name: str, eagerly: bool, long: Results) -> None:
    """The first gradients are all computed with the initial weights: the job's step is the sum of the workers'."""
    initial, end = long[0]["first_steps"][f"ranks {name}, eagerly: {eagerly}"]
    settings, expected = Settings(optimizer=name), [each.copy() for each in initial]
    for rank in range(WORKERS):
        worker = Worker(initial, settings, rank, steps=1)
        worker.step()
        for total, before, after in zip(expected, initial, worker.weights, strict=True):
            total += after - before
    for rank_end in (result["first_steps"][f"ranks {name}, eagerly: {eagerly}"][1] for result in long):
        assert difference(rank_end, end) == 0.0
    moved = [one - other for one, other in zip(end, initial, strict=True)]
    assert difference(moved, [one - other for one, other in zip(expected, initial, strict=True)]) < 1e-3


@pytest.mark.long
def test_what_needs_all_ranks_at_one_batch_is_refused_by_name(long: Results) -> None:
    for result in (each["refused"] for each in long):
        for name in ("ModelCheckpoint", "BackupAndRestore"):
            assert f"mode='async' {name} saves at the end of epochs" in result[f"ranks {name}"]
        assert "mode='async' cannot exchange values of" in result["ranks combine"]


@pytest.mark.long
def test_a_rank_that_dies_and_one_without_a_batch_end_the_others_by_name(tmp_path: Path) -> None:
    results = run(["too_few_batches"], tmp_path / "few")
    for result in results:
        text = result["too_few_batches"]["own error"]
        assert re.search(r"needs at least one batch for each worker in an epoch; rank 2 of 3 got none", text), text
    results = run(["dies"], tmp_path / "dies", ends_well=False)
    assert not results[1]
    for result in (results[0], results[2]):
        assert re.search(r"WorkerLostError: rank 1 \(.*died at step", result["dies"]["own error"]), result


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(LONG, tmp_path_factory.mktemp("long"))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in LONG if name in EXPECTED])
def test_batches_are_used_once_in_more_programs(name: str, long: Results) -> None:
    check(name, long)


@pytest.mark.long
def test_ranks_end_alike_with_options_of_optimizers_and_when_compiled_again(long: Results) -> None:
    ends = [result["options"]["ranks weights"] for result in long]
    assert len(ends[0]) == 18
    assert ends[1:] == ends[:1] * (WORKERS - 1)


@pytest.mark.long
def test_a_job_that_was_stopped_goes_on_from_its_last_epoch(long: Results) -> None:
    for result in (each["backed_up"] for each in long):
        assert result["own epochs"] == 2
        assert result["ranks weights"] == long[0]["backed_up"]["ranks weights"]


@pytest.mark.long
def test_workers_with_two_devices_and_a_limit_keep_close_to_each_other(tmp_path: Path) -> None:
    results = run(["handed_out", "generator", "uneven"], tmp_path, workers=2, devices=2, TFPS_STALENESS="1")
    for epochs in zip(*(result["handed_out"]["own rows"] for result in results), strict=True):
        steps = [len(epoch) // 2 for epoch in epochs]  # each device has a batch
        assert max(steps) - min(steps) <= 3, steps  # one ahead, one computed, one that is held
        assert sum(steps) == 2 * BATCHES
