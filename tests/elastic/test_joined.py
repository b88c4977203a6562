"""A worker that joins a job under way takes part from the next epoch on, and nothing of the result shows it."""

from __future__ import annotations

import json
import os
import pickle
import signal
from pathlib import Path

import numpy as np
import processes
import pytest
from jobs import Cluster, poll

from tfps.errors import REFUSED
from tfps.types import Json

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 240.0
SCRIPT = "../elastic/lossy.py"


# What is trained, the number of the worker that is lost, and the step (of an epoch) after which it is there again.
CASES = {
    "after an epoch": ("arrays joined", 1, [0, 5]),
    "rank 0, after an epoch": ("dataset joined validation adam", 0, [0, 5]),
    "after an epoch, shuffled": ("arrays joined shuffled", 0, [0, 5]),
    "rank 0, with a backup": ("arrays joined backup", 0, [0, 5]),  # it would restore, if it did not join
    "too few are left": ("arrays few", 1, [9, 9]),
    "within an epoch": ("arrays joined adam", 1, [1, 1]),
    "within the first epoch": ("dataset joined", 0, [0, 3]),
    "within an update": ("arrays joined accumulated", 0, [1, 2]),
    "within an epoch, shuffled": ("arrays joined shuffled", 1, [1, 2]),
    "where the data goes on": ("dataset repeated joined", 1, [1, 2]),
    "between epochs where the data goes on": ("dataset repeated joined", 0, [0, 5]),
    "within an epoch, update on the server": ("arrays joined adam server", 1, [1, 1]),
    "rank 0, update on the server": ("dataset joined adam server", 0, [0, 3]),
    "rank 0, update on the server, after an epoch": ("arrays joined adam server assigned", 0, [0, 5]),
    "update on the server, compressed": ("arrays joined server compressed", 0, [1, 2]),
    "too few are left, update on the server": ("arrays few server", 1, [9, 9]),
    "where an epoch of data that goes on begins with an agreed batch": ("dataset repeated joined", 1, [0, 4]),
    "PyDataset": ("pydataset joined reordered adam", 1, [1, 2]),
    "PyDataset, after an epoch": ("pydataset joined reordered validation", 0, [0, 5]),
    "PyDataset, shuffled": ("pydataset joined shuffled", 0, [1, 2]),
    "PyDataset, after an epoch, shuffled": ("pydataset joined shuffled", 1, [0, 5]),
    "PyDataset with workers": ("pydataset joined workers reordered", 0, [1, 2]),
    "PyDataset with workers, shuffled": ("pydataset joined workers shuffled", 1, [1, 2]),
    "PyDataset with workers, without end": ("pydataset joined workers endless adam", 1, [1, 1]),
    "PyDataset, without end, between epochs": ("pydataset joined endless", 0, [0, 3]),
    "PyDataset, epochs of a part, within one": ("pydataset joined part shuffled", 1, [0, 2]),
    "PyDataset, epochs of a part, after the data": ("pydataset joined part", 0, [0, 3]),
    "generator": ("yielded joined adam", 1, [1, 1]),
    "generator, between epochs": ("yielded joined", 0, [0, 3]),
    "generator without steps_per_epoch": ("yielded finite joined", 1, [0, 3]),
    "generator that has ended": ("yielded finite joined", 0, [0, 5]),
}


