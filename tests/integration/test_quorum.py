"""With a quorum a late worker costs the others nothing, and its change counts by its steps when it comes."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import local_training
import numpy as np
import processes
import pytest
from jobs import Cluster
from local_training import Settings, Weights, difference

from tfps.types import Json

STEPS = 24
# Who is in each exchange, and after how many steps. The first one has initial values, so it needs all.
ROUNDS = [{0: 4, 1: 4, 2: 4}, {0: 8, 1: 8}, {0: 12, 1: 12}, {0: 16, 1: 16, 2: 8}, {0: 20, 1: 20, 2: 12}]
# Then others are at the end of the epoch and have nothing more.
ROUNDS += [{0: 24, 1: 24, 2: 16}, {0: 24, 1: 24, 2: 20}, {0: 24, 1: 24, 2: 24}]


# Rank 2 is late all the time, and at the end of the epoch it has made two steps after the first exchange.
ABSENT = [ROUNDS[0], *({0: steps, 1: steps} for steps in (8, 12, 16, 20, 24)), {0: 24, 1: 24, 2: 6}]


def by_hand(weights: Weights, settings: Settings, rounds: list[dict[int, int]]) -> Weights:
    """The global parameters at the end."""
    workers = [local_training.Worker(weights, settings, rank, STEPS) for rank in range(3)]
    shared, momentum = [each.copy() for each in weights], [np.zeros_like(each) for each in weights]
    bases, last = [[each.copy() for each in weights] for _ in workers], [0, 0, 0]
    rate, beta = (1.0, 0.0) if settings.mode == "local" else (settings.outer_learning_rate, settings.outer_momentum)
    for members in rounds:
        for rank, steps in members.items():
            for _ in range(workers[rank]._step, steps):
                workers[rank].step()
        # Who is at the end of its data, and waits there, counts as if it had trained on.
        steps_made = {rank: max(steps - last[rank], settings.inner_steps) for rank, steps in members.items()}
        for place, exact in enumerate(shared):
            changes = [(bases[rank][place] - workers[rank].weights[place]) * made for rank, made in steps_made.items()]
            mean = sum(changes) / sum(steps_made.values())
            momentum[place] = momentum[place] * beta - mean * rate
            exact += momentum[place] * beta - mean * rate
        for rank, steps in members.items():
            last[rank], bases[rank] = steps, [each.copy() for each in shared]
            for place, value in enumerate(shared):
                workers[rank].set(place, value)
    return shared


def trained(cluster: Cluster, folder: Path, settings: Settings, skips: int = 2, steps: int = STEPS) -> list[Json]:
    more = json.dumps(vars(settings)), str(skips), str(steps)
    arguments = [[f"{folder}/{rank}.pickle", *more] for rank in range(3)]
    with processes.started("late.py", cluster.pservers(2, 3), 3, arguments) as running:
        processes.outputs(running)
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(3)]


CASES = [
    pytest.param(Settings("local"), id="local", marks=pytest.mark.long),
    pytest.param(Settings(), id="diloco", marks=pytest.mark.long),
    pytest.param(Settings(compression="int8"), id="int8", marks=pytest.mark.long),
]


@pytest.mark.parametrize("settings", CASES)
def test_a_late_change_counts_by_its_steps_when_it_comes(cluster: Cluster, tmp_path: Path, settings: Settings) -> None:
    ranks = trained(cluster, tmp_path, settings)
    assert [rank["skipped"] for rank in ranks] == [[0], [0], [2]]
    for rank in ranks:
        assert difference(rank["end"], ranks[0]["end"]) == 0.0
    if settings.compression == "none":
        assert difference(ranks[0]["end"], by_hand(ranks[0]["initial"], settings, ROUNDS)) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("settings", CASES)
def test_a_worker_that_is_late_all_the_time_has_its_part_at_the_end(
    cluster: Cluster, tmp_path: Path, settings: Settings
) -> None:
    ranks = trained(cluster, tmp_path, settings, 5, 6)
    assert [rank["skipped"] for rank in ranks] == [[0], [0], [5]]
    for rank in ranks:
        assert difference(rank["end"], ranks[0]["end"]) == 0.0
    if settings.compression == "none":
        assert difference(ranks[0]["end"], by_hand(ranks[0]["initial"], settings, ABSENT)) < 1e-5


@pytest.mark.long
def test_fragments_and_steps_in_between(cluster: Cluster, tmp_path: Path) -> None:
    ranks = trained(cluster, tmp_path, Settings(fragments=2, overlap_steps=1, compression="int8"))
    for rank in ranks:
        assert difference(rank["end"], ranks[0]["end"]) == 0.0
    assert all(np.isfinite(each).all() for each in ranks[0]["end"])
