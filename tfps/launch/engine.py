"""Where the processes of a job run: on this machine, on hosts that ssh reaches, or in a Slurm allocation.

Tested in tests/launch/test_engine.py, tests/launch/test_ssh.py and tests/launch/test_slurm.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from tfps.errors import ConfigError
from tfps.launch.job import HASHES_ALIKE, LOOPBACK, Host, Placement, Task, checked_hosts, families
from tfps.launch.remote import Request, output_of, share_of_gpus
from tfps.launch.supervisor import SSH_FAILED, Command

SILENCE_S = 120.0  # a host that hears nothing of the launcher for so long ends what it runs for it
_CARRIED = ("TFPS_", "TF_", "KERAS_", "PYTHON")
_NOT_FOUND = (126, 127)  # exit codes of a shell
_SSH_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),  # a question would hang
    *("-o", "ConnectTimeout=20"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),  # a host that is silent for a minute is lost
    *("-o", "ControlMaster=no"),  # a connection that is shared already is used, but no process shares its own
    *("-o", "ClearAllForwardings=yes"),  # the ports would be taken after the first process
)
_ASK_S = 60.0  # for Slurm's controller to answer
# A step sees all that the allocation has on its node (CPUs, memory, GPUs) and lets the other steps see it, too: workers
# divide the GPUs by themselves. Each is one task, the only one with a standard input.
_SRUN_OPTIONS = (
    *("--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--cpu-bind=none", "--mpi=none", "--export=ALL"),
    *("--input=0", "--unbuffered", "--kill-on-bad-exit=0", "--quiet"),
)
# sbatch and salloc leave their options here, and srun would take them for those of each step.
_SET_BY_SLURM = re.compile(
    r"SRUN_\w+|SLURM_(NTASKS\w*|NPROCS|NNODES|JOB_NUM_NODES|TASKS_PER_NODE|CPUS?_\w+|GPUS?(_\w+)?|\w*GRES\w*|TRES_\w+|"
    r"MEM_\w+|DIST\w+|EXACT|EXCLUSIVE|HINT|THREADS?\w*|CORE_SPEC|OVERCOMMIT|SPREAD_JOB|USE_MIN_NODES|STD\w+MODE|"
    r"LABELIO|TEST_EXEC|REMOTE_CWD|WORKING_DIR|EXPORT_ENV|STEP\w*)"
)
_SRUN_NOISE = re.compile(
    r"srun: error: \S+ tasks? \S+ Exited with exit code \d+|"  # the launcher reports it itself
    r"srun: cluster configuration lacks support for cpu binding"  # which none needs none
)
LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_DEFAULTS = {LOG_LEVEL: "2", **HASHES_ALIKE}  # of all processes; 2: errors only
# Says nothing but how TensorFlow was built and that there is no GPU, whatever the level.
NOTE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    r"|I0000 .*\] (oneDNN custom operations are on\.|Could not find cuda drivers on your machine)"
    r"|.*\] (Unable to register cu\w+ factory|computation placer already registered)"
    r"|.*\] failed call to cuInit: .*(UNKNOWN ERROR \(303\)|CUDA_ERROR_NO_DEVICE)"  # 303: no driver is installed
)


def wants_notes(level: str | None) -> bool:
    """Whether somebody who sets TensorFlow's log level to `level` asks for more than errors; None: nobody has."""
    return level is not None and not (level.strip().isdecimal() and int(level) >= int(_DEFAULTS[LOG_LEVEL]))


@dataclass(frozen=True)
class Engine:
    """Starts processes on this machine, with the environment of the launcher; `Remote` on other hosts."""

    placement: Placement
    environment: Mapping[str, str] = field(repr=False)
    chosen: Mapping[str, str] = field(default_factory=dict, repr=False, kw_only=True)  # variables of every process
    is_remote: ClassVar[bool] = False

    def listens_at(self, host: str) -> str:
        """The address that a pserver on `host` listens at; "": all interfaces."""
        return "127.0.0.1"

    def reached_at(self, host: str, address: str) -> str:
        """The address that workers reach a pserver on `host` at, which says that it listens at `address`."""
        return address

    def on(self, host: str, task: Task) -> Command:
        """The command that runs `task` on `host`, to be started here."""
        # A TF_CONFIG would describe another job; certificates are for hosts, and this job stays on one.
        kept = {
            name: value
            for name, value in self.environment.items()
            if name != "TF_CONFIG" and not name.startswith("TFPS_TLS_")
        }
        # Unbuffered: lines are shown as they are written.
        variables = {"PYTHONUNBUFFERED": "1", **_DEFAULTS, **kept, **self.chosen, **task.variables}
        return Command(task.name, task.argv, {**variables, **share_of_gpus(variables, task.local_rank)}, task.colour)

    def explain(self, host: str, code: int, answered: bool) -> str:
        """What a process's exit code says about `host`, and what to do; "": nothing. `answered`: the process ran."""
        return ""


