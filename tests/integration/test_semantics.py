"""What `tf.distribute` documents of a strategy, and of variables that every replica writes for itself."""

from __future__ import annotations

import re
from pathlib import Path

import processes
import pytest
from jobs import Cluster


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_two_workers_do_what_tf_distribute_documents(cluster: Cluster, devices: int) -> None:
    with processes.started("api.py", cluster.pservers(2, 2), 2, [[str(devices)]] * 2) as running:
        for output in processes.outputs(running):
            assert output.count("passed:") == 18
            assert "FAILED" not in output


@pytest.mark.parametrize(
    ("workers", "devices"),
    [(2, 1), (1, 2), (2, 2)],
)
@pytest.mark.long
def test_what_replicas_write_for_themselves_is_read_as_of_one_process(
    cluster: Cluster, workers: int, devices: int, tmp_path: Path
) -> None:
    arguments = [[str(devices), str(tmp_path)]] * workers
    with processes.started("reading.py", cluster.pservers(2, workers), workers, arguments) as running:
        for output in processes.outputs(running):
            assert "all passed" in output


def test_a_rank_that_reads_alone_in_the_middle_of_training_is_told_what_to_do(cluster: Cluster) -> None:
    with processes.started("reading.py", cluster.pservers(2, 2), 2, [["alone"]] * 2) as running:
        (first, output), (second, other) = processes.finish(running)
    assert first == second == 1
    assert re.search(r"raised WaitTimeoutError rank 0: variables .*call strategy.combine\(\) on every rank", output)
    assert "tfps: waits: rank 0" in output
    assert "waits for rank 0" in other