SOME = ("rank 0, update on the server",)  # in the quick suite


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in SOME else pytest.mark.long) for case in CASES])
def test_a_killed_worker_comes_back(cluster: Cluster, tmp_path: Path, case: str) -> None:
    kind, lost, after = CASES[case]
    results, environment = killed_and_back(cluster, tmp_path, kind, lost, after)
    text = "\n".join(output for _, output in results)
    assert [code for code, _ in results] == [0, 0, 0], text
    found = [pickle.loads((tmp_path / f"rank{rank}.pickle").read_bytes()) for rank in range(3)]
    for each in found:
        assert list(each["ranks"]) == [0, 1, 2], text
        assert [w.tobytes() for w in each["weights"]] == [w.tobytes() for w in found[0]["weights"]]
    first, other = (rank for rank in range(3) if rank != lost)
    assert found[first]["divided"] == found[other]["divided"]
    assert found[first]["divided"][-1] == (0, 1, 2)
    assert found[lost]["divided"][-6:] == found[first]["divided"][-6:]
    if "few" in kind:
        assert "2 workers are left, fewer than min_workers=3: training waits" in text
        # The step in flight, and up to two batches that were agreed on.
        assert sum(ranks == (0, 2) for ranks in found[first]["divided"]) <= 3, found[first]["divided"]
    assert "takes part from now on, with 3 workers" in results[lost][1]
    if "dataset " not in kind or "pydataset" in kind:
        histories = [json.loads((tmp_path / f"history{rank}.json").read_text()) for rank in range(3)]
        assert histories[0] == histories[1] == histories[2]
        assert len(histories[0]["loss"]) == 4

    if ("arrays" in kind and "shuffled" in kind) or "compressed" in kind:
        return  # plain Keras has another order, or all of each gradient
    plain = processes.start(SCRIPT, str(tmp_path), "plain", str(first), environment=environment)
    ((code, output),) = processes.finish([plain], TIMEOUT_S)
    assert code == 0, output
    (expected,) = pickle.loads((tmp_path / "plain.pickle").read_bytes())
    for mine, its in zip(found[0]["weights"], expected, strict=True):
        said = f"{found[first]['divided']} {found[first]['losses']}"
        np.testing.assert_allclose(mine, its, rtol=0, atol=1e-5, err_msg=said)


@pytest.mark.long
def test_one_that_makes_other_batches_ends_alone(cluster: Cluster, tmp_path: Path) -> None:
    results, _ = killed_and_back(cluster, tmp_path, "pydataset joined counting", 1, [1, 2])
    assert [code for code, _ in results] == [0, REFUSED, 0], "\n".join(output for _, output in results)
    assert "a worker that joins must make the batches that the others make, but in batch" in results[1][1]
    assert "rank 1 cannot join, and the job goes on without it" in results[0][1]


@pytest.mark.long
def test_one_that_dies_while_it_gets_the_state_of_the_others_stops_nobody(cluster: Cluster, tmp_path: Path) -> None:
    """Of the others one learns of it before that begins, and one after."""
    fault = (0, "in a hand-over", signal.SIGKILL)
    results, _ = killed_and_back(cluster, tmp_path, "arrays joined told early", 1, [0, 5], fault)
    assert [code for code, _ in results] == [0, -signal.SIGKILL, 0], "\n".join(output for _, output in results)
    found = [pickle.loads((tmp_path / f"rank{rank}.pickle").read_bytes()) for rank in (0, 2)]
    assert [w.tobytes() for w in found[0]["weights"]] == [w.tobytes() for w in found[1]["weights"]]


def killed_and_back(
    cluster: Cluster, folder: Path, kind: str, lost: int, after: list[int], again: Json = None
) -> tuple[list[tuple[int, str]], dict[str, str]]:
    """What three workers end with of which one is lost and started again, with the fault `again`; their environment."""
    addresses = cluster.pservers(2, 3)
    environment = {
        "TFPS_MIN_WORKERS": "3" if "few" in kind else "1",
        "TFPS_SLICE_BYTES": "2048",
        "EPOCHS": "4",
        "JOIN_AFTER": json.dumps(after),
        "PYTHONPATH": f"{HERE}{os.pathsep}{processes.PYTHONPATH}",
    }
    if "server" in kind:
        environment["TFPS_UPDATE"] = "server"
    if "compressed" in kind:
        environment["TFPS_COMPRESSION"] = "topk:0.1"
    fault = {lost: (1, "between slices", signal.SIGKILL)}
    arguments = [[str(folder), kind, json.dumps(fault.get(rank))] for rank in range(3)]
    with processes.started(SCRIPT, addresses, 3, arguments, **environment) as started:
        started[lost].communicate(timeout=TIMEOUT_S)
        if "joined" in kind:
            poll((folder / "waits").exists)
        own = processes.worker_environment(addresses, lost, 3, **environment)
        started[lost] = processes.start(SCRIPT, str(folder), kind, json.dumps(again), environment=own)
        results = processes.finish(started, TIMEOUT_S)
    return results, environment