@dataclass(frozen=True)
class Remote(Engine, ABC):
    """Processes on hosts that a program such as ssh reaches: it runs `tfps.launch.remote` there, in `directory`.

    Hosts need the same Python, tfps and program as this one, in the same places. Variables of the launcher's
    environment go along if they begin with one of `_CARRIED`. The token travels on standard input.
    """

    is_remote = True
    directory: str
    token: str = field(repr=False)
    grace_s: float

    @abstractmethod
    def reach(self, host: str, command: str) -> list[str]:
        """The arguments that run the shell command `command` on `host`."""

    def listens_at(self, host: str) -> str:
        if host in LOOPBACK:
            return host.strip("[]")
        return "::" if families(host) == {socket.AF_INET6} else ""

    def reached_at(self, host: str, address: str) -> str:
        # A pserver on all interfaces does not know how others reach it.
        return f"{host}:{address.rpartition(':')[2]}"

    def on(self, host: str, task: Task) -> Command:
        carried = {
            name: value
            for name, value in self.environment.items()
            if name.startswith(_CARRIED) and name not in ("TF_CONFIG", "TFPS_TOKEN_FILE")
        }
        variables = {**_DEFAULTS, **carried, **self.chosen, **task.variables}
        request = Request(
            task.argv, self.directory, variables, self.grace_s, task.local_rank, self.token, silence_s=SILENCE_S
        )
        python = [sys.executable, "-m", "tfps.launch.remote"]
        if path := self.environment.get("PYTHONPATH"):
            # It starts in another directory.
            path = os.pathsep.join(str(Path(self.directory, part)) for part in path.split(os.pathsep))
            python = ["env", f"PYTHONPATH={path}", *python]
        argv = self.reach(host, shlex.join(python))
        return Command(task.name, argv, self.environment, task.colour, stdin=request.line(), host=host)

    def explain(self, host: str, code: int, answered: bool) -> str:
        if answered:
            return ""
        if code in _NOT_FOUND:
            return f"{host} needs the same Python as this host, at {sys.executable}"
        return f"`{sys.executable} -m tfps.launch.remote` must run on {host}: install the same tfps there"


@dataclass(frozen=True)
class Ssh(Remote):
    """Starts processes with the installed OpenSSH."""

    program: tuple[str, ...] = ("ssh",)  # and its options, which win over ours

    def reach(self, host: str, command: str) -> list[str]:
        return [*self.program, *_SSH_OPTIONS, host.strip("[]"), command]

    def explain(self, host: str, code: int, answered: bool) -> str:
        if code != SSH_FAILED:
            return super().explain(host, code, answered)
        if answered:
            return f"ssh says so when it loses {host}"
        return f"`{shlex.join([*self.program, host.strip('[]'), 'true'])}` must work without a question"


@dataclass(frozen=True)
class Slurm(Remote):
    """Starts each process as a step of one task, which shares with the others what the allocation has."""

    def reach(self, host: str, command: str) -> list[str]:
        return ["srun", *_SRUN_OPTIONS, f"--nodelist={host}", "sh", "-c", f"exec {command}"]

    def reached_at(self, host: str, address: str) -> str:
        return f"{_address(host)}:{address.rpartition(':')[2]}"

    def on(self, host: str, task: Task) -> Command:
        command = super().on(host, task)
        srun, *rest = command.argv
        gpus = []
        # The GPUs of all workers on the host: with --gpus-per-task each step would get those of one task.
        asked = self.environment.get("SLURM_GPUS_PER_TASK", "")
        if found := re.fullmatch(r"(?P<kind>\w+:)?(?P<count>[0-9]+)", asked):
            gpus = [f"--gres=gpu:{found['kind'] or ''}{int(found['count']) * self.placement.workers.count(host)}"]
        argv = [srun, f"--job-name={task.name.replace(' ', '-')}", *gpus, *rest]
        kept = {name: value for name, value in self.environment.items() if not _SET_BY_SLURM.fullmatch(name)}
        return replace(command, argv=argv, environment=kept, noise=_SRUN_NOISE)


def allocated(environment: Mapping[str, str]) -> tuple[Host, ...]:
    """Returns the nodes of the allocation, with a worker for each of its tasks; if it has none, one for each node."""
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
    try:
        names = output_of("scontrol", "show", "hostnames", nodes, timeout_s=_ASK_S).split()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"scontrol cannot say which nodes {nodes} are: {error}") from None
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
    """Parses SLURM_TASKS_PER_NODE: "2(x3),1" are two tasks on each of three nodes and one on a fourth."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([1-9][0-9]*)(?:\(x([0-9]+)\))?\s*", part)
        if found is None:
            raise ConfigError(f"SLURM_TASKS_PER_NODE must be like 2(x3),1, got {text!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


@functools.cache
def _address(node: str) -> str:
    """What the other nodes reach `node` by: its name, or if that is no name of a host, the address that Slurm uses."""
    if families(node):
        return node
    address = node
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = output_of("scontrol", "--oneliner", "show", "node", node, timeout_s=_ASK_S)
        if found := re.search(r"\bNodeAddr=(\S+)", said):
            address = found[1]
    return f"[{address}]" if ":" in address else address
