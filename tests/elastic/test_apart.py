"""A worker is lost where workers train by themselves: it costs its part of a round, and the others go on together."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import faults
import processes
import pytest
from jobs import Cluster
from local_training import Settings, Simulation, difference

from tfps.types import Json

TIMEOUT_S = 240.0
STEPS = 12
# Who is lost in which exchange, at which point, and the first exchange without it.
CASES: dict[str, tuple[Settings, tuple[int, int, faults.Point], int]] = {
    "diloco, rank 0": (Settings(), (0, 1, "before a push"), 1),
    "local, after its part": (Settings("local", optimizer="adam"), (1, 1, "after the last push"), 2),
    "streaming": (Settings(fragments=2, overlap_steps=1), (2, 1, "before a push"), 1),
}


def survivors(
    cluster: Cluster, folder: Path, script: str, fault: tuple[int, int, faults.Point], *arguments: str, **more: str
) -> list[Json]:
    """What those of three workers end with that do not get the fault; each saves it at the path it gets first."""
    each = [[f"{folder}/{rank}.pickle", *arguments] for rank in range(3)]
    more = {"TFPS_MIN_WORKERS": "1", "FAULT": json.dumps(fault), **more}
    with processes.started(script, cluster.pservers(2, 3), 3, each, **more) as started:
        results = processes.finish(started, TIMEOUT_S)
    text = "\n".join(output for _, output in results)
    assert [code for code, _ in results] == [-9 if rank == fault[0] else 0 for rank in range(3)], text
    assert text.count("the job goes on with 2 of 3 workers") == 2, text
    return [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("*.pickle"))]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_the_change_is_the_mean_over_those_who_push(cluster: Cluster, tmp_path: Path, case: str) -> None:
    settings, fault, first_without = CASES[case]
    counts = ",".join([str(STEPS)] * 3)
    found = survivors(cluster, tmp_path, "local.py", fault, counts, json.dumps(vars(settings)))
    (first,), (other,) = found
    simulation = Simulation(first["initial"], settings, [STEPS] * 3, {fault[0]: first_without})
    simulation.run()
    assert difference(first["end"], other["end"]) == 0.0
    assert difference(first["end"], simulation.shared) < 1e-5
    for rank, (result,) in zip([rank for rank in range(3) if rank != fault[0]], found, strict=True):
        for own, expected in zip(result["own"], simulation.trajectory[rank], strict=True):
            assert difference(own, expected) < 1e-4


def test_who_is_left_takes_the_batches_of_a_lost_worker(cluster: Cluster, tmp_path: Path) -> None:
    fault: tuple[int, int, faults.Point] = (1, 2, "before a push")
    environment = {"TFPS_MODE": "async", "TFPS_UPDATE": "server"}
    first, other = survivors(cluster, tmp_path, "handed_out.py", fault, "3", **environment)
    assert len(first) == len(other) == 3
    for (mine, steps, _), (its, same, _) in zip(first, other, strict=True):
        assert difference(mine, its) == 0.0
        assert steps == same
    taken = [own + theirs for (_, _, own), (_, _, theirs) in zip(first, other, strict=True)]
    # The lost one has trained on two batches and was about to push another one. Its next step may have begun with one
    # more, though it waits for that push's reply, and then one more is drawn.
    assert 3 * 60 - 5 <= sum(taken) <= 3 * 60 - 3
    assert taken[-1] == 60
    assert first[-1][1] - first[-2][1] == 30  # the mean of their steps
