"""`tfps_launch --slurm`, inside an allocation: the job's processes on its nodes, each started by srun."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from tfps.errors import ConfigError
from tfps.launch.engine import Remote
from tfps.launch.hosts import Host, checked_hosts

_ASK_S = 60.0


@dataclass(frozen=True)
class Slurm(Remote):
    """Starts each process as a step of one task that shares what the allocation has."""

    def reach(self, host: str, command: str) -> list[str]:
        step = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--unbuffered", "--kill-on-bad-exit=0"]
        return ["srun", *step, "--quiet", "--input=0", "sh", "-c", command]


def allocated(environment: Mapping[str, str]) -> tuple[Host, ...]:
    """Returns the nodes of the allocation, with a worker for each of its tasks.

    Raises:
        ConfigError: this is no allocation, or Slurm does not say what it has.
    """
    nodes = environment.get("SLURM_JOB_NODELIST", "").strip()
    if not nodes:
        raise ConfigError(
            "--slurm works inside an allocation, but SLURM_JOB_NODELIST is not set; use it in a script for sbatch, or "
            "under salloc"
        )
    names = _names(nodes)
    tasks = _tasks(environment.get("SLURM_TASKS_PER_NODE", "1"))
    if len(tasks) != len(names):
        raise ConfigError(
            f"SLURM_TASKS_PER_NODE={environment.get('SLURM_TASKS_PER_NODE')} is for {len(tasks)} nodes, but "
            f"SLURM_JOB_NODELIST={nodes} has {len(names)}"
        )
    return checked_hosts([Host(name, count) for name, count in zip(names, tasks, strict=True)])


def _names(nodes: str) -> list[str]:
    try:
        found = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=_ASK_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"scontrol cannot say which nodes {nodes} are: {error}") from None
    return found.stdout.split()


def _tasks(text: str) -> list[int]:
    """Parses "2(x3),1": two tasks on each of three nodes, one on a fourth."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([1-9][0-9]*)(?:\(x([0-9]+)\))?\s*", part)
        if found is None:
            raise ConfigError(f"SLURM_TASKS_PER_NODE must be like 2(x3),1, got {text!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts
