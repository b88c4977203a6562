"""Files of Keras that two workers save to one path have what rank 0 has, where workers differ."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import processes
import pytest

from tfps.pserver.server import ParameterServer

pytestmark = pytest.mark.timeout(600)
PROGRAM = "saved_one_after_the_other"


@pytest.mark.parametrize(
    "mode",
    [
        {"TFPS_MODE": "diloco", "TFPS_INNER_STEPS": "4"},
        pytest.param({"TFPS_MODE": "async", "TFPS_UPDATE": "server"}, marks=pytest.mark.long),
    ],
)
def test_a_file_is_rank_0s_whoever_saves_last(mode: Mapping[str, str], tmp_path: Path) -> None:
    server = ParameterServer("127.0.0.1", 0, workers=2)
    arguments = [[str(tmp_path), f"programs_shared.{PROGRAM}"]] * 2
    try:
        with processes.started("program.py", [server.address], 2, arguments, **mode) as running:
            processes.outputs(running, 550.0)
    finally:
        server.stop()
    one, other = (pickle.loads((tmp_path / f"results_{rank}.pickle").read_bytes())[PROGRAM] for rank in range(2))
    assert "error" not in one, one["error"]
    assert "error" not in other, other["error"]
    assert other["own scale"] < one["own scale"]
    assert one["scales"] == other["scales"] == [one["own scale"]] * 4
