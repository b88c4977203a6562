"""A job of Elastic Horovod on this machine, whose workers count as hosts of their own.

`horovodrun` never uses a host again on which a process has died, and starts processes on other hosts by ssh. So each
process gets another address of loopback as its host, and the `ssh` that it finds runs the command here.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import tempfile
import time

from tools import peers
from tools.recovery.job import Step, read_steps

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SSH = '#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n'


class HorovodError(Exception):
    """The job has ended; the message has what it said last."""


class HorovodJob:
    """`workers` processes at a time; they run tools/recovery/horovod_worker.py.

    Args:
        more: environment variables.
    """

    def __init__(self, stack: contextlib.ExitStack, workers: int, units: int, row_ms: float, **more: str) -> None:
        self.folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._hosts = [f"127.0.1.{number + 1}" for number in range(workers)]
        self._all = list(self._hosts)
        self._tell_hosts()
        for name, text in (("ssh", _SSH), ("hosts.sh", f"#!/bin/sh\ncat {self.folder}/hosts\n")):
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o755)
        python = peers.environment("horovod").interpreter
        command = [str(python.with_name("horovodrun")), "-np", str(workers), "--min-np", "1", "--max-np", str(workers)]
        command += ["--host-discovery-script", str(self.folder / "hosts.sh"), "--network-interface", "lo"]
        command += [str(python), str(pathlib.Path(__file__).with_name("horovod_worker.py"))]
        path = f"{self.folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        variables = {"PATH": path, "PYTHONPATH": str(_ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        output = stack.enter_context((self.folder / "output").open("w"))
        self._driver = subprocess.Popen(
            [*command, str(self.folder), str(units), str(row_ms)],
            env={**os.environ, **variables, **more},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        stack.callback(self._end)

    def _tell_hosts(self) -> None:
        """What its discovery script finds, at once each second."""
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{host}:1\n" for host in self._hosts))
        new.rename(self.folder / "hosts")

    def _pid(self, host: str) -> int:
        return int((self.folder / f"{host}.pid").read_text())

    def _end(self) -> None:
        self._driver.terminate()
        for host in self._all:
            with contextlib.suppress(OSError, ValueError):
                os.kill(self._pid(host), signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._driver.wait(20.0)
        self._driver.kill()
        self._driver.wait()

    def kill(self, number: int) -> float:
        """Ends a worker; returns when."""
        os.kill(self._pid(self._hosts[number]), signal.SIGKILL)
        return time.monotonic()

    def replace(self, number: int) -> None:
        """Another host comes in place of one whose worker has ended."""
        self._hosts[number] = f"127.0.1.{len(self._all) + 1}"
        self._all.append(self._hosts[number])
        self._tell_hosts()

    def steps(self) -> list[list[Step]]:
        """Of each process that there has been.

        Raises:
            HorovodError: the job has ended.
        """
        if self._driver.poll() is not None:
            raise HorovodError(f"horovodrun ended with {self._driver.returncode}:\n{self.output()}")
        return [read_steps(self.folder / f"{host}.times") for host in self._all]

    def output(self) -> str:
        """What its processes have said last."""
        return "\n".join((self.folder / "output").read_text(errors="replace").splitlines()[-30:])
