"""Training goes on without lost workers, and is plain Keras' without the rows that were theirs (Config.min_workers)."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import faults
import numpy as np
import processes
import pytest
from _pytest.mark import ParameterSet
from jobs import Cluster

from tfps.types import Argument, Json

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 240.0


@dataclass
class Trained:
    """What is left of a job of three workers."""

    codes: list[int]
    outputs: list[str]
    survivors: dict[int, Json]
    plain: list[list[np.ndarray]]  # what plain Keras may end with
    text: str = field(init=False)

    def __post_init__(self) -> None:
        self.text = "\n".join(self.outputs)

    def check(self, lost: Sequence[int] = (1,), *, exact: bool = True) -> None:
        """Survivors are bitwise equal, and plain Keras' within 1e-5 without the rows that they saw lost."""
        left = [rank for rank in range(3) if rank not in lost]
        assert sorted(self.survivors) == left, self.text
        first, *others = self.survivors.values()
        assert list(first["ranks"]) == left
        for other in others:
            assert [w.tobytes() for w in other["weights"]] == [w.tobytes() for w in first["weights"]]
            assert other["divided"] == first["divided"]
            assert sorted(other["losses"]) == sorted(first["losses"])
        nearest = min(self.plain, key=lambda weights: np.abs(weights[0] - first["weights"][0]).max())
        for mine, its in zip(first["weights"], nearest, strict=True) if exact else ():
            np.testing.assert_allclose(mine, its, rtol=0, atol=1e-5, err_msg=f"{first['divided']} {first['losses']}")


def trained(
    cluster: Cluster, folder: Path, kind: str, faults_of: dict[int, tuple[Argument, ...]], more: dict[str, str]
) -> Trained:
    """Trains with three workers, of which some get their fault, and then plain Keras without what was lost."""
    addresses = cluster.pservers(2, 3)
    environment = {
        "TFPS_MIN_WORKERS": "1",
        "TFPS_SLICE_BYTES": "2048",
        "PYTHONPATH": f"{HERE}{os.pathsep}{processes.PYTHONPATH}",
        **more,
    }
    arguments = [[str(folder), kind, json.dumps(faults_of.get(rank))] for rank in range(3)]
    with processes.started("../elastic/lossy.py", addresses, 3, arguments, **environment) as started:
        ended = processes.finish([each for rank, each in enumerate(started) if rank not in faults_of], TIMEOUT_S)
        for rank in faults_of:
            started[rank].send_signal(signal.SIGCONT)  # one that was stopped learns what has become of it
        results = processes.finish(started, TIMEOUT_S)
    assert all(code == 0 for code, _ in ended), results
    survivors = {
        rank: pickle.loads(path.read_bytes()) for rank in range(3) if (path := folder / f"rank{rank}.pickle").exists()
    }
    assert survivors, "\n".join(output for _, output in results)
    plain = processes.start("../elastic/lossy.py", str(folder), "plain", str(min(survivors)), environment=environment)
    ((code, output),) = processes.finish([plain], TIMEOUT_S)
    assert code == 0, output
    return Trained(
        [code for code, _ in results],
        [output for _, output in results],
        survivors,
        pickle.loads((folder / "plain.pickle").read_bytes()),
    )


