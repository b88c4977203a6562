"""A worker that comes back to a program of any stages gets what the others have, or is refused by name, alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import processes
import pytest
from _pytest.mark import ParameterSet
from jobs import Cluster

from tfps import errors

HERE = Path(__file__).resolve().parent
SCRIPT, TIMEOUT_S = "../elastic/staged.py", 240.0


def back(
    cluster: Cluster, folder: Path, kind: str, leaves: str, differs: str = "", workers: int = 2, **more: str
) -> list[tuple[int, str]]:
    """What workers end with of which one leaves and comes back."""
    addresses, lost = cluster.pservers(1, workers), int(leaves.split()[0])
    environment = {
        "TFPS_MIN_WORKERS": "1",
        "LEAVES": leaves,
        "DIFFERS": differs,
        "PYTHONPATH": f"{HERE}{os.pathsep}{processes.PYTHONPATH}",
        **more,
    }
    with processes.started(SCRIPT, addresses, workers, [[str(folder), kind]] * workers, **environment) as started:
        started[lost].communicate(timeout=TIMEOUT_S)
        own = processes.worker_environment(addresses, lost, workers, **environment)
        started[lost] = processes.start(SCRIPT, str(folder), kind, environment=own)
        ((code, output),) = processes.finish([started[lost]], TIMEOUT_S)
        (folder / "refused").touch()
        results = processes.finish(started[:lost] + started[lost + 1 :], TIMEOUT_S)
    results.insert(lost, (code, output))
    plain = processes.start(SCRIPT, str(folder), kind, environment={"PYTHONPATH": environment["PYTHONPATH"]})
    ((code, output),) = processes.finish([plain], TIMEOUT_S)
    assert code == 0, output
    return results


def arrays(folder: Path, name: str) -> list[np.ndarray]:
    with np.load(folder / f"{name}.npz") as file:
        return [file[each] for each in file.files if each != "losses"]


def losses(folder: Path, name: str) -> list[float]:
    with np.load(folder / f"{name}.npz") as file:
        return list(file["losses"])


# The program, and who leaves: rank, number of the fit, epoch, batch.
EQUAL = {
    "a loop of fits with evaluate between": ("loop", "1 2 0 2"),
    "rank 0, a loop": ("loop", "0 3 0 1"),
    "a teacher within the step of the second stage": ("distilled", "1 2 1 2"),
    "a frozen encoder and a new head": ("head", "0 2 1 2"),
    "eager steps": ("eager", "1 1 1 2"),
    "eager steps, before the last of an epoch": ("eager", "1 1 1 7"),
    "eager steps, after the last of an epoch": ("eager", "1 1 1 8"),
    "two optimizers": ("two", "1 1 1 2"),
    "a table with an optimizer of its own, and rows that are loaded before": ("table", "1 1 1 2"),
    "a schedule that multiplies": ("decays", "1 1 1 2"),
    "a callback with a state, and one on rank 0 only": ("counts", "1 1 1 2"),
}
QUICK = ("a loop of fits with evaluate between",)


def some(cases: Iterable[str], quick: Sequence[str]) -> list[ParameterSet]:
    return [pytest.param(each, marks=() if each in quick else pytest.mark.long) for each in cases]


@pytest.mark.parametrize("case", some(EQUAL, QUICK))
def test_who_comes_back_ends_as_plain_keras(cluster: Cluster, tmp_path: Path, case: str) -> None:
    kind, leaves = EQUAL[case]
    results = back(cluster, tmp_path, kind, leaves)
    text = "\n".join(output for _, output in results)
    assert [code for code, _ in results] == [0, 0], text
    assert "takes part from now on, with 2 workers" in results[int(leaves[0])][1], text
    first, second, plain = (arrays(tmp_path, name) for name in ("0", "1", "plain"))
    for mine, other, its in zip(first, second, plain, strict=True):
        assert mine.tobytes() == other.tobytes(), text
        np.testing.assert_allclose(mine, its, rtol=0, atol=2e-5, err_msg=text)
    assert losses(tmp_path, "0") == losses(tmp_path, "1")
    assert len(losses(tmp_path, "0")) == len(losses(tmp_path, "plain"))
    logs = [(tmp_path / f"{rank}.csv").read_text().splitlines() for rank in range(2) if (tmp_path / "0.csv").exists()]
    assert all([line.split(",")[0] for line in each] == ["epoch", *"0123"] for each in logs), logs


@pytest.mark.long
def test_who_comes_back_where_a_lower_rank_is_gone_ends_as_plain_keras(cluster: Cluster, tmp_path: Path) -> None:
    """Its place among those that take part is not its number."""
    results = back(cluster, tmp_path, "two", "2 1 1 2", workers=3, GOES="0 1 0 4")
    text = "\n".join(output for _, output in results)
    assert [code for code, _ in results] == [-signal.SIGTERM, 0, 0], text
    for mine, other, its in zip(*(arrays(tmp_path, name) for name in ("1", "2", "plain")), strict=True):
        assert mine.tobytes() == other.tobytes(), text
        np.testing.assert_allclose(mine, its, rtol=0, atol=2e-5, err_msg=text)


# The program, what is different on who comes back, and what it is told.
REFUSED = {
    "labels that were predicted": ("labels", "1 2 1 2", "", "fit number 1 of the program is over"),
    "a stage that ended with an exception": ("caught", "1 2 1 2", "", "have gone on from fit 1 of the program without"),
    "eager steps before": (
        "batches",
        "1 1 1 2",
        "",
        "the program takes a step, or reduces values of all ranks, before",
    ),
    "another beta": ("here", "1 1 1 2", "beta", "its optimizer differs from the others': beta_1 is 0.8, not 0.9"),
    "other targets": ("here", "1 1 1 2", "data", "a worker that joins must make the batches that the others make"),
    "a variable more": ("here", "1 1 1 2", "variable", "declares what that has not declared"),
    "a callback that waits": ("here", "1 1 1 2", "waits", "has not come to its first step in time"),
    "a callback that reduces": ("here", "1 1 1 2", "reduces", "the workers do not train the same"),
    "what a callback assigns": ("here", "1 1 1 2", "assigned", "it has another value than the others of "),
}


@pytest.mark.long
@pytest.mark.parametrize("case", REFUSED)
def test_who_cannot_join_ends_alone_and_the_others_go_on(cluster: Cluster, tmp_path: Path, case: str) -> None:
    kind, leaves, differs, said = REFUSED[case]
    (mine, output), (code, refusal) = back(cluster, tmp_path, kind, leaves, differs, TFPS_STEP_TIMEOUT_S="60")
    text = f"{output}\n{refusal}"
    assert (mine, code) == (0, errors.REFUSED), text
    assert said in refusal, text
    assert "this worker cannot join the job under way" in refusal, text
    for own, its in zip(arrays(tmp_path, "0"), arrays(tmp_path, "plain"), strict=True):
        np.testing.assert_allclose(own, its, rtol=0, atol=2e-5, err_msg=text)
