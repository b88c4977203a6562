"""Workers that TF_CONFIG or a cluster resolver of TensorFlow describes train together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import processes
import pytest
from preloaded import Process

from tfps.pserver.server import ParameterServer


@pytest.mark.long
def test_every_way_to_describe_a_cluster_makes_a_job_whose_workers_end_equal(tmp_path: Path) -> None:
    servers = [ParameterServer("127.0.0.1", 0, workers=2) for _ in range(4)]
    running: list[Process] = []
    try:
        ports = [server.address.rpartition(":")[2] for server in servers]
        files = [tmp_path / f"{rank}.npz" for rank in range(2)]
        running = [
            processes.start("clustered.py", str(rank), str(files[rank]), *ports, environment={}) for rank in range(2)
        ]
        first, _ = processes.outputs(running)
    finally:
        for process in running:
            process.kill()
        for server in servers:
            server.stop()
    assert "evaluated" in first
    one, other = (dict(np.load(file)) for file in files)
    assert {name.partition("/")[0] for name in one} == {"tf_config", "simple", "slurm", "kubernetes"}
    for name, weight in one.items():
        assert weight.tobytes() == other[name].tobytes(), name
        assert weight.tobytes() == one[f"simple/{name.partition('/')[2]}"].tobytes() or "kubernetes" in name, name
