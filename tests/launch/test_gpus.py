"""GPUs of a host divided among its workers; a program stands for nvidia-smi."""

from __future__ import annotations

import json
from pathlib import Path

import launching
import pytest
from launching import ROOT, WriteScript, launch

from tfps.launch.job import LocalRank
from tfps.launch.remote import parse_list, share, share_of_gpus, visible_gpus

NAME, GROWTH = "CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH"
LIST = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5a0b)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-77cd)
  MIG 3g.40gb     Device  0: (UUID: MIG-11aa)
  MIG 3g.40gb     Device  1: (UUID: MIG-22bb)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-9e9e)
"""


@pytest.fixture
def nvidia_smi(tmp_path: Path) -> str:
    """A PATH whose nvidia-smi shows four GPUs."""
    return program(tmp_path / "bin", "\n".join(f"echo 'GPU {i}: Model (UUID: GPU-{i}{i})'" for i in range(4)))


def program(folder: Path, script: str) -> str:
    folder.mkdir()
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("gpus", "workers", "shares"),
    [
        ("0123", 2, ["01", "23"]),
        ("0123", 4, ["0", "1", "2", "3"]),
        ("01234", 2, ["01", "234"]),
        ("01234567", 3, ["01", "234", "567"]),
        ("01", 3, ["0", "1", "0"]),
        ("0", 2, ["0", "0"]),
    ],
)
def test_each_worker_gets_neighbors_and_one_at_least(gpus: str, workers: int, shares: list[str]) -> None:
    assert ["".join(share(gpus, index, workers)) for index in range(workers)] == shares


def test_workers_divide_what_nvidia_smi_lists(nvidia_smi: str) -> None:
    environment = {"PATH": nvidia_smi}
    assert [share_of_gpus(environment, LocalRank(index, 2)) for index in (0, 1)] == [
        {NAME: "GPU-00,GPU-11"},
        {NAME: "GPU-22,GPU-33"},
    ]


def test_a_limit_that_is_there_is_divided_and_not_widened(nvidia_smi: str) -> None:
    environment = {"PATH": nvidia_smi, NAME: "5, 7"}
    assert [share_of_gpus(environment, LocalRank(index, 2))[NAME] for index in (0, 1)] == ["5", "7"]


def test_workers_that_share_a_gpu_do_not_take_all_of_its_memory_unless_told_so() -> None:
    assert share_of_gpus({NAME: "0"}, LocalRank(1, 2)) == {NAME: "0", GROWTH: "true"}
    assert share_of_gpus({NAME: "0", GROWTH: "false"}, LocalRank(1, 2)) == {NAME: "0"}


@pytest.mark.parametrize("limit", ["", "-1", "none", "NoDevFiles", "-1,0"])
def test_without_visible_gpus_nothing_changes(limit: str) -> None:
    assert share_of_gpus({NAME: limit}, LocalRank(0, 2)) == {}


def test_what_follows_an_invalid_name_is_not_visible() -> None:
    assert visible_gpus({NAME: "0,1,-1,2"}) == ["0", "1"]
    assert visible_gpus({NAME: "GPU-8a,MIG-3b,2"}) == ["GPU-8a", "MIG-3b", "2"]


def test_a_worker_alone_on_its_host_and_a_pserver_keep_what_they_have(nvidia_smi: str) -> None:
    assert share_of_gpus({"PATH": nvidia_smi}, LocalRank(0, 1)) == share_of_gpus({"PATH": nvidia_smi}, None) == {}


@pytest.mark.parametrize("script", ["echo 'NVIDIA-SMI has failed'; exit 9", "echo 'No devices were found'", "kill $$"])
def test_an_nvidia_smi_that_fails_or_finds_nothing_is_no_gpu(script: str, tmp_path: Path) -> None:
    assert visible_gpus({"PATH": program(tmp_path / "bin", script)}) == []


def test_without_nvidia_smi_there_is_no_gpu(tmp_path: Path) -> None:
    assert visible_gpus({"PATH": str(tmp_path)}) == []


def test_of_a_gpu_that_is_split_its_parts_count() -> None:
    assert parse_list(LIST) == ["GPU-5a0b", "MIG-11aa", "MIG-22bb", "GPU-9e9e"]


@launching.NEEDS_POSIX
def test_workers_on_one_machine_divide_its_gpus(nvidia_smi: str, write_script: WriteScript) -> None:
    script = write_script(f"import json; print('told', json.dumps([rank, os.environ.get({NAME!r})]))")
    result = launch("--workers", 2, "-x", f"PATH={nvidia_smi}", script, PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stderr
    told = sorted(json.loads(line.partition("told ")[2]) for line in result.stdout.splitlines() if "told " in line)
    assert told == [["0", "GPU-00,GPU-11"], ["1", "GPU-22,GPU-33"]]
