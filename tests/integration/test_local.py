"""Several workers in modes "local" and "diloco" end where plain Keras models and an outer optimizer by hand end."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import processes
import pytest
from local_training import Settings, Simulation, difference

from tfps.types import Value

pytestmark = pytest.mark.timeout(600)
CASES = [
    Settings(),
    Settings("diloco", optimizer="adam", fragments=2),
    Settings("local", optimizer="adam"),
    Settings("diloco", fragments=2, overlap_steps=2, own_share=0.25),
    Settings("local", overlap_steps=1, own_share=0.5),
]
CLIPPED = [
    Settings(optimizer="clipnorm"),
    Settings(optimizer="clipvalue"),
    Settings("local", optimizer="clipvalue"),
    Settings("local", optimizer="clipnorm"),
    Settings("diloco", optimizer="global_clipnorm"),
    Settings("local", optimizer="global_clipnorm"),
    Settings("local", optimizer="clipped scaled"),
    Settings("diloco", optimizer="clipped accumulated"),
    Settings("local", optimizer="clipped decayed"),
]
COMPRESSED = [
    Settings(compression="int8"),
    Settings("local", optimizer="adam", fragments=2, overlap_steps=1, compression="onebit"),
]


def run(
    cases: Sequence[Settings], steps: Sequence[int], folder: Path, devices: int = 1
) -> list[list[dict[str, Value]]]:
    """What each rank ends with, by case."""
    workers = len(steps)
    files = [folder / f"{rank}.pickle" for rank in range(workers)]
    counts, arguments = ",".join(map(str, steps)), [json.dumps(asdict(case)) for case in cases]
    each = [[str(file), counts, *arguments] for file in files]
    with (
        processes.pservers(2, workers) as addresses,
        processes.started("local.py", addresses, workers, each, DEVICES=str(devices)) as running,
    ):
        processes.outputs(running)
    ranks = [pickle.loads(file.read_bytes()) for file in files]
    return [[rank[number] for rank in ranks] for number in range(len(cases))]


def check(case: Settings, steps: Sequence[int], ranks: Sequence[dict[str, Value]], tolerance: float) -> None:
    simulation = Simulation(ranks[0]["initial"], case, steps)
    simulation.run()
    for rank, result in enumerate(ranks):
        assert len(result["own"]) == steps[rank]
        for step, (own, expected) in enumerate(zip(result["own"], simulation.trajectory[rank], strict=True), 1):
            found = difference(own, expected)
            assert found <= tolerance, f"{case}: rank {rank} after step {step}: {found}"
        assert difference(result["end"], ranks[0]["end"]) == 0.0, f"{case}: rank {rank}"
        assert difference(result["end"], simulation.shared) <= tolerance, f"{case}: rank {rank} at the end"


UNEVEN = [15, 6]
FEW = [CASES[0], CASES[3], CLIPPED[0]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Value]]]:
    """Of `FEW`, on two workers of which one has fewer batches."""
    return run(FEW, UNEVEN, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("number", range(len(FEW)))
def test_two_workers_with_different_numbers_of_batches_do_bitwise_what_is_done_by_hand(
    number: int, two: list[list[dict[str, Value]]]
) -> None:
    check(FEW[number], UNEVEN, two[number], 0.0)


def test_workers_exchange_nothing_between_two_outer_steps(two: list[list[dict[str, Value]]]) -> None:
    # Rank 0's random states and initial values, then one bucket every 4 steps.
    for steps, result in zip(UNEVEN, two[0], strict=True):
        assert result["pushed"] == [2 + step // 4 for step in range(1, steps + 1)]


@pytest.mark.long
def test_two_workers_do_bitwise_what_is_done_by_hand(tmp_path: Path) -> None:
    cases = [*CASES, *COMPRESSED]
    for case, ranks in zip(cases, run(cases, [12, 12], tmp_path), strict=True):
        check(case, [12, 12], ranks, 0.0)


@pytest.mark.long
def test_two_workers_clip_the_gradient_of_their_own_batch(tmp_path: Path) -> None:
    for case, ranks in zip(CLIPPED, run(CLIPPED, [12, 12], tmp_path), strict=True):
        check(case, [12, 12], ranks, 1e-6 if case.optimizer == "global_clipnorm" else 0.0)  # docs/contract.md


@pytest.mark.long
def test_two_workers_with_compression_do_bitwise_what_is_done_by_hand_also_with_fewer_batches(tmp_path: Path) -> None:
    for case, ranks in zip(COMPRESSED, run(COMPRESSED, UNEVEN, tmp_path), strict=True):
        check(case, UNEVEN, ranks, 0.0)


@pytest.mark.long
def test_three_workers_with_two_devices_do_what_is_done_by_hand(tmp_path: Path) -> None:
    steps = [10, 12, 9]
    for case, ranks in zip(CASES, run(CASES, steps, tmp_path, devices=2), strict=True):
        check(case, steps, ranks, 1e-4)  # sums of three, and of two devices; Adam divides by small roots
