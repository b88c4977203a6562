"""A Slurm of two nodes, which are both this machine."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from jobs import unused_ports
from launching import ROOT

PROGRAMS = ("slurmctld", "slurmd", "srun", "salloc", "sbatch", "scontrol")
_PATH = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin"  # where Debian has the daemons
START_S, END_S = 60.0, 120.0
NODES = ("node1", "node2")
_CPUS = 4  # of each node, says Slurm; more than this machine may have
_GPUS = {"node1": ("/dev/null", "/dev/zero"), "node2": ("/dev/full", "/dev/random")}  # Slurm wants devices


def find_missing() -> str:
    """Why there can be no Slurm here; "": there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"needs Slurm (Debian: slurm-wlm); missing: {', '.join(missing)}" if missing else ""


NEEDS_SLURM = pytest.mark.skipif(bool(find_missing()), reason=find_missing() or "Slurm is there")


class SlurmCluster:
    """The daemons of a Slurm whose files are all in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._stack = folder, ExitStack()
        port = unused_ports(3)
        for name in ("state", *NODES):
            (folder / name).mkdir()
        self._conf = folder / "slurm.conf"
        self._conf.write_text(_configuration(folder, port))
        (folder / "gres.conf").write_text(
            "".join(f"NodeName={node} Name=gpu File={file}\n" for node, files in _GPUS.items() for file in files)
        )
        # Variables of an allocation that the tests themselves may be in would lead elsewhere.
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "TFPS_"))}
        self.environment = {
            **outside,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{_PATH}",
            "PYTHONPATH": str(ROOT),
            "SLURM_CONF": str(self._conf),
            "TERM": "xterm",
        }
        try:
            self._start("slurmctld", "-D")
            for node in NODES:
                self._start("slurmd", "-D", "-N", node)
            self.poll(lambda: self.ask("sinfo", "-h", "-o", "%D %t").split() == ["2", "idle"], START_S)
        except BaseException:
            self._stack.close()
            raise

    def _start(self, *command: str) -> None:
        log = self._stack.enter_context((self.folder / f"{'-'.join(command)}.log").open("wb"))
        program = shutil.which(command[0], path=_PATH) or command[0]
        daemon = subprocess.Popen(
            [program, *command[1:], "-f", str(self._conf)], env=self.environment, stdout=log, stderr=log
        )

        def end() -> None:
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

        self._stack.callback(end)

    def close(self) -> None:
        """Ends its jobs, then its daemons."""
        try:
            self.ask("scancel", "--user", getpass.getuser())
            self.poll(lambda: not self.processes(), END_S)
        finally:
            self._stack.close()

    def command(self, *arguments: object) -> list[str]:
        """With the program's path: the tests' own PATH may lack it."""
        name, *rest = map(str, arguments)
        return [shutil.which(name, path=_PATH) or name, *rest]

    def ask(self, *arguments: object) -> str:
        """What a client says on standard output, whatever its exit code."""
        found = subprocess.run(
            self.command(*arguments), env=self.environment, capture_output=True, text=True, timeout=START_S, check=False
        )
        return found.stdout

    def run(self, *arguments: object, timeout_s: float = END_S) -> subprocess.CompletedProcess[str]:
        """Runs a client to its end."""
        return subprocess.run(
            self.command(*arguments),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd=self.folder,
        )

    def steps(self) -> list[str]:
        """The names of the steps that run, but for what belongs to a batch script."""
        names = self.ask("squeue", "--steps", "--noheader", "--format=%j").split()
        return sorted(name for name in names if name not in ("batch", "extern", "interactive"))

    def processes(self) -> list[psutil.Process]:
        """What runs within steps of this Slurm."""
        own = []
        for process in psutil.process_iter():
            try:
                variables = process.environ()
            except psutil.Error:
                continue
            if variables.get("SLURM_CONF") == str(self._conf) and "SLURM_STEP_ID" in variables:
                own.append(process)
        return [process for process in own if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def poll(self, until: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not until():
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log"))
                raise TimeoutError(f"not within {timeout_s:g} s; what the daemons say:\n{logs}")
            time.sleep(0.1)


def _configuration(folder: Path, port: int) -> str:
    host, user = socket.gethostname(), getpass.getuser()
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port + 1 + index} CPUs={_CPUS} RealMemory=4000 "
        "Gres=gpu:2 State=UNKNOWN"
        for index, node in enumerate(NODES)
    )
    return f"""\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
InactiveLimit=0
KillWait=5
DefMemPerCPU=100
GresTypes=gpu
{nodes}
PartitionName=all Nodes={",".join(NODES)} Default=YES MaxTime=INFINITE State=UP
"""
