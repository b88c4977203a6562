"""Where the processes of a job run: on this machine, or on hosts that ssh reaches; or srun (`tfps.launch.slurm`)."""

from __future__ import annotations

import os
import re
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tfps.launch.gpus import share_of_gpus
from tfps.launch.job import LOOPBACK, LocalRank, Placement, has_only_ipv6
from tfps.launch.remote import Request
from tfps.launch.supervisor import Command

SILENCE_S = 120.0  # a host that hears nothing of the launcher for so long ends what it runs for it
_CARRIED = ("TFPS_", "TF_", "KERAS_", "PYTHON")
_NOT_FOUND = (126, 127)  # exit codes of a shell
_SSH_FAILED = 255  # what ssh reports of itself
_SSH_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),  # a question would hang
    *("-o", "ConnectTimeout=20"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),  # a host that is silent for a minute is lost
    *("-o", "ControlMaster=no"),  # a connection that is shared already is used, but no process shares its own
    *("-o", "ClearAllForwardings=yes"),  # the ports would be taken after the first process
)
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
QUIET = {_LEVEL: "2"}  # errors only; by default for all processes
# TensorFlow writes these before it reads the level.
_NOTE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    r"|I0000 .*\] (oneDNN custom operations are on\.|Could not find cuda drivers on your machine)"
)


def is_note(line: str) -> bool:
    """Whether `line` says nothing but how TensorFlow was built."""
    return _NOTE.match(line) is not None


def wants_notes(variables: Iterable[str]) -> bool:
    """Whether the user wants TensorFlow's notes; `variables`: those that are set, NAME or NAME=VALUE."""
    return any(each.partition("=")[0] == _LEVEL for each in variables)


@dataclass(frozen=True)
class Task:
    """A process of the job, as it runs on its host.

    Args:
        name: as shown: "worker 0".
        variables: of its environment, besides those of its host.
        local_rank: None: not a worker.
    """

    name: str
    argv: tuple[str, ...]
    variables: Mapping[str, str]
    colour: int
    local_rank: LocalRank | None = None


@dataclass(frozen=True)
class Engine(ABC):
    """Starts processes on hosts.

    Args:
        environment: of the launcher.
        chosen: variables that every process gets, whatever they are called.
    """

    placement: Placement
    environment: Mapping[str, str] = field(repr=False)
    chosen: Mapping[str, str] = field(default_factory=dict, repr=False, kw_only=True)

    @abstractmethod
    def listens_at(self, host: str) -> str:
        """The address that a pserver on `host` listens at; "": all interfaces."""

    @abstractmethod
    def reached_at(self, host: str, address: str) -> str:
        """The address that workers reach a pserver on `host` at, which says that it listens at `address`."""

    @abstractmethod
    def on(self, host: str, task: Task) -> Command:
        """The command that runs `task` on `host`, to be started here."""

    def explain(self, host: str, code: int, answered: bool) -> str:
        """What a process's exit code says about `host`, and what to do; "": nothing.

        Args:
            answered: the process itself ran.
        """
        return ""


@dataclass(frozen=True)
class Local(Engine):
    """All processes on this machine, with the environment of the launcher."""

    def listens_at(self, host: str) -> str:
        return "127.0.0.1"

    def reached_at(self, host: str, address: str) -> str:
        return address

    def on(self, host: str, task: Task) -> Command:
        # A TF_CONFIG would describe another job; certificates are for hosts, and this job stays on one.
        kept = {
            name: value
            for name, value in self.environment.items()
            if name != "TF_CONFIG" and not name.startswith("TFPS_TLS_")
        }
        # Unbuffered: lines are shown as they are written.
        variables = {"PYTHONUNBUFFERED": "1", **QUIET, **kept, **self.chosen, **task.variables}
        return Command(task.name, task.argv, {**variables, **share_of_gpus(variables, task.local_rank)}, task.colour)


@dataclass(frozen=True)
class Remote(Engine):
    """Processes on hosts that a program such as ssh reaches: it runs `tfps.launch.remote` there.

    Hosts need the same Python, tfps and program as this one, in the same places.

    Variables of the launcher's environment go along if they begin with one of `_CARRIED`.

    Args:
        directory: that the processes run in.
        token: of the job; travels on standard input.
        grace_s: from SIGTERM to SIGKILL.
    """

    directory: str
    token: str = field(repr=False)
    grace_s: float

    @abstractmethod
    def reach(self, host: str, command: str) -> list[str]:
        """The arguments that run the shell command `command` on `host`."""

    def listens_at(self, host: str) -> str:
        if host in LOOPBACK:
            return host.strip("[]")
        return "::" if has_only_ipv6(host) else ""

    def reached_at(self, host: str, address: str) -> str:
        # A pserver on all interfaces does not know how others reach it.
        return f"{host}:{address.rpartition(':')[2]}"

    def on(self, host: str, task: Task) -> Command:
        carried = {
            name: value
            for name, value in self.environment.items()
            if name.startswith(_CARRIED) and name not in ("TF_CONFIG", "TFPS_TOKEN_FILE")
        }
        variables = {**QUIET, **carried, **self.chosen, **task.variables}
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
    """Starts processes with the installed OpenSSH.

    Args:
        program: ssh and its options, which win over ours.
    """

    program: tuple[str, ...] = ("ssh",)

    def reach(self, host: str, command: str) -> list[str]:
        return [*self.program, *_SSH_OPTIONS, host.strip("[]"), command]

    def explain(self, host: str, code: int, answered: bool) -> str:
        if code != _SSH_FAILED:
            return super().explain(host, code, answered)
        if answered:
            return f"ssh says so when it loses {host}"
        return f"`{shlex.join([*self.program, host.strip('[]'), 'true'])}` must work without a question"