CASES: dict[str, tuple[str, dict[int, tuple[Argument, ...]], dict[str, str]]] = {
    "rank 0, between two slices": ("arrays", {0: (3, "between slices")}, {}),
    "before a push": ("arrays adam", {1: (3, "before a push")}, {}),
    "after the last push": ("dataset", {2: (3, "after the last push")}, {}),
    "in an update": ("generator", {1: (4, "in an update")}, {}),
    "in an announcement": ("arrays", {0: (4, "in an announcement")}, {}),
    "in a declaration": ("arrays", {1: (1, "in a declaration")}, {}),
    "in a later declaration": ("arrays", {0: (2, "in a declaration")}, {}),
    "in the exchange of initial values": ("arrays", {0: (0, "in the exchange of initial values")}, {}),
    "in a validation": ("arrays validation", {0: (1, "in an evaluation")}, {}),
    "in a save": ("arrays save", {0: (0, "in a save")}, {}),
    "nobody, in a custom loop": ("loop", {}, {}),
    "in a custom loop": ("loop", {1: (3, "between slices")}, {}),
    "in a loop of each worker alone": ("alone", {1: (3, "before a push")}, {}),
    "two at once": ("arrays", {0: (3, "between slices"), 2: (3, "before a push")}, {}),
    "one after the other": ("arrays", {0: (2, "before a push"), 1: (6, "after the last push")}, {}),
    "update on the server": ("arrays", {1: (3, "between slices")}, {"TFPS_UPDATE": "server"}),
    "update on the server, rank 0": ("arrays adam", {0: (3, "between slices")}, {"TFPS_UPDATE": "server"}),
    "stopped": ("arrays", {1: (3, "before a push", signal.SIGSTOP)}, {}),
    "compressed": ("arrays", {0: (3, "between slices")}, {"TFPS_COMPRESSION": "int8"}),
    "update on the server, compressed": (
        "arrays",
        {1: (3, "between slices")},
        {"TFPS_UPDATE": "server", "TFPS_COMPRESSION": "topk:0.1"},
    ),
    "with two devices": ("arrays", {1: (3, "between slices")}, {"DEVICES": "2"}),
    "several steps at a time": ("several steps", {1: (2, "before a push")}, {}),
    "eagerly": ("eagerly", {1: (4, "in an announcement")}, {}),
    "accumulated": ("arrays accumulated", {1: (1, "between slices")}, {}),
    "accumulated, rank 0": ("arrays accumulated", {0: (5, "in an announcement")}, {}),
    "over gRPC": ("arrays", {1: (3, "between slices")}, {"TFPS_TRANSPORT": "grpc", "TFPS_SHARED_MEMORY": "0"}),
    "over TCP": ("arrays", {1: (3, "between slices")}, {"TFPS_SHARED_MEMORY": "0"}),
}


@pytest.mark.long
@pytest.mark.parametrize("point", ["in an update", "before a push", "in an announcement"])
def test_a_worker_that_gets_sigterm_ends_its_step_and_no_row_is_lost(
    cluster: Cluster, tmp_path: Path, point: faults.Point
) -> None:
    job = trained(cluster, tmp_path, "arrays", {1: (3, point, signal.SIGTERM)}, {})
    job.check([1])
    assert job.codes == [0, -signal.SIGTERM, 0]
    found = job.survivors[0]
    first_without = [1 in ranks for ranks in found["divided"]].index(False)
    assert first_without < len(found["divided"]) - 1
    assert {step for _, _, step, _ in found["losses"]} == {first_without}
    assert "this worker ends its step and leaves the job" in job.outputs[1]
    assert "left at step" in job.outputs[0]


@pytest.mark.parametrize(
    "kind", ["dataset accumulated several steps", pytest.param("arrays accumulated", marks=pytest.mark.long)]
)
def test_a_worker_that_gets_sigterm_ends_its_update(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    job = trained(cluster, tmp_path, kind, {1: (5, "in an announcement", signal.SIGTERM)}, {})
    job.check([1])
    assert job.codes == [0, -signal.SIGTERM, 0]
    assert [1 in ranks for ranks in job.survivors[0]["divided"]] == [True] * 8 + [False] * 4


SOME = ("stopped",)  # in the quick suite; each of the others differs in one thing


def _case(name: str) -> ParameterSet:
    return pytest.param(name, marks=() if name in SOME else pytest.mark.long)


@pytest.mark.parametrize("case", list(map(_case, CASES)))
def test_a_worker_is_lost(cluster: Cluster, tmp_path: Path, case: str) -> None:
    kind, faults_of, more = CASES[case]
    job = trained(cluster, tmp_path, kind, faults_of, more)
    job.check(list(faults_of), exact="TFPS_COMPRESSION" not in more and kind != "eagerly")
    if case == "stopped":
        assert job.codes[1] == 1
        assert "the other workers went on without this one: rank 1" in job.outputs[1]
        assert "has been silent for" in job.outputs[0]


PROCESS_1 = """
import os, signal, time, types
from tfps.strategy.preemption import leave_on_sigterm
exchange = types.SimpleNamespace(close=lambda reason: print(f"left: {reason}"))
leave_on_sigterm(types.SimpleNamespace(settle=lambda s: None, exchange=exchange, before_close=[]), None)
print(os.getpid())
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""
UNSHARE = ["unshare", "--pid", "--fork", "--kill-child"]


@pytest.mark.long
def test_a_worker_that_is_process_1_of_a_container_ends_after_sigterm() -> None:
    if subprocess.run([*UNSHARE, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs a PID namespace, as root has")
    environment = {**os.environ, "PYTHONPATH": processes.PYTHONPATH}
    command = [*UNSHARE, sys.executable, "-c", PROCESS_1]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stdout.split("\n") == ["1", "left: SIGTERM", ""]
    assert done.returncode == 128 + signal.SIGTERM
