"""1 % of the packets of a network are lost: training goes on, nobody is taken for lost, and the result is the same."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import processes
import pytest
from jobs import Cluster

from tools import children, netlab
from tools.netlab import Netlab
from tools.netlab_loss import Passed
from tools.netlab_probe import FRAME

REASON = netlab.unavailable()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.long]

PROGRAM = "wide"  # 0.35 MB of gradients in each of 50 steps
JOB = {"TFPS_MIN_WORKERS": "1", "TFPS_DETERMINISTIC": "1"}
Weights = dict[str, np.ndarray]


def across(lab: Netlab, out: Path, more: Mapping[str, str]) -> tuple[list[Weights], str]:
    """What two workers end with, and what they and two pservers say, each of which is on a host of its own."""
    serve = ["-m", "tfps.pserver.cli", "--port=7070", "--workers=2", "--insecure", "--host=0.0.0.0"]
    addresses = [f"{host.address}:7070" for host in lab.hosts[:2]]
    files, said = [out / f"{rank}.npz" for rank in range(2)], list[str]()
    with contextlib.ExitStack() as stack:

        def start(on: int, arguments: list[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
            process = children.python(arguments, variables, lab.hosts[on].popen, stderr=subprocess.STDOUT)
            return stack.enter_context(process)

        servers = [start(on, serve, {}) for on in range(2)]
        for server in servers:
            said.append(children.answer(server, processes.TIMEOUT_S))
        workers = []
        for rank, file in enumerate(files):
            place = processes.worker_environment(addresses, rank, 2, PYTHONPATH=processes.PYTHONPATH, **more)
            script = [str(processes.HERE / "train.py"), str(file), PROGRAM]
            workers.append(start(2 + rank, script, {"TF_CPP_MIN_LOG_LEVEL": "2", **place}))
        said += [worker.communicate(timeout=processes.TIMEOUT_S)[0] for worker in workers]
        for server in servers:
            server.terminate()
            said.append(server.communicate(timeout=processes.TIMEOUT_S)[0])
        codes = [process.returncode for process in workers]
    text = "\n".join(said)
    assert codes == [0, 0], text
    return [dict(np.load(file)) for file in files], text


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """What one process without a strategy ends with."""
    out = tmp_path_factory.mktemp("plain") / "weights.npz"
    processes.outputs([processes.start("train.py", str(out), PROGRAM, environment={})])
    return dict(np.load(out))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """What the job ends with on one host."""
    out = tmp_path_factory.mktemp("undisturbed")
    arguments = [[str(out / f"{rank}.npz"), PROGRAM] for rank in range(2)]
    with Cluster() as cluster, processes.started("train.py", cluster.pservers(2, 2), 2, arguments, **JOB) as running:
        processes.outputs(running)
    return dict(np.load(out / "0.npz"))


def assert_single_packets_were_lost(passed: Passed) -> None:
    assert passed.largest == FRAME
    assert passed.missed == 0
    assert passed.frames > 10_000
    assert 0.005 < passed.dropped / passed.frames < 0.02


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_losing_1_percent_of_packets_changes_nothing(
    transport: str, plain: Weights, undisturbed: Weights, tmp_path: Path
) -> None:
    with Netlab(hosts=4, rate_mbit=1000) as lab, lab.lossy(lab.hosts[2:], 0.01) as loss:
        more = {**JOB, "TFPS_SHARED_MEMORY": "0", "TFPS_TRANSPORT": transport}
        (first, second), said = across(lab, tmp_path, more)
        passed = loss.look()
    assert_single_packets_were_lost(passed)
    assert said.count("all its workers have left") == 2, said
    for word in ("goes on", "lacks", "meet", "died", "silent"):
        assert word not in said, said
    assert first.keys() == second.keys() == undisturbed.keys() == plain.keys()
    for name, value in first.items():
        assert value.tobytes() == second[name].tobytes() == undisturbed[name].tobytes(), name
        np.testing.assert_allclose(value, plain[name], rtol=0, atol=1e-5, err_msg=name)
