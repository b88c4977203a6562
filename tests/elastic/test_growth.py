"""Workers beyond those of the start join a job under way, and nothing of the result shows it (Config.max_workers)."""

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

from tfps.types import Json

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 240.0
SCRIPT = "../elastic/lossy.py"
MOST = 4


# What is trained, with how many workers, who joins, after which step of an epoch, and the fault of one of these.
CASES: dict[str, tuple[str, int, list[int | None], list[int], Json]] = {
    "a third in the second epoch": ("dataset joined adam", 2, [2], [1, 0], None),
    "from two to four": ("arrays joined adam", 2, [2, 3], [1, 1], None),
    "from one to three, who get their numbers": ("arrays joined", 1, [None, None], [0, 5], None),
    "and then one is lost": ("arrays joined", 2, [2, 3], [1, 1], [15, "between slices", signal.SIGKILL]),
    "update on the server": ("arrays joined adam server", 2, [2, 3], [1, 1], None),
    "rows of a table": ("arrays joined table", 2, [3], [0, 3], None),
    "rows of a table, update on the server": ("arrays joined table adam server", 1, [2, 1], [1, 1], None),
}


def run(
    cluster: Cluster, folder: Path, kind: str, workers: int, joiners: list[int | None], after: list[int], fault: Json
) -> tuple[list[tuple[int, str]], dict[str, str]]:
    """What all workers end with, those that join last, of whom the last has the `fault`; and their environment."""
    servers = [cluster.pserver(workers) for _ in range(2)]
    addresses = [server.address for server in servers]
    environment = {
        "TFPS_MIN_WORKERS": "1",
        "TFPS_MAX_WORKERS": str(MOST),
        "TFPS_SLICE_BYTES": "2048",
        "EPOCHS": "4",
        "JOIN_AFTER": json.dumps(after),
        "NEWCOMERS": str(len(joiners)),
        "PYTHONPATH": f"{HERE}{os.pathsep}{processes.PYTHONPATH}",
        **({"TFPS_UPDATE": "server"} if "server" in kind else {}),
    }
    with processes.started(SCRIPT, addresses, workers, [[str(folder), kind, "null"]] * workers, **environment) as all_:
        poll(lambda: len(servers[0].status().members) == workers)  # else one without a number is of the start
        for number, rank in enumerate(joiners):
            own = processes.worker_environment(addresses, rank or 0, workers, **environment)
            own = {name: text for name, text in own.items() if rank is not None or name != "TFPS_RANK"}
            its = json.dumps(fault if number == len(joiners) - 1 else None)
            all_.append(processes.start(SCRIPT, str(folder), kind, its, environment=own))
        return processes.finish(all_, TIMEOUT_S), environment


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_job_grows_while_it_trains(cluster: Cluster, tmp_path: Path, case: str) -> None:
    kind, workers, joiners, after, fault = CASES[case]
    results, environment = run(cluster, tmp_path, kind, workers, joiners, after, fault)
    text = "\n".join(output for _, output in results)
    assert [code for code, _ in results] == [0] * (len(results) - 1) + [-signal.SIGKILL if fault else 0], text
    there = sorted(int(path.stem.removeprefix("rank")) for path in tmp_path.glob("rank*.pickle"))
    found = {rank: pickle.loads((tmp_path / f"rank{rank}.pickle").read_bytes()) for rank in there}
    start = tuple(range(workers))
    grown = tuple(sorted({*start, *(rank or workers + number for number, rank in enumerate(joiners))}))
    assert there == [rank for rank in grown if not fault or rank != joiners[-1]]
    divided = found[0]["divided"]
    ends = [before for before, now in zip(divided, [*divided[1:], ()], strict=True) if before != now]
    assert ends == [start, grown, *([tuple(there)] if fault else [])]
    for each in found.values():
        assert tuple(each["ranks"]) == tuple(there)
        assert [w.tobytes() for w in each["weights"]] == [w.tobytes() for w in found[0]["weights"]]
        assert {loss[0] for loss in each["losses"]} == ({joiners[-1]} if fault else set())
    if "table" in kind:  # a job that does not grow
        (tmp_path / "fixed").mkdir()
        fixed = {name: value for name, value in environment.items() if "MAX" not in name}
        arguments = [[str(tmp_path / "fixed"), kind.replace("joined ", ""), "null"]] * 2
        with processes.started(SCRIPT, cluster.pservers(2, 2), 2, arguments, **fixed) as pair:
            processes.outputs(pair)
        expected = pickle.loads((tmp_path / "fixed" / "rank0.pickle").read_bytes())["weights"]
    else:
        plain = processes.start(SCRIPT, str(tmp_path), "plain", "0", environment=environment)
        processes.outputs([plain])
        (expected,) = pickle.loads((tmp_path / "plain.pickle").read_bytes())
    for mine, its in zip(found[0]["weights"], expected, strict=True):
        np.testing.assert_allclose(mine, its, rtol=0, atol=1e-5, err_msg=f"{divided}")
