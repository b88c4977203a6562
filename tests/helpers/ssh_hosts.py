"""Hosts that ssh reaches: network namespaces with an sshd each, own names, own loopback, and a key for the test."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import jobs
import launching
import psutil
import pytest

from tools import netlab
from tools.netlab import Host, Netlab

PORT = 2222
END_S = 120.0
_SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin")

_SERVER = """\
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
"""
_CLIENT = """\
Port {port}
User root
IdentityFile {folder}/key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile /dev/null
StrictHostKeyChecking yes
"""


def unavailable() -> str | None:
    """Why there can be no such hosts here, or None."""
    missing = [name for name in ("ssh", "ssh-keygen") if shutil.which(name) is None]
    if _SSHD is None or missing:
        return f"needs OpenSSH's programs sshd, ssh and ssh-keygen, not found: {', '.join(missing) or 'sshd'}"
    return netlab.unavailable()


REASON = unavailable()
NEEDS_SSH_HOSTS = pytest.mark.skipif(REASON is not None, reason=str(REASON))


class SshHosts:
    """The hosts of `lab`, "host0" and so on. `command` is what `--ssh` gets."""

    def __init__(self, lab: Netlab, folder: Path) -> None:
        self.hosts, self.folder = lab.hosts, folder
        self._servers: dict[int, subprocess.Popen[str]] = {}
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd demands this place
        for name in ("key", "host_key", "other_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=END_S)
        (folder / "authorized_keys").write_text((folder / "key.pub").read_text())
        (folder / "known_hosts").write_text(f"* {(folder / 'host_key.pub').read_text()}")
        (folder / "ssh_config").write_text(_CLIENT.format(port=PORT, folder=folder))
        self.command = f"ssh -F {folder / 'ssh_config'}"

    def serve(
        self, index: int, *, without: Sequence[Path | str] = (), instead: Mapping[Path, Path] | None = None
    ) -> None:
        """Starts the sshd of a host, in place of an earlier one.

        Args:
            without: directories that are empty on this host.
            instead: directory -> what this host has there.
        """
        self.stop(index)
        config = self.folder / f"sshd_config{index}"
        config.write_text(_SERVER.format(port=PORT, folder=self.folder))
        mounts = [f"mount -t tmpfs none '{path}' && " for path in without]
        mounts += [f"mount --bind '{own}' '{path}' && " for path, own in (instead or {}).items()]
        log = (self.folder / f"sshd{index}.log").open("w")
        with log:
            self._servers[index] = self.hosts[index].popen(
                ["sh", "-c", f"{''.join(mounts)}exec {_SSHD} -D -e -f {config}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        jobs.poll(lambda: "Server listening" in Path(log.name).read_text())

    def stop(self, index: int) -> None:
        """Ends the sshd of a host, if it has one."""
        if (server := self._servers.pop(index, None)) is not None:
            server.kill()
            server.wait(END_S)

    def start(
        self, *arguments: object, on: int = 0, cwd: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """A `tfps_launch --ssh ...` on a host; `variables`: more of its environment."""
        return self.hosts[on].popen(
            launching.command("--ssh", self.command, *arguments),
            env=launching.environment(**(variables or {})),
            cwd=cwd or self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def launch(self, *arguments: object, timeout_s: float = END_S, **more: str) -> subprocess.CompletedProcess[str]:
        """The same, to its end; `more`: variables of its environment."""
        with self.start(*arguments, variables=more) as process:
            output, errors = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def link(self, index: int, state: str) -> None:
        """Takes the link of a host "down", or "up" again."""
        command = ["ip", "-n", self.hosts[index].namespace, "link", "set", "eth0", state]
        subprocess.run(command, check=True, timeout=END_S)

    def running(self) -> list[str]:
        """What runs on the hosts besides their sshd."""
        return [
            found for host in self.hosts for found in running_on(host, {each.pid for each in self._servers.values()})
        ]


def running_on(host: Host, but: set[int]) -> list[str]:
    """The command lines of what runs on a host."""
    listed = subprocess.run(
        ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True, timeout=END_S
    )
    found: list[str] = []
    for pid in {int(word) for word in listed.stdout.split()} - but:
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{host.name}: {' '.join(process.cmdline())}")
        except psutil.NoSuchProcess:
            continue
    return found


def read_until(stream: IO[str] | None, ending: str, times: int = 1) -> list[str]:
    """The lines up to the one that ends so, for the so-manieth time."""
    lines: list[str] = []
    for line in stream or ():
        lines.append(line.rstrip("\n"))
        times -= lines[-1].endswith(ending)
        if not times:
            return lines
    raise AssertionError(f"it ended before {ending!r}:\n" + "\n".join(lines))
