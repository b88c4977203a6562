"""`tfps_launch --slurm`, inside an allocation: the job's processes on its nodes, each started by srun."""

from __future__ import annotations

import functools
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tfps.errors import ConfigError
from tfps.launch.engine import Remote, Task
from tfps.launch.job import Host, checked_hosts
from tfps.launch.supervisor import Command

_ASK_S = 60.0  # for Slurm's controller to answer
# A step sees all that the allocation has on its node (CPUs, memory, GPUs) and lets the other steps see it, too: workers
# divide the GPUs by themselves. Each is one task, the only one with a standard input.
_STEP = (
    *("--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--cpu-bind=none", "--mpi=none", "--export=ALL"),
    *("--input=0", "--unbuffered", "--kill-on-bad-exit=0", "--quiet"),
)
# sbatch and salloc leave their options here, and srun would take them for those of each step.
_OPTIONS = re.compile(
    r"SRUN_\w+|SLURM_(NTASKS\w*|NPROCS|NNODES|JOB_NUM_NODES|TASKS_PER_NODE|CPUS?_\w+|GPUS?(_\w+)?|\w*GRES\w*|TRES_\w+|"
    r"MEM_\w+|DIST\w+|EXACT|EXCLUSIVE|HINT|THREADS?\w*|CORE_SPEC|OVERCOMMIT|SPREAD_JOB|USE_MIN_NODES|STD\w+MODE|"
    r"LABELIO|TEST_EXEC|REMOTE_CWD|WORKING_DIR|EXPORT_ENV|STEP\w*)"
)
_NOISE = re.compile(
    r"srun: error: \S+ tasks? \S+ Exited with exit code \d+|"  # the launcher reports it itself
    r"srun: cluster configuration lacks support for cpu binding"  # which none needs none
)


@dataclass(frozen=True)
class Slurm(Remote):
    """Starts each process as a step of one task, which shares with the others what the allocation has."""

    def reach(self, host: str, command: str) -> list[str]:
        return ["srun", *_STEP, f"--nodelist={host}", "sh", "-c", f"exec {command}"]

    def reached_at(self, host: str, address: str) -> str:
        return f"{_address(host)}:{address.rpartition(':')[2]}"

    def on(self, host: str, task: Task) -> Command:
        command = super().on(host, task)
        srun, *rest = command.argv
        argv = [srun, f"--job-name={task.name.replace(' ', '-')}", *self._gpus(host), *rest]
        kept = {name: value for name, value in self.environment.items() if not _OPTIONS.fullmatch(name)}
        return replace(command, argv=argv, environment=kept, noise=_NOISE)

    def _gpus(self, host: str) -> list[str]:
        """Asks for the GPUs of all workers on `host`: with --gpus-per-task each step would get those of one task."""
        found = re.fullmatch(r"(?P<kind>\w+:)?(?P<count>[0-9]+)", self.environment.get("SLURM_GPUS_PER_TASK", ""))
        if found is None:
            return []
        return [f"--gres=gpu:{found['kind'] or ''}{int(found['count']) * self.placement.workers.count(host)}"]


def allocated(environment: Mapping[str, str]) -> tuple[Host, ...]:
    """Returns the nodes of the allocation, with a worker for each of its tasks; if it has none, one for each node.

    Raises:
        ConfigError: this is no allocation, one of several tasks of a step, or Slurm does not say what it has.
    """
    nodes = environment.get("SLURM_JOB_NODELIST", "").strip()
    if not nodes:
        raise ConfigError(
            "--slurm works inside an allocation, but SLURM_JOB_NODELIST is not set; use it in a script for sbatch, or "
            "under salloc"
        )
    if (tasks := environment.get("SLURM_STEP_NUM_TASKS", "1")) != "1":
        raise ConfigError(
            f"--slurm starts all workers of the allocation, but srun has started {tasks} launchers "
            f"(SLURM_STEP_NUM_TASKS={tasks}); start tfps_launch once, without srun"
        )
    names = _names(nodes)
    # An allocation without a number of tasks says as many as it has CPUs.
    has_tasks = "SLURM_NTASKS" in environment or "SLURM_NPROCS" in environment
    counts = tasks_of_nodes(environment.get("SLURM_TASKS_PER_NODE", "")) if has_tasks else [1] * len(names)
    if len(counts) != len(names):
        raise ConfigError(
            f"SLURM_TASKS_PER_NODE={environment.get('SLURM_TASKS_PER_NODE')} is for {len(counts)} nodes, but "
            f"SLURM_JOB_NODELIST={nodes} has {len(names)}; within a step of srun these differ: start tfps_launch "
            "outside, in the script for sbatch or under salloc"
        )
    return checked_hosts([Host(name, count) for name, count in zip(names, counts, strict=True)])


def tasks_of_nodes(text: str) -> list[int]:
    """Parses SLURM_TASKS_PER_NODE: "2(x3),1" are two tasks on each of three nodes and one on a fourth.

    Raises:
        ConfigError: it is malformed.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([1-9][0-9]*)(?:\(x([0-9]+)\))?\s*", part)
        if found is None:
            raise ConfigError(f"SLURM_TASKS_PER_NODE must be like 2(x3),1, got {text!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _names(nodes: str) -> list[str]:
    try:
        return _ask("show", "hostnames", nodes).split()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"scontrol cannot say which nodes {nodes} are: {error}") from None


@functools.cache
def _address(node: str) -> str:
    """What the other nodes reach `node` by: its name, or if that is no name of a host, the address that Slurm uses."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        try:
            found = re.search(r"\bNodeAddr=(\S+)", _ask("--oneliner", "show", "node", node))
        except (OSError, subprocess.SubprocessError):
            found = None
        address = found[1] if found else node
        return f"[{address}]" if ":" in address else address
    return node


def _ask(*arguments: str) -> str:
    command: Sequence[str] = ("scontrol", *arguments)
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_S, check=True
    ).stdout
